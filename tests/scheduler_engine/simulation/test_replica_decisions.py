"""Decisions of SimulatedReplica equal those of the reference engine's scheduler, for all policies and sizes.

What is equal, when both get the same requests before the same steps:

- after every step, the tip of the DecisionLog: the order of admissions, matched prefixes, chunks, preemptions,
  evictions, tokens, ends, and the pages that are used, free and evictable;
- the KV events of every step, the counts of load reports, refusals by reason, preemptions by policy;
- the time of every step, within a microsecond, because the engine's device adds floats.

What is not compared: rates in load reports, which depend on a clock.

What is not equal: the digest that the processes of an engine report, because they also note the input messages.
Requests that need a session, a grammar or an adapter are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.recording_router import RecordingRouter
from kit.searches import num_examples

from scheduler_components import ConfigError, ParallelState
from scheduler_components._internal.virtual_clock import NEVER_NS, VirtualClock, nanoseconds
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.events import KVCacheEvent
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.scheduling.admission_budget import BATCH_MODES, BatchLimits
from scheduler_components.scheduling.composition import Clocks, SchedulerSinks
from scheduler_components.scheduling.preemption_policy import PREEMPTION_POLICY_NAMES
from scheduler_components.scheduling.scheduling_policy import POLICY_NAMES
from scheduler_components.values import LoadSnapshot
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.request_limits import check_request_fits
from scheduler_engine.engine.scheduler.scheduler import Scheduler
from scheduler_engine.simulation import (
    LeastLoaded,
    ReplicaConfig,
    RoundRobin,
    Router,
    SimulatedRequest,
    Simulation,
    SimulationConfig,
    TraceRequest,
)
from scheduler_engine.simulation.replica import EncodedEventSink, SimulatedReplica
from tests.scheduler_engine.simulation.test_replica import SMALL, recorded

_COUNTS = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_pending_tokens",
    "num_waiting_uncached_tokens",
    "num_used_tokens",
    "num_total_tokens",
    "max_total_num_tokens",
    "max_running_requests",
    "token_usage",
    "utilization",
)


@dataclass(slots=True, kw_only=True)
class History:
    """What a scheduler did.

    Attributes:
        steps: tip of the decisions, time in nanoseconds and counts of the load, by the number of the step.
        received: requests that were submitted before a step, with the time, by the number of the step.
        payloads: encoded KV events.
        refusals, preemptions: by reason, and by policy.
    """

    steps: dict[int, tuple[int, int, tuple[float, ...]]] = field(default_factory=dict)
    received: dict[int, tuple[int, list[TraceRequest]]] = field(default_factory=dict)
    payloads: list[bytes] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)

    @property
    def events(self) -> list[tuple[KVCacheEvent, ...]]:
        """The KV events, one tuple per step that had any."""
        return [tuple(BatchDecoder().decode(payload).events) for payload in self.payloads]


def counts_of(load: LoadSnapshot) -> tuple[float, ...]:
    return tuple(getattr(load, name) for name in _COUNTS)


def arrival_ns(request: TraceRequest) -> int:
    return nanoseconds(request.arrival_s)


def serve_in_replica(
    config: ReplicaConfig, arrivals: Sequence[TraceRequest], limits: BatchLimits, *, fast: bool
) -> History:
    """Serve requests at their arrival times."""
    history, log = History(), DecisionLog()
    replica = SimulatedReplica.compose(config, deliver_events=history.payloads.append, decisions=log)
    replica.batcher.limits = limits
    clock, counts, waiting = replica.clock, replica.counts, sorted(arrivals, key=arrival_ns)
    while waiting or replica.has_work:
        if waiting and not replica.has_work:
            clock.now_ns = max(clock.now_ns, arrival_ns(waiting[0]))
        arrived = [arrival for arrival in waiting if arrival_ns(arrival) <= clock.now_ns]
        if arrived:
            del waiting[: len(arrived)]
            history.received[counts.num_steps] = (clock.now_ns, arrived)
        for arrival in arrived:
            replica.submit(SimulatedRequest(arrival))
        replica.step()
        history.steps[counts.num_steps] = (log.tip, clock.now_ns, counts_of(replica.get_loads()))
        if fast:
            replica.fast_forward(arrival_ns(waiting[0]) if waiting else NEVER_NS)
        replica.pop_finished()
    replica.cache.check_integrity()
    assert not replica.results.failures.counts
    assert not replica.batcher.num_replaced_policies
    history.refusals, history.preemptions = dict(replica.batcher.refusals), dict(replica.batcher.preemptions)
    return history


def scheduler_config(config: ReplicaConfig) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=config.page_size,
        kv_tokens=config.kv_tokens,
        max_running_requests=config.max_running_requests,
        max_prefill_tokens=config.max_prefill_tokens,
        chunk_tokens=config.chunk_tokens,
        new_token_ratio=config.new_token_ratio,
        min_new_token_ratio=config.min_new_token_ratio,
        schedule_policy=config.schedule_policy,
        preemption_policy=config.preemption_policy,
        batch_mode=config.batch_mode,
    )


def as_engine_request(recorded: TraceRequest) -> EngineRequest:
    simulated = SimulatedRequest(recorded)
    limits = SamplingLimits(max_new_tokens=simulated.limits.max_new_tokens, ignore_eos=True)
    return EngineRequest(simulated.rid, simulated.token_ids, limits, hints=simulated.hints, stream_interval=0)


def advance(clock: VirtualClock, seconds: float) -> None:
    clock.now_ns += nanoseconds(seconds)


@dataclass(slots=True, kw_only=True)
class Engine:
    """The reference engine's scheduler, over a clock that its device advances."""

    config: ReplicaConfig
    limits: BatchLimits
    clock: VirtualClock = field(default_factory=VirtualClock)
    log: DecisionLog = field(default_factory=DecisionLog)
    history: History = field(default_factory=History)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        clock = self.clock
        self.scheduler = Scheduler.compose(
            scheduler_config(self.config),
            ParallelState.trivial(),
            SimulatedDevice(cost=self.config.cost, clock=clock, sleep=partial(advance, clock)),
            sinks=SchedulerSinks(events=EncodedEventSink(deliver=self.history.payloads.append)),
            clocks=Clocks(wall=clock, monotonic=clock),
            decisions=self.log,
        )
        self.scheduler.batcher.limits = self.limits

    def step(self) -> None:
        self.scheduler.step()
        counts = counts_of(self.scheduler.load.get_loads())
        self.history.steps[self.scheduler.num_steps] = (self.log.tip, self.clock.now_ns, counts)

    def serve(self, received: dict[int, tuple[int, list[TraceRequest]]]) -> History:
        """Serve requests before the steps with these numbers."""
        scheduler, left = self.scheduler, dict(received)
        while left or scheduler.has_work:
            now_ns, arrivals = left.pop(scheduler.num_steps, (0, []))
            if not scheduler.has_work:
                self.clock.now_ns = max(self.clock.now_ns, now_ns)
            for arrival in arrivals:
                scheduler.submit(as_engine_request(arrival))
            self.step()
        batcher = scheduler.batcher
        self.history.refusals, self.history.preemptions = dict(batcher.refusals), dict(batcher.preemptions)
        return self.history


def assert_equal_histories(replica: History, engine: History) -> None:
    """Check every step that the replica took. After fast-forward it may have evicted pages of the next step already."""
    assert max(replica.steps) == max(engine.steps)
    for step, (tip, now_ns, counts) in replica.steps.items():
        their_tip, their_now_ns, their_counts = engine.steps[step]
        assert tip == their_tip, f"step {step}"
        assert counts == their_counts, f"step {step}"
        assert abs(now_ns - their_now_ns) < 1_000, f"step {step}"
    assert replica.events == engine.events
    assert replica.refusals == engine.refusals
    assert replica.preemptions == engine.preemptions


configs = st.builds(
    ReplicaConfig,
    page_size=st.just(4),
    kv_tokens=st.sampled_from([132, 160, 200, 2000]),
    max_running_requests=st.integers(1, 6),
    max_prefill_tokens=st.integers(2, 64),
    chunk_tokens=st.integers(1, 48),
    counts_decodes=st.booleans(),
    batch_mode=st.sampled_from(BATCH_MODES),
    new_token_ratio=st.sampled_from([0.7, 1.0, 0.1]),
    min_new_token_ratio=st.sampled_from([0.0, 0.1]),
    schedule_policy=st.sampled_from(POLICY_NAMES),
    preemption_policy=st.sampled_from(PREEMPTION_POLICY_NAMES),
)
hints = st.fixed_dictionaries(
    {
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from(["", "a", "b"]),
        "deadline_s": st.none() | st.sampled_from([0.5, 1.0, 2.0]),
    }
)
workloads = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 90), st.integers(1, 40), st.integers(0, 2), hints),
    min_size=1,
    max_size=12,
)


@pytest.mark.soak
@given(
    config=configs,
    workload=workloads,
    watermark=st.sampled_from([0, 0, 3, 9]),
    tenant_cap=st.sampled_from([None, None, 1]),
    fast=st.booleans(),
)
@settings(max_examples=num_examples(2), deadline=None)
def test_decisions_equal_those_of_the_reference_engine_in_every_step(
    config: ReplicaConfig,
    workload: list[tuple[int, int, int, int, dict[str, object]]],
    watermark: int,
    tenant_cap: int | None,
    fast: bool,
) -> None:
    arrivals = [
        attrs.evolve(recorded(index, at / 50, *sizes), **each) for index, (at, *sizes, each) in enumerate(workload)
    ]
    assert attrs.evolve(config.limits, counts_decodes=False) == scheduler_config(config).batch_limits
    limits = attrs.evolve(config.limits, watermark_pages=watermark, max_running_per_tenant=tenant_cap)
    replica = serve_in_replica(config, arrivals, limits, fast=fast)
    assert_equal_histories(replica, Engine(config=config, limits=limits).serve(replica.received))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_full_pool_preempts_and_evicts_alike(policy: str) -> None:
    """Every policy meets preemptions, evictions and cached prefixes here, whatever the examples above draw."""
    config = attrs.evolve(SMALL, kv_tokens=132, new_token_ratio=0.1, schedule_policy=policy)
    requests = [recorded(index, 0.02 * index, 30 + index, 50, index % 3) for index in range(8)]
    arrivals = [attrs.evolve(each, tenant=str(each.index % 2)) for each in requests]
    replica = serve_in_replica(config, arrivals, config.limits, fast=True)
    assert_equal_histories(replica, Engine(config=config, limits=config.limits).serve(replica.received))
    assert sum(replica.preemptions.values()) > 3
    assert any(type(event).__name__ == "BlockRemoved" for events in replica.events for event in events)


@given(prompt=st.integers(1, 60), output=st.integers(1, 60), num_pages=st.integers(1, 20))
def test_both_refuse_the_same_requests(prompt: int, output: int, num_pages: int) -> None:
    config = ReplicaConfig(page_size=4, kv_tokens=4 * num_pages)
    try:
        check_request_fits(scheduler_config(config), prompt, output)
        fits = True
    except ConfigError:
        fits = False
    assert config.can_hold(SimulatedRequest(recorded(0, 0.0, prompt, output))) is fits


@pytest.mark.parametrize("make_router", [RoundRobin, LeastLoaded])
def test_each_replica_of_a_simulation_equals_an_engine(make_router: Callable[[], Router]) -> None:
    """The simulation lets replicas run ahead and skips steps. An engine with a replica's requests decides alike."""
    config = attrs.evolve(SMALL, kv_tokens=160, schedule_policy="lpm")
    router = RecordingRouter(inner=make_router())
    requests = [recorded(index, 0.0031 * index + 7e-9, 20 + index, 40, index % 4) for index in range(30)]
    simulation = Simulation(
        config=SimulationConfig(replica=config, num_replicas=3, load_lag_s=0.01, notes_decisions=True),
        router=router,
        arrivals=requests,
    )
    for _ in simulation.run():
        pass
    for index, report in enumerate(simulation.report().replicas):
        engine = Engine(config=config, limits=config.limits)
        waiting = [(at_ns, each.recorded) for replica, at_ns, each in router.routed if replica == index]
        assert len(waiting) == report.num_requests > 5
        while waiting or engine.scheduler.has_work:
            if not engine.scheduler.has_work:
                engine.clock.now_ns = max(engine.clock.now_ns, waiting[0][0])
            while waiting and waiting[0][0] <= engine.clock.now_ns:
                engine.scheduler.submit(as_engine_request(waiting.pop(0)[1]))
            engine.step()
        assert report.decision_tip == engine.log.tip
        assert report.num_steps == engine.scheduler.num_steps
