"""Times of a request never shrink, never are negative, and add up, over retractions and clocks that are set back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components.metrics import RequestLatencyRecorder, RequestTimeStats
from scheduler_components.metrics.request_times import Histogram, RequestPhase
from scheduler_components.testing import VirtualClock

clock_readings = st.floats(-1e9, 1e9)
TOKENS = 4
actions = st.lists(st.tuples(st.sampled_from([*RequestPhase, TOKENS, TOKENS]), clock_readings), max_size=30)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(4))
@given(clock_readings, actions)
@example(5.0, [(RequestPhase.PREFILL, 3.0), (RequestPhase.QUEUE, 1.0), (RequestPhase.FINISHED, 4.0)])
@example(0.0, [(TOKENS, 1.0), (RequestPhase.QUEUE, 2.0), (RequestPhase.PREFILL, -9.0), (TOKENS, -8.0)])
def test_no_time_is_negative_or_shrinks_and_phases_add_up(start: float, steps: list[tuple[int, float]]) -> None:
    times = RequestTimeStats(start)
    forward_s, last = 0.0, start
    for action, now in steps:
        before = list(times.times_s)
        was_ended = times.phase is RequestPhase.FINISHED
        if action == TOKENS:
            interval_s = times.on_token(now)
            assert interval_s is None or interval_s >= 0.0
        else:
            times.move_to(RequestPhase(action), now)
        assert all(0.0 <= old <= new for old, new in zip(before, times.times_s, strict=True))
        # From Python 3.12 on, sum() rounds once, and `+` twice.
        assert times.e2e_s == sum((times.queue_s, times.prefill_s, times.decode_s))
        assert was_ended <= (times.phase is RequestPhase.FINISHED and before == times.times_s)
        if not was_ended:
            forward_s += max(0.0, now - last)
            last = now
    assert abs(times.e2e_s - forward_s) <= 1e-6 * max(1.0, forward_s)
    for moment_s in (times.first_queue_s, times.first_token_s):
        assert moment_s is None or 0.0 <= moment_s <= times.e2e_s


def test_each_phase_continues_after_a_retraction() -> None:
    times = RequestTimeStats(0.0)
    times.move_to(RequestPhase.PREFILL, 2.0)
    assert times.on_token(3.0) is None
    assert times.on_token(3.5) == 0.5
    times.move_to(RequestPhase.QUEUE, 4.0)
    times.move_to(RequestPhase.PREFILL, 14.0)
    assert times.on_token(15.0) == 11.5
    times.move_to(RequestPhase.FINISHED, 16.0)
    assert (times.queue_s, times.prefill_s, times.decode_s, times.e2e_s) == (12.0, 2.0, 2.0, 16.0)
    assert (times.first_queue_s, times.first_token_s, times.num_retractions) == (2.0, 3.0, 1)


latency_actions = st.lists(st.tuples(st.sampled_from("aartttte"), st.floats(-2, 5), st.integers(-1, 4)), max_size=40)


@settings(deadline=None)
@given(latency_actions)
def test_histograms_count_each_request_once_and_each_token_after_the_first_step(
    steps: list[tuple[str, float, int]],
) -> None:
    clock = VirtualClock(0.0)
    latencies = RequestLatencyRecorder(clock=clock)
    times = latencies.on_queued()
    token_steps: list[int] = []
    is_admitted = is_ended = False
    for action, step_s, num_tokens in steps:
        clock.now_s += step_s
        if action == "a":
            latencies.on_admitted(times)
        elif action == "r":
            latencies.on_retracted(times)
        elif action == "t":
            latencies.on_tokens(times, num_tokens)
            if num_tokens > 0 and not is_ended:
                token_steps.append(num_tokens)
        else:
            latencies.on_finished(times)
        is_admitted |= not is_ended and (action == "a" or (action == "t" and num_tokens > 0))
        is_ended |= action == "e"
    totals = latencies.stats()
    assert totals.queue.count == is_admitted
    assert totals.time_to_first_token.count == bool(token_steps)
    assert totals.inter_token.count == sum(token_steps[1:])
    assert totals.e2e.count == totals.prefill.count == totals.decode.count == is_ended
    assert all(histogram.total >= 0 for histogram in (totals.queue, totals.e2e, totals.inter_token))
    if is_ended:
        assert totals.e2e.total == times.e2e_s


steps_of_many = st.lists(
    st.tuples(
        st.sampled_from("aartttttttea."),
        st.sampled_from([-0.25, 0.0, 0.5, 0.5, 3.0]),
        st.lists(st.integers(0, 4), unique=True),
        st.sampled_from([-1, 0, 1, 1, 1, 2, 4]),
    ),
    max_size=40,
)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(4))
@given(steps_of_many)
@example([("t", 0.5, [0, 1, 2], 1), ("t", 0.5, [0, 1], 1), ("r", 0.0, [1], 1), ("t", 0.5, [0, 1, 2], 1)])
@example([("t", 0.5, [0, 1], 1), (".", 0.5, [1], 1), ("t", 0.5, [0, 1], 1)])
@example([("t", 0.5, [0, 1], 1), ("e", 0.5, [1], 1), ("t", 0.5, [0, 1], 1)])
def test_tokens_recorded_together_count_as_recorded_one_by_one(steps: list[tuple[str, float, list[int], int]]) -> None:
    clock = VirtualClock(0.0)
    together, one_by_one = RequestLatencyRecorder(clock=clock), RequestLatencyRecorder(clock=clock)
    ours = [together.on_queued() for _ in range(5)]
    theirs = [one_by_one.on_queued() for _ in range(5)]
    for action, step_s, chosen, num_tokens in steps:
        clock.now_s += step_s
        if action == "t":
            counts = [num_tokens if place % 2 else 1 for place in range(len(chosen))]
            together.on_batch_tokens([ours[each] for each in chosen], counts)
            for each, count in zip(chosen, counts, strict=True):
                one_by_one.on_tokens(theirs[each], count)
            continue
        if action == ".":  # the times are read, without an event
            for times in (ours, theirs):
                for each in chosen:
                    times[each].advance(clock.now_s)
            continue
        for latencies, times in ((together, ours), (one_by_one, theirs)):
            tell = {"a": latencies.on_admitted, "r": latencies.on_retracted, "e": latencies.on_finished}[action]
            for each in chosen:
                tell(times[each])
    # Steps are quarter seconds and counts powers of two, so that no sum depends on the order of its parts.
    assert together.stats() == one_by_one.stats()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.times_s, mine.phase, mine.first_token_s) == (other.times_s, other.phase, other.first_token_s)


def test_requests_with_equal_waits_are_one_addition() -> None:
    clock = VirtualClock(0.0)
    latencies = RequestLatencyRecorder(clock=clock)
    observed: list[tuple[float, int]] = []

    class Noted(Histogram):
        def observe(self, value: float, times: int = 1) -> None:
            observed.append((value, times))

    latencies.histograms.inter_token = Noted([1.0])
    batch = [latencies.on_queued() for _ in range(64)]
    for clock.now_s in (1.0, 1.5, 2.5):
        latencies.on_batch_tokens(batch, [1] * 64)
    assert [(value, times) for value, times in observed if times] == [(0.5, 64), (1.0, 64)]


def test_tokens_of_one_step_share_its_interval() -> None:
    clock = VirtualClock(0.0)
    latencies = RequestLatencyRecorder(clock=clock)
    times = latencies.on_queued()
    for clock.now_s, num_tokens in ((1.0, 1), (1.2, 4)):
        latencies.on_tokens(times, num_tokens)
    inter_token = latencies.stats().inter_token
    assert inter_token.counts[inter_token.bounds.index(0.06)] == 4
    assert abs(inter_token.total - 0.2) < 1e-9
