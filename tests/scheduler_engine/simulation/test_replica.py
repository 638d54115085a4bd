"""SimulatedReplica: fast-forward equals single steps, and both equal the reference engine's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ParallelState
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.hicache import HiCachePolicy, LoadBackMode, PrefetchPolicy, WritePolicy
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.scheduling.admission_budget import BatchMode
from scheduler_components.values import CachedTokens, TierStats
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import Request
from scheduler_engine.engine.scheduler.scheduler import Clocks, Scheduler
from scheduler_engine.simulation.replica import ReplicaConfig, SimulatedReplica
from scheduler_engine.simulation.request import SimulatedRequest
from scheduler_engine.simulation.tiers import TierConfig
from scheduler_engine.simulation.trace import TraceRequest
from scheduler_engine.simulation.virtual_clock import NEVER_NS, VirtualClock

SMALL = ReplicaConfig(page_size=4, kv_tokens=512, max_running_requests=4, max_prefill_tokens=64, chunk_tokens=32)


@dataclass(slots=True, kw_only=True)
class Run:
    """What a replica did."""

    tips: list[tuple[str, int, int]] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    num_steps: int = 0
    num_skipped_steps: int = 0
    cached: dict[str, CachedTokens] = field(default_factory=dict)
    tiers: TierStats | None = None
    refusals: dict[str, int] = field(default_factory=dict)
    new_token_ratio: float = 0.0


def recorded(index: int, arrival_s: float, prompt: int, output: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(
        index=index, arrival_s=arrival_s, input_length=prompt, output_length=output, hash_ids=hash_ids or (index,)
    )


def serve(config: ReplicaConfig, requests: list[TraceRequest], *, fast: bool) -> Run:
    run, log = Run(), DecisionLog()
    replica = SimulatedReplica.compose(config, deliver_events=run.events.append, decisions=log)
    waiting = sorted(requests, key=lambda each: each.arrival_s)
    while waiting or replica.has_work:
        arrival_ns = round(waiting[0].arrival_s * 1e9) if waiting else NEVER_NS
        ready_ns = replica.ready_ns if replica.has_work else NEVER_NS
        assert min(ready_ns, arrival_ns) < NEVER_NS, "it waits for nothing"
        replica.clock.now_ns = max(replica.clock.now_ns, min(ready_ns, arrival_ns))
        while waiting and round(waiting[0].arrival_s * 1e9) <= replica.clock.now_ns:
            replica.submit(SimulatedRequest(waiting.pop(0)))
        replica.step()
        finished = replica.pop_finished()
        run.tips += [(request.rid, log.tip, replica.clock.now_ns) for request in finished]
        run.cached |= {request.rid: request.cached_prompt for request in finished}
        if fast:
            replica.fast_forward(round(waiting[0].arrival_s * 1e9) if waiting else NEVER_NS)
    replica.cache.check_integrity()
    assert not replica.results.failures.counts
    run.num_steps, run.num_skipped_steps = replica.counts.num_steps, replica.counts.num_skipped_steps
    run.tiers = replica.counts.tiers
    run.refusals = dict(replica.batcher.refusals)
    run.new_token_ratio = replica.batcher.conditions.new_token_ratio.current
    return run


def assert_fast_forward_equals_steps(config: ReplicaConfig, requests: list[TraceRequest]) -> Run:
    fast, slow = serve(config, requests, fast=True), serve(config, requests, fast=False)
    assert fast.tips == slow.tips
    assert fast.events == slow.events
    assert (fast.num_steps, fast.refusals) == (slow.num_steps, slow.refusals)
    assert (fast.cached, fast.tiers) == (slow.cached, slow.tiers)
    assert fast.new_token_ratio == slow.new_token_ratio
    assert slow.num_skipped_steps == 0
    return fast


def test_fast_forward_takes_most_steps_of_long_outputs() -> None:
    requests = [recorded(index, 0.05 * index, 40, 60) for index in range(4)]
    run = assert_fast_forward_equals_steps(SMALL, requests)
    assert len(run.tips) == 4
    assert run.num_skipped_steps > 0.6 * run.num_steps


def test_fast_forward_stops_where_the_pool_is_full() -> None:
    """Two requests grow until one of them is preempted; evictions and preemptions are those of single steps."""
    config = attrs.evolve(SMALL, kv_tokens=128, new_token_ratio=0.1)
    requests = [recorded(index, 0.0, 30, 70) for index in range(3)]
    run = assert_fast_forward_equals_steps(config, requests)
    assert run.num_skipped_steps > 20


def test_full_slots_do_not_stop_it() -> None:
    config = attrs.evolve(SMALL, max_running_requests=2)
    run = assert_fast_forward_equals_steps(config, [recorded(index, 0.0, 20, 40) for index in range(5)])
    assert run.refusals["slots"] > 50
    assert run.num_skipped_steps > 50


def test_a_policy_that_reads_batches_is_simulated_step_by_step() -> None:
    config = attrs.evolve(SMALL, schedule_policy="virtual-token-counter")
    assert serve(config, [recorded(0, 0.0, 20, 40)], fast=True).num_skipped_steps == 0


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
)
@example(  # in this mode decodes leave the tokens of a step to prefills, although they count
    workload=[(4, 1, 6, 0), (5, 1, 1, 0), (5, 1, 3, 0), (5, 1, 3, 0), (5, 1, 1, 0)],
    policy="fcfs",
    mode="prefill_first",
    kv_tokens=132,
    slots=4,
    counts_decodes=True,
)
@settings(max_examples=40, deadline=None)
def test_fast_forward_equals_single_steps(
    workload: list[tuple[int, int, int, int]],
    policy: str,
    mode: BatchMode,
    kv_tokens: int,
    slots: int,
    counts_decodes: bool,
) -> None:
    config = attrs.evolve(
        SMALL,
        schedule_policy=policy,
        batch_mode=mode,
        kv_tokens=kv_tokens,
        max_running_requests=slots,
        counts_decodes=counts_decodes,
        max_prefill_tokens=3 if counts_decodes and slots >= 4 else 64,
    )
    requests = [recorded(index, at / 50, *sizes, prefix) for index, (at, *sizes, prefix) in enumerate(workload)]
    assert_fast_forward_equals_steps(config, requests)


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


def test_fast_forward_skips_steps_while_pages_are_copied() -> None:
    requests = [recorded(index, 0.05 * index, 40, 60) for index in range(4)]
    run = assert_fast_forward_equals_steps(attrs.evolve(SMALL, tiers=SLOW_TIERS), requests)
    assert run.num_skipped_steps > 0.4 * run.num_steps
    assert run.tiers is not None
    assert run.tiers.pages_written > 0


def test_pages_are_copied_ahead_of_their_eviction_before_steps_are_skipped() -> None:
    """When the first request ends, few pages are free, and the next step begins to copy its pages to the host."""
    policy = HiCachePolicy(write="write_back", clean_ahead_pages=16)
    tiers = attrs.evolve(SLOW_TIERS, storage_tokens=0, policy=policy)
    requests = [recorded(0, 0.0, 40, 10), recorded(1, 0.0, 40, 60)]
    run = assert_fast_forward_equals_steps(attrs.evolve(SMALL, kv_tokens=132, tiers=tiers), requests)
    assert run.tiers is not None
    assert run.tiers.pages_written > 0


@pytest.mark.parametrize("kv_tokens", [160, 4096])
def test_decisions_equal_those_of_the_reference_engine(kv_tokens: int) -> None:
    config = attrs.evolve(SMALL, kv_tokens=kv_tokens)
    requests = [recorded(index, 0.03 * index, 25 + 5 * index, 45, index % 2) for index in range(8)]
    ours = serve(config, requests, fast=True)

    clock, log, tips = VirtualClock(), DecisionLog(), list[tuple[str, int, int]]()
    reference = Scheduler.compose(
        SchedulerConfig(
            page_size=config.page_size,
            kv_tokens=config.kv_tokens,
            max_running_requests=config.max_running_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            chunk_tokens=config.chunk_tokens,
        ),
        ParallelState.trivial(),
        SimulatedDevice(clock=clock, sleep=lambda seconds: advance(clock, seconds)),
        clocks=Clocks(wall=clock, monotonic=clock),
        decisions=log,
    )
    waiting, running = list(requests), list[Request]()
    while waiting or reference.has_work:
        if waiting and not reference.has_work:
            clock.now_ns = max(clock.now_ns, round(waiting[0].arrival_s * 1e9))
        while waiting and round(waiting[0].arrival_s * 1e9) <= clock.now_ns:
            simulated = SimulatedRequest(waiting.pop(0))
            limits = SamplingLimits(max_new_tokens=simulated.limits.max_new_tokens, ignore_eos=True)
            running.append(Request(simulated.rid, simulated.token_ids, limits, stream_interval=0))
            reference.submit(running[-1])
        reference.step()
        ended = [request for request in running if request.finish_reason is not None]
        tips += [(request.rid, log.tip, clock.now_ns) for request in ended]
        running = [request for request in running if request.finish_reason is None]
    assert [tip for _, tip, _ in sorted(tips)] == [tip for _, tip, _ in sorted(ours.tips)]
    for theirs, own in zip(sorted(tips), sorted(ours.tips), strict=True):
        assert theirs[0] == own[0]
        assert abs(theirs[2] - own[2]) < 1_000, "the device's clock adds floats"


def advance(clock: VirtualClock, seconds: float) -> None:
    clock.now_ns += round(seconds * 1e9)


def test_events_are_encoded_by_the_real_codec() -> None:
    run = serve(SMALL, [recorded(0, 0.0, 16, 4)], fast=True)
    stored = [event for payload in run.events for event in BatchDecoder().decode(payload).events]
    assert sum(len(event.block_hashes) for event in stored) == (16 + 4 - 1) // SMALL.page_size
