"""The counters of received and computed work are bounded, only grow, and appear in a load."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import LoadInquirer, ParallelState, WorkCounters
from scheduler_components.load.work_counters import MAX_DISPATCHERS
from scheduler_components.testing import FakePool, FakeQueues
from scheduler_components.values import DecodeMoments, LoadSections


@pytest.mark.parametrize("ticket", [-1, 2**63])
def test_a_ticket_that_does_not_fit_a_report_is_dropped(ticket: int) -> None:
    work = WorkCounters()
    work.on_request_received("a", ticket)
    work.on_request_received("a", 3)
    assert (work.dispatched_watermarks, work.invalid_tickets) == ((("a", 3),), 1)


def test_watermarks_are_bounded_and_drop_the_longest_silent_dispatcher() -> None:
    work = WorkCounters()
    for index in range(MAX_DISPATCHERS):
        work.on_request_received(f"d{index}", 1)
    work.on_request_received("d0", 2)
    work.on_request_received("new", 1)
    names = dict(work.dispatched_watermarks)
    assert len(names) == MAX_DISPATCHERS
    assert names["d0"] == 2
    assert "d1" not in names


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(-1, 1))))
@example([(-1, -1.0)])
def test_prefill_totals_only_grow(steps: list[tuple[int, float]]) -> None:
    work = WorkCounters()
    for tokens, busy_s in steps:
        before = (work.total_prefill_uncached_tokens, work.total_prefill_busy_us)
        work.record_prefill(tokens, busy_s)
        assert before <= (work.total_prefill_uncached_tokens, work.total_prefill_busy_us)
        assert work.total_prefill_busy_us >= before[1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 64), st.floats(-1, 1), st.integers(0, 64)), max_size=30))
@example([(0, 1.0, 0), (3, 0.0, 3), (3, -0.5, 3)])
def test_decode_moments_are_the_sums_over_steps_that_computed(steps: list[tuple[int, float, int]]) -> None:
    work, counted = WorkCounters(), []
    for requests, busy_s, tokens in steps:
        before = work.decode_moments
        work.record_decode(requests, busy_s, tokens)
        us = round(busy_s * 1e6)
        if requests > 0 and us > 0:
            counted.append((1, requests, us, requests * requests, requests * us, tokens))
            assert before is not work.decode_moments  # a report that was made before keeps what it said
    expected = tuple(map(sum, zip(*counted, strict=True)))
    assert work.decode_moments == (DecodeMoments(*expected) if counted else None)


def test_decode_moments_give_the_line_of_step_times() -> None:
    work = WorkCounters()
    for requests in (4, 9, 16, 33):
        work.record_decode(requests, (5_000 + 20 * requests) * 1e-6, requests)
    moments = work.decode_moments
    assert moments is not None
    covariance = moments.steps * moments.requests_time_us - moments.requests * moments.time_us
    slope = covariance / (moments.steps * moments.requests_squared - moments.requests**2)
    assert slope == pytest.approx(20)
    assert (moments.time_us - slope * moments.requests) / moments.steps == pytest.approx(5_000)
    assert msgspec.json.decode(msgspec.json.encode(moments)) == list(msgspec.structs.astuple(moments))  # as SGLang's


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([f"d{index}" for index in range(MAX_DISPATCHERS + 9)]), st.integers(0, 9))))
def test_watermarks_are_the_highest_tickets_of_the_last_dispatchers_sorted(tickets: list[tuple[str, int]]) -> None:
    work, model = WorkCounters(), dict[str, int]()
    for name, ticket in tickets:
        work.on_request_received(name, ticket)
        model[name] = max(ticket, model.pop(name, ticket))  # to the end: the one heard last
        if len(model) > MAX_DISPATCHERS:
            del model[next(iter(model))]
        assert work.dispatched_watermarks == tuple(sorted(model.items()))


def test_a_load_contains_the_totals() -> None:
    work = WorkCounters()
    work.on_request_received("a", 7)
    work.record_prefill(100, 0.002)
    load = LoadInquirer(parallel=ParallelState(), queues=FakeQueues(), pool=FakePool(), work=work).get_loads()
    assert (load.total_prefill_uncached_tokens, load.total_prefill_busy_us) == (100, 2000)
    assert load.dispatched_watermarks == (("a", 7),)


def test_a_request_between_two_reads_is_counted_twice_and_never_missed() -> None:
    work = WorkCounters()

    class ComesInBetween:
        def load_sections(self) -> LoadSections:
            work.on_request_received("a", 8)
            return LoadSections()

    work.on_request_received("a", 7)
    inquirer = LoadInquirer(
        parallel=ParallelState(),
        queues=FakeQueues(),
        pool=FakePool(),
        sections=ComesInBetween().load_sections,
        work=work,
    )
    assert inquirer.get_loads().dispatched_watermarks == (("a", 7),)
    assert inquirer.get_loads().dispatched_watermarks == (("a", 8),)


def test_several_decode_steps_count_like_single_ones() -> None:
    one_by_one, together = WorkCounters(), WorkCounters()
    for time_us in (1000, 1200, 1300):
        one_by_one.record_decode(7, time_us / 1e6, 7)
    together.record_decodes(2, 7, 2200, 14)
    together.record_decodes(1, 7, 1300, 7)
    assert together.decode_moments == one_by_one.decode_moments
