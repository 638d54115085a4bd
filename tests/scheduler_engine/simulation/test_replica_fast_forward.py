"""Where fast-forward ends: exactly before the step that something else can reach, with and without a decision log."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.ports import NullDecisionLog
from scheduler_components.scheduling.admission_budget import BATCH_MODES, BatchMode
from scheduler_engine.simulation import CostModel, ReplicaConfig, SimulatedRequest, TraceRequest
from scheduler_engine.simulation.replica import SimulatedReplica

MS = 1_000_000
STEP_10_MS = CostModel(base_ms=10, prefill_us_per_token=0, decode_us_per_request=0, context_us_per_1k_tokens=0)
SMALL = ReplicaConfig(page_size=4, kv_tokens=256, max_running_requests=4, chunk_tokens=32, cost=STEP_10_MS)

Ends = list[tuple[str, int, list[int]]]


def recorded(index: int, arrival_s: float, prompt: int, output: int, prefix: int) -> TraceRequest:
    return TraceRequest(index=index, arrival_s=arrival_s, input_length=prompt, output_length=output, hash_ids=(prefix,))


def serve(
    config: ReplicaConfig,
    arrivals: Sequence[tuple[int, TraceRequest]],
    log: DecisionLog | NullDecisionLog,
    *,
    fast: bool,
) -> tuple[Ends, list[bytes], SimulatedReplica]:
    """Serve requests at their times in nanoseconds. Return how they ended, the KV events, and the replica."""
    payloads, ends, waiting = list[bytes](), Ends(), sorted(arrivals, key=lambda each: each[0])
    replica = SimulatedReplica.compose(config, deliver_events=payloads.append, decisions=log)
    while waiting or replica.has_work:
        if waiting and not replica.has_work:
            replica.clock.now_ns = max(replica.clock.now_ns, waiting[0][0])
        while waiting and waiting[0][0] <= replica.clock.now_ns:
            replica.submit(SimulatedRequest(waiting.pop(0)[1]))
        replica.step()
        ends += [(each.rid, each.finished_ns, each.token_ids.tolist()) for each in replica.observer.finished]
        replica.pop_finished()
        if fast:
            replica.fast_forward(*[at_ns for at_ns, _ in waiting[:1]])
    return ends, payloads, replica


def test_a_step_that_begins_at_the_horizon_is_not_taken() -> None:
    replica = SimulatedReplica.compose(SMALL)
    replica.submit(SimulatedRequest(recorded(0, 0.0, 8, 40, 0)))
    replica.step()
    assert replica.fast_forward(10 * MS) == 0
    assert replica.fast_forward(10 * MS + 1) == 1
    assert replica.fast_forward(50 * MS) == 3
    assert replica.clock.now_ns == 50 * MS
    assert replica.fast_forward() == 34, "the fortieth token needs a real step"


def test_a_submitted_request_is_work_that_ends_it() -> None:
    replica = SimulatedReplica.compose(SMALL)
    assert not replica.has_work
    replica.submit(SimulatedRequest(recorded(0, 0.0, 8, 40, 0)))
    assert replica.has_work
    replica.step()
    replica.submit(SimulatedRequest(recorded(1, 0.0, 8, 40, 0)))
    assert replica.fast_forward() == 0


def test_slots_are_no_more_than_pages() -> None:
    assert ReplicaConfig(page_size=16, kv_tokens=64, max_running_requests=64).limits.max_running_requests == 4


def test_the_last_unfinished_page_of_a_pool_holds_nothing() -> None:
    config = ReplicaConfig(page_size=4, kv_tokens=10)
    assert [config.can_hold(SimulatedRequest(recorded(0, 0.0, 8, output, 0))) for output in (1, 2)] == [True, False]


@given(
    workload=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=8
    ),
    mode=st.sampled_from(BATCH_MODES),
    kv_tokens=st.sampled_from([100, 132, 2000]),
    slots=st.integers(1, 5),
    speed=st.sampled_from([1.0, 4.0]),
)
@settings(max_examples=40, deadline=None)
def test_without_a_decision_log_it_equals_single_steps(
    workload: list[tuple[int, int, int, int]], mode: BatchMode, kv_tokens: int, slots: int, speed: float
) -> None:
    """Requests arrive at the times at which steps begin and end. Tokens, times, events and counts are compared."""
    config = attrs.evolve(
        SMALL, batch_mode=mode, kv_tokens=kv_tokens, max_running_requests=slots, speed=speed, new_token_ratio=0.1
    )
    arrivals = [(5 * MS * at, recorded(index, 0.0, *sizes)) for index, (at, *sizes) in enumerate(workload)]
    fast_ends, fast_events, fast = serve(config, arrivals, NullDecisionLog(), fast=True)
    slow_ends, slow_events, slow = serve(config, arrivals, DecisionLog(), fast=False)
    assert fast_ends == slow_ends
    assert fast_events == slow_events
    assert attrs_of(fast) == attrs_of(slow)


def attrs_of(replica: SimulatedReplica) -> tuple[int, ...]:
    counts = replica.counts
    return (
        counts.num_steps,
        counts.busy_ns,
        counts.prefill_tokens,
        counts.decode_tokens,
        counts.recomputed_tokens,
        counts.num_retractions,
        replica.cache.used_tokens,
        replica.cache.evictable_tokens,
    )


@pytest.mark.parametrize("fast", [True, False])
def test_decodes_between_two_prompts_reset_the_limit_of_prefill_steps(fast: bool) -> None:
    """Sixteen steps in a row may hold up decodes in ``prefill_first`` mode. Ten, some decodes and ten more do not."""
    config = attrs.evolve(SMALL, batch_mode="prefill_first", chunk_tokens=1)
    arrivals = [
        (0, recorded(0, 0.0, 1, 40, 0)),
        (20 * MS, recorded(1, 0.0, 10, 1, 1)),
        (200 * MS, recorded(2, 0.0, 10, 1, 2)),
    ]
    ends = {rid: finished_ns // MS for rid, finished_ns, _ in serve(config, arrivals, NullDecisionLog(), fast=fast)[0]}
    assert (ends["r1"], ends["r2"]) == (120, 300)
    assert ends["r0"] == 10 * (40 + 20)


def test_steps_without_a_whole_microsecond_are_no_work_in_load_reports() -> None:
    """0.4 us for one request, 0.6 us for two: the steps of both count, those of one alone do not."""
    cost = attrs.evolve(STEP_10_MS, base_ms=2e-4, decode_us_per_request=0.2)
    arrivals = [(0, recorded(0, 0.0, 8, 40, 0)), (0, recorded(1, 0.0, 8, 20, 1))]
    moments = [
        serve(attrs.evolve(SMALL, cost=cost), arrivals, NullDecisionLog(), fast=fast)[2].get_loads().decode_moments
        for fast in (True, False)
    ]
    assert moments[0] == moments[1]
    assert moments[0] is not None
    assert moments[0].steps == 19


def test_recomputed_positions_are_those_that_were_computed_before() -> None:
    """Two requests grow until their 12 pages are full. The later one loses its pages, and comes back."""
    config = attrs.evolve(SMALL, kv_tokens=48, new_token_ratio=0.0, min_new_token_ratio=0.0, max_prefill_tokens=32)
    arrivals = [(0, recorded(0, 0.0, 24, 20, 0)), (0, recorded(1, 0.0, 8, 20, 1))]
    _, _, replica = serve(config, arrivals, NullDecisionLog(), fast=True)
    counts = replica.counts
    assert counts.num_retractions == 1
    needed = 24 + 19 + 8 + 19
    assert counts.prefill_tokens + counts.decode_tokens == needed + counts.recomputed_tokens
    assert counts.recomputed_tokens > 0
