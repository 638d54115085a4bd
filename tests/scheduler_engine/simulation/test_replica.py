"""SimulatedReplica: fast-forward equals single steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components._internal.virtual_clock import NEVER_NS
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.hicache import HiCachePolicy, LoadBackMode, PrefetchPolicy, WritePolicy
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.ports import NullDecisionLog
from scheduler_components.scheduling.admission_budget import BatchMode
from scheduler_components.values import CachedTokens, TierStats
from scheduler_engine.simulation import CostModel
from scheduler_engine.simulation.replica import ReplicaConfig, SimulatedReplica
from scheduler_engine.simulation.request import SimulatedRequest
from scheduler_engine.simulation.tiers import TierConfig
from scheduler_engine.simulation.trace import TraceRequest

SMALL = ReplicaConfig(page_size=4, kv_tokens=512, max_running_requests=4, max_prefill_tokens=64, chunk_tokens=32)


TEN_MS = ReplicaConfig(
    page_size=4,
    kv_tokens=256,
    max_running_requests=4,
    chunk_tokens=32,
    cost=CostModel(base_ms=10, prefill_us_per_token=0, decode_us_per_request=0, context_us_per_1k_tokens=0),
)
MS = 1_000_000


@dataclass(slots=True, kw_only=True)
class Run:
    """What a replica did.

    Attributes:
        replica: as it is at the end.
        tips: id, tip of the decisions and time of each end.
        tokens, cached: of each request.
        events: encoded KV events.
    """

    replica: SimulatedReplica
    events: list[bytes]
    tips: list[tuple[str, int, int]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, CachedTokens] = field(default_factory=dict)

    @property
    def tiers(self) -> TierStats | None:
        return self.replica.counts.tiers

    @property
    def facts(self) -> tuple[object, ...]:
        """All that does not depend on the size of the steps."""
        replica = self.replica
        counts = dataclasses.replace(replica.counts, num_skipped_steps=0)
        ratio = replica.batcher.conditions.new_token_ratio.current
        pool = (replica.cache.used_tokens, replica.cache.evictable_tokens)
        ends = [(rid, end_ns) for rid, _, end_ns in self.tips]
        moments = replica.get_loads().decode_moments
        return ends, self.tokens, self.events, self.cached, counts, dict(replica.batcher.refusals), ratio, pool, moments


def recorded(index: int, arrival_s: float, prompt: int, output: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(
        index=index, arrival_s=arrival_s, input_length=prompt, output_length=output, hash_ids=hash_ids or (index,)
    )


def serve(
    config: ReplicaConfig, requests: list[TraceRequest], *, fast: bool, log: DecisionLog | NullDecisionLog | None = None
) -> Run:
    events, log = list[bytes](), log or DecisionLog()
    replica = SimulatedReplica.compose(config, deliver_events=events.append, decisions=log)
    run = Run(replica=replica, events=events)
    waiting = sorted(requests, key=lambda each: each.arrival_s)
    while waiting or replica.has_work:
        arrival_ns = round(waiting[0].arrival_s * 1e9) if waiting else NEVER_NS
        ready_ns = replica.ready_ns if replica.has_work else NEVER_NS
        assert min(ready_ns, arrival_ns) < NEVER_NS, "it waits for nothing"
        replica.clock.now_ns = max(replica.clock.now_ns, min(ready_ns, arrival_ns))
        while waiting and round(waiting[0].arrival_s * 1e9) <= replica.clock.now_ns:
            replica.submit(SimulatedRequest(waiting.pop(0)))
        replica.step()
        run.tokens |= {request.rid: request.token_ids.tolist() for request in replica.observer.finished}
        for request in replica.pop_finished():
            run.tips.append((request.rid, log.tip, replica.clock.now_ns))
            run.cached[request.rid] = request.cached_prompt
        if fast:
            replica.fast_forward(round(waiting[0].arrival_s * 1e9) if waiting else NEVER_NS)
    replica.cache.check_integrity()
    assert not replica.results.failures.counts
    return run


def assert_fast_forward_equals_steps(
    config: ReplicaConfig, requests: list[TraceRequest], log: NullDecisionLog | None = None
) -> Run:
    """Compare all facts, with ``log`` without the decisions: then tokens of several steps are appended together."""
    fast, slow = serve(config, requests, fast=True, log=log), serve(config, requests, fast=False)
    assert fast.facts == slow.facts
    assert log is not None or fast.tips == slow.tips
    assert slow.replica.counts.num_skipped_steps == 0
    return fast


def test_a_policy_that_reads_batches_is_simulated_step_by_step() -> None:
    config = attrs.evolve(SMALL, schedule_policy="virtual-token-counter")
    assert serve(config, [recorded(0, 0.0, 20, 40)], fast=True).replica.counts.num_skipped_steps == 0


workloads = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 90), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=10
)


@given(
    workload=workloads,
    policy=st.sampled_from(["fcfs", "lpm", "virtual-token-counter", "hrrn"]),
    mode=st.sampled_from(["mixed", "prefill_first"]),
    kv_tokens=st.sampled_from([132, 200, 2000]),
    slots=st.integers(1, 5),
    counts_decodes=st.booleans(),
    log=st.sampled_from([None, NullDecisionLog()]),
    sizes=st.sampled_from([SMALL, TEN_MS, attrs.evolve(TEN_MS, speed=4.0)]),
)
@example(  # in this mode decodes leave the tokens of a step to prefills, although they count
    workload=[(4, 1, 6, 0), (5, 1, 1, 0), (5, 1, 3, 0), (5, 1, 3, 0), (5, 1, 1, 0)],
    policy="fcfs",
    mode="prefill_first",
    kv_tokens=132,
    slots=4,
    counts_decodes=True,
    log=None,
    sizes=SMALL,
)
@settings(max_examples=60, deadline=None)
def test_fast_forward_equals_single_steps(
    workload: list[tuple[int, int, int, int]],
    policy: str,
    mode: BatchMode,
    kv_tokens: int,
    slots: int,
    counts_decodes: bool,
    log: NullDecisionLog | None,
    sizes: ReplicaConfig,
) -> None:
    """Requests also arrive at the times at which steps of 10 ms begin and end."""
    config = attrs.evolve(
        sizes,
        schedule_policy=policy,
        batch_mode=mode,
        kv_tokens=kv_tokens,
        max_running_requests=slots,
        counts_decodes=counts_decodes,
        max_prefill_tokens=3 if counts_decodes and slots >= 4 else 64,
    )
    requests = [recorded(index, at / 50, *lengths, prefix) for index, (at, *lengths, prefix) in enumerate(workload)]
    assert_fast_forward_equals_steps(config, requests, log)


SLOW_TIERS = TierConfig(
    host_tokens=256,
    write_gb_per_s=0.1,  # a page of 4 tokens in 5 ms, as long as a step
    load_gb_per_s=0.1,
    storage_tokens=400,
    storage_write_gb_per_s=0.05,
    storage_read_gb_per_s=0.05,
)


@given(
    workload=workloads,
    kv_tokens=st.sampled_from([132, 200]),
    slots=st.integers(1, 5),
    storage_tokens=st.sampled_from([0, 100, 4000]),
    write=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    prefetch=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
    load=st.sampled_from(["whole", "by_layer"]),
    speed=st.sampled_from([0.1, 10.0]),
)
@settings(max_examples=40, deadline=None)
def test_fast_forward_equals_single_steps_with_tiers(
    workload: list[tuple[int, int, int, int]],
    kv_tokens: int,
    slots: int,
    storage_tokens: int,
    write: WritePolicy,
    prefetch: PrefetchPolicy,
    load: LoadBackMode,
    speed: float,
) -> None:
    policy = HiCachePolicy(write=write, prefetch=prefetch, load=load, clean_ahead_pages=8, prefetch_threshold_pages=1)
    tiers = attrs.evolve(
        SLOW_TIERS, policy=policy, storage_tokens=storage_tokens, write_gb_per_s=speed, load_gb_per_s=speed
    )
    config = attrs.evolve(SMALL, kv_tokens=kv_tokens, max_running_requests=slots, tiers=tiers)
    requests = [recorded(index, at / 10, *sizes, prefix) for index, (at, *sizes, prefix) in enumerate(workload)]
    assert_fast_forward_equals_steps(config, requests)


@pytest.mark.parametrize(
    ("change", "requests", "share"),
    [
        ({}, [recorded(index, 0.05 * index, 40, 60) for index in range(4)], 0.6),
        ({"kv_tokens": 128, "new_token_ratio": 0.1}, [recorded(index, 0.0, 30, 70) for index in range(3)], 0.15),
        ({"max_running_requests": 2}, [recorded(index, 0.0, 20, 40) for index in range(5)], 0.4),
        ({"tiers": SLOW_TIERS}, [recorded(index, 0.05 * index, 40, 60) for index in range(4)], 0.4),
    ],
    ids=["long outputs", "a full pool", "full slots", "copies under way"],
)
def test_fast_forward_takes_most_steps(change: dict[str, object], requests: list[TraceRequest], share: float) -> None:
    run = assert_fast_forward_equals_steps(attrs.evolve(SMALL, **change), requests)
    assert len(run.tips) == len(requests)
    counts = run.replica.counts
    assert counts.num_skipped_steps > share * counts.num_steps
    assert run.tiers is None or run.tiers.pages_written > 0


def test_pages_are_copied_ahead_of_their_eviction_before_steps_are_skipped() -> None:
    """When the first request ends, few pages are free, and the next step begins to copy its pages to the host."""
    policy = HiCachePolicy(write="write_back", clean_ahead_pages=16)
    tiers = attrs.evolve(SLOW_TIERS, storage_tokens=0, policy=policy)
    requests = [recorded(0, 0.0, 40, 10), recorded(1, 0.0, 40, 60)]
    run = assert_fast_forward_equals_steps(attrs.evolve(SMALL, kv_tokens=132, tiers=tiers), requests)
    assert run.tiers is not None
    assert run.tiers.pages_written > 0


def test_events_are_encoded_by_the_real_codec() -> None:
    run = serve(SMALL, [recorded(0, 0.0, 16, 4)], fast=True)
    stored = [event for payload in run.events for event in BatchDecoder().decode(payload).events]
    assert sum(len(event.block_hashes) for event in stored) == (16 + 4 - 1) // SMALL.page_size


def test_a_step_that_begins_at_the_horizon_is_not_taken() -> None:
    replica = SimulatedReplica.compose(TEN_MS)
    replica.submit(SimulatedRequest(recorded(0, 0.0, 8, 40)))
    replica.step()
    assert replica.fast_forward(10 * MS) == 0
    assert replica.fast_forward(10 * MS + 1) == 1
    assert replica.fast_forward(50 * MS) == 3
    assert replica.clock.now_ns == 50 * MS
    assert replica.fast_forward() == 34, "the fortieth token needs a real step"


def test_a_submitted_request_is_work_that_ends_it() -> None:
    replica = SimulatedReplica.compose(TEN_MS)
    assert not replica.has_work
    replica.submit(SimulatedRequest(recorded(0, 0.0, 8, 40)))
    assert replica.has_work
    replica.step()
    replica.submit(SimulatedRequest(recorded(1, 0.0, 8, 40)))
    assert replica.fast_forward() == 0


def test_slots_are_no_more_than_pages() -> None:
    assert ReplicaConfig(page_size=16, kv_tokens=64, max_running_requests=64).limits.max_running_requests == 4


def test_the_last_unfinished_page_of_a_pool_holds_nothing() -> None:
    config = ReplicaConfig(page_size=4, kv_tokens=10)
    assert [config.can_hold(SimulatedRequest(recorded(0, 0.0, 8, output))) for output in (1, 2)] == [True, False]


@pytest.mark.parametrize("fast", [True, False])
def test_decodes_between_two_prompts_reset_the_limit_of_prefill_steps(fast: bool) -> None:
    """Sixteen steps in a row may hold up decodes in ``prefill_first`` mode. Ten, some decodes and ten more do not."""
    config = attrs.evolve(TEN_MS, batch_mode="prefill_first", chunk_tokens=1)
    arrivals = [recorded(0, 0.0, 1, 40), recorded(1, 0.02, 10, 1), recorded(2, 0.2, 10, 1)]
    run = serve(config, arrivals, fast=fast, log=NullDecisionLog())
    ends = {rid: finished_ns // MS for rid, _, finished_ns in run.tips}
    assert (ends["r1"], ends["r2"]) == (120, 300)
    assert ends["r0"] == 10 * (40 + 20)


def test_steps_without_a_whole_microsecond_are_no_work_in_load_reports() -> None:
    """0.4 us for one request, 0.6 us for two: the steps of both count, those of one alone do not."""
    cost = attrs.evolve(TEN_MS.cost, base_ms=2e-4, decode_us_per_request=0.2)
    arrivals = [recorded(0, 0.0, 8, 40), recorded(1, 0.0, 8, 20)]
    run = assert_fast_forward_equals_steps(attrs.evolve(TEN_MS, cost=cost), arrivals, NullDecisionLog())
    moments = run.replica.get_loads().decode_moments
    assert moments is not None
    assert moments.steps == 19


def test_recomputed_positions_are_those_that_were_computed_before() -> None:
    """Two requests grow until their 12 pages are full. The later one loses its pages, and comes back."""
    config = attrs.evolve(TEN_MS, kv_tokens=48, new_token_ratio=0.0, min_new_token_ratio=0.0, max_prefill_tokens=32)
    arrivals = [recorded(0, 0.0, 24, 20), recorded(1, 0.0, 8, 20)]
    counts = serve(config, arrivals, fast=True, log=NullDecisionLog()).replica.counts
    assert counts.num_retractions == 1
    needed = 24 + 19 + 8 + 19
    assert counts.prefill_tokens + counts.decode_tokens == needed + counts.recomputed_tokens
    assert counts.recomputed_tokens > 0
