"""Simulation: deterministic, the same with and without fast-forward, and no request is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.recording_router import RecordingRouter

from scheduler_components import ConfigError
from scheduler_components.events import AllBlocksCleared, BlockRemoved, BlockStored, medium_group
from scheduler_components.kv_events import BatchDecoder
from scheduler_engine.simulation import (
    LeastLoaded,
    Outage,
    ReplicaConfig,
    RoundRobin,
    Router,
    Scaling,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TierConfig,
    TraceRequest,
    encode_report,
)
from tests.scheduler_engine.simulation.test_replica import SLOW_TIERS

SMALL = ReplicaConfig(page_size=4, kv_tokens=256, max_running_requests=4, max_prefill_tokens=64, chunk_tokens=32)


def recorded(index: int, arrival_s: float, prompt: int = 40, output: int = 20, prefix: int = 0) -> TraceRequest:
    return TraceRequest(index=index, arrival_s=arrival_s, input_length=prompt, output_length=output, hash_ids=(prefix,))


@dataclass(slots=True, kw_only=True)
class ObservingRouter(RecordingRouter):
    """Records also what the events of each replica say that it holds, by tier."""

    blocks: dict[int, dict[object, set[object]]] = field(default_factory=dict)

    def on_events(self, replica: int, payload: bytes, now_s: float) -> None:
        RecordingRouter.on_events(self, replica, payload, now_s)
        batch = BatchDecoder().decode(payload)
        assert now_s >= batch.ts, "an event came before it happened"
        held = self.blocks[replica]
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                held.clear()
                continue
            assert isinstance(event, BlockStored | BlockRemoved)
            blocks = held.setdefault(medium_group(event.medium), set())
            (blocks.update if isinstance(event, BlockStored) else blocks.difference_update)(event.block_hashes)

    def on_replica_up(self, replica: int, now_s: float) -> None:
        RecordingRouter.on_replica_up(self, replica, now_s)
        self.blocks[replica] = {}

    @property
    def history(self) -> tuple[object, ...]:
        """All that it saw."""
        routed = [(replica, time_ns, request.rid) for replica, time_ns, request in self.routed]
        return routed, self.reports, self.event_times, self.finished, self.changes, self.blocks


def simulate(
    config: SimulationConfig, arrivals: Sequence[TraceRequest], router: Router
) -> tuple[Simulation, SimulationReport]:
    simulation = Simulation(config=config, router=router, arrivals=arrivals)
    progress = list(simulation.run())
    assert progress[-1].num_arrived == len(arrivals)
    return simulation, simulation.report()


def test_requests_are_served_on_all_replicas() -> None:
    config = SimulationConfig(replica=SMALL, num_replicas=2)
    _, report = simulate(config, [recorded(index, 0.1 * index) for index in range(10)], RoundRobin())
    assert (report.num_requests, report.num_finished, report.num_unfinished) == (10, 10, 0)
    assert [each.num_requests for each in report.replicas] == [5, 5]
    assert report.generated_tokens == 200
    assert report.hit_rate["device"] > 0.5, "all prompts are equal"
    assert report.cached_tokens == pytest.approx(report.hit_rate["device"] * report.prompt_tokens)
    assert report.ttft_s.p50 == pytest.approx(5e-3 + 40e-6 * 12, rel=0.5)
    assert report.timeline[0].time_s == 0.0


def test_positions_are_computed_again_after_a_preemption_or_a_failure() -> None:
    """Three requests need more pages than the pool has. If their replica fails before that, both happen."""
    replica = attrs.evolve(SMALL, kv_tokens=96, new_token_ratio=0.1)
    arrivals = [recorded(index, 0.0, prompt=24, output=60, prefix=index) for index in range(3)]
    config = SimulationConfig(replica=replica, num_replicas=1)
    _, preempted = simulate(config, arrivals, RoundRobin())
    assert preempted.num_retractions > 0
    assert preempted.recomputed_by_cause == {"preemption": preempted.recomputed_tokens, "migration": 0}
    outage = Outage(replica=0, at_s=0.02, down_s=0.1, detection_s=0.0)
    _, failed = simulate(attrs.evolve(config, outages=(outage,)), arrivals, RoundRobin())
    assert failed.num_migrations == 3
    assert min(failed.recomputed_by_cause.values()) > 0
    assert sum(failed.recomputed_by_cause.values()) == failed.recomputed_tokens


def test_replicas_are_added_and_drained() -> None:
    arrivals = [recorded(index, 0.05 * index, prefix=index) for index in range(60)]
    scalings = (Scaling(at_s=1.0, num_replicas=3), Scaling(at_s=2.0, num_replicas=1))
    router = RecordingRouter(inner=RoundRobin())
    _, report = simulate(
        SimulationConfig(replica=SMALL, num_replicas=1, scalings=scalings, sample_s=0.5), arrivals, router
    )
    assert report.num_finished == 60
    routed = [{replica for replica, at_ns, _ in router.routed if at_ns // 10**9 == second} for second in range(3)]
    assert routed == [{0}, {0, 1, 2}, {0}]
    num_replicas = {point.time_s: point.num_replicas for point in report.timeline}
    assert [num_replicas[at_s] for at_s in (0.5, 1.5, 2.5)] == [1, 3, 1]


def test_the_report_has_the_queue_of_each_replica() -> None:
    arrivals = [recorded(index, 0.0, output=60, prefix=index) for index in range(12)]
    scalings = (Scaling(at_s=0.3, num_replicas=2),)
    config = SimulationConfig(replica=SMALL, num_replicas=1, sample_s=0.1, scalings=scalings)
    _, report = simulate(config, arrivals, RoundRobin())
    first, second = report.replicas
    assert len(first.running) == len(first.waiting) == len(second.running) == len(report.timeline)
    for at, point in enumerate(report.timeline):
        assert first.running[at] + second.running[at] == point.num_running
        assert first.waiting[at] + second.waiting[at] == point.num_waiting
    assert max(first.waiting) >= 8, "four slots"
    assert set(second.running) == {0}


def test_the_report_has_tenants_and_deadlines() -> None:
    arrivals = [
        attrs.evolve(
            recorded(index, 0.0, prefix=index), tenant="ab"[index % 2], deadline_s=[0.05, 30.0, None][index % 3]
        )
        for index in range(12)
    ]
    _, report = simulate(SimulationConfig(replica=SMALL, num_replicas=1), arrivals, RoundRobin())
    assert [(each.name, each.num_requests, each.generated_tokens) for each in report.tenants] == [
        ("a", 6, 120),
        ("b", 6, 120),
    ]
    assert report.deadline_share == pytest.approx(6 / 8), "of four requests with 50 ms, two get a slot in time"
    means = [each.mean_e2e_s for each in report.tenants]
    assert report.tenant_fairness == pytest.approx(sum(means) ** 2 / (2 * sum(mean**2 for mean in means)))
    _, plain = simulate(SimulationConfig(replica=SMALL, num_replicas=1), [recorded(0, 0.0)], RoundRobin())
    assert (plain.tenants, plain.deadline_share) == ((), 1.0)


def test_a_policy_reads_the_hints_of_the_trace() -> None:
    arrivals = [attrs.evolve(recorded(index, 0.0, prefix=index), priority=index) for index in range(8)]
    config = SimulationConfig(replica=attrs.evolve(SMALL, max_running_requests=1, schedule_policy="priority"))
    router = RecordingRouter(inner=RoundRobin())
    simulate(attrs.evolve(config, num_replicas=1), arrivals, router)
    assert [rid for _, _, rid in router.finished] == [f"r{index}" for index in (7, 6, 5, 4, 3, 2, 1, 0)]


def test_load_reports_have_the_work_that_was_done() -> None:
    """The differences of two reports give the rates of prefill and decode, as those of an engine do."""
    router = RecordingRouter(inner=LeastLoaded())
    config = SimulationConfig(replica=SMALL, num_replicas=1, load_interval_s=0.01)
    _, report = simulate(config, [recorded(index, 0.2 * index, output=50, prefix=index) for index in range(4)], router)
    last = router.reports[-1][2]
    moments = last.decode_moments
    assert moments is not None
    assert last.total_prefill_uncached_tokens == report.replicas[0].prefill_tokens == 160
    assert moments.steps + 4 * 2 == report.replicas[0].num_steps, "each prompt takes two chunks"
    assert last.total_prefill_busy_us + moments.time_us == pytest.approx(
        report.replicas[0].busy_share * report.duration_s * 1e6, abs=99
    )
    assert any(load.gen_throughput > 0 for _, _, load in router.reports)


def test_least_loaded_does_not_herd_while_reports_are_old() -> None:
    """All requests arrive before any report of the first ones: the dispatch ledger keeps the replicas even."""
    arrivals = [recorded(index, 0.001 * index, prefix=index) for index in range(40)]
    config = SimulationConfig(replica=SMALL, num_replicas=4, load_lag_s=1.0)
    _, report = simulate(config, arrivals, LeastLoaded())
    assert [each.num_requests for each in report.replicas] == [10] * 4


workloads = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 90), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=14
)


def _are_apart(outages: Sequence[Outage]) -> bool:
    """Return True if no replica fails while it is away."""
    try:
        SimulationConfig(outages=tuple(outages))
    except ConfigError:
        return False
    return True


_outages = st.lists(
    st.builds(
        Outage,
        replica=st.integers(0, 1),
        at_s=st.sampled_from([0.0, 0.1, 0.35, 0.8]),
        down_s=st.sampled_from([None, 0.05, 0.3]),
        detection_s=st.sampled_from([0.0, 0.1, 0.5]),
    ),
    max_size=2,
)
outages = _outages.filter(_are_apart)
scalings = st.lists(
    st.builds(Scaling, at_s=st.sampled_from([0.2, 0.5, 0.9]), num_replicas=st.integers(1, 3)), max_size=2
)


@given(
    workload=workloads,
    outages=outages,
    scalings=scalings,
    lags=st.tuples(st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([0.0, 0.05])),
    make_router=st.sampled_from([RoundRobin, LeastLoaded]),
    tiers=st.sampled_from(
        [
            None,
            SLOW_TIERS,
            attrs.evolve(SLOW_TIERS, storage_tokens=0),
            attrs.evolve(SLOW_TIERS, storage_total_gb_per_s=0.04),
        ]
    ),
)
@settings(max_examples=40, deadline=None)
@example(  # two replicas report in the same nanosecond
    workload=[(4, 60, 1, 1), (12, 33, 7, 0), (12, 33, 7, 0)],
    outages=[],
    scalings=[],
    lags=(0.0, 0.0),
    make_router=RoundRobin,
    tiers=SLOW_TIERS,
)
def test_every_history_is_deterministic_and_loses_no_request(
    workload: list[tuple[int, int, int, int]],
    outages: list[Outage],
    scalings: list[Scaling],
    lags: tuple[float, float],
    make_router: type[RoundRobin | LeastLoaded],
    tiers: TierConfig | None,
) -> None:
    arrivals = [
        recorded(index, at / 40, prompt, output, prefix)
        for index, (at, prompt, output, prefix) in enumerate(sorted(workload))
    ]
    config = SimulationConfig(
        replica=attrs.evolve(SMALL, kv_tokens=160, tiers=tiers),
        num_replicas=2,
        event_lag_s=lags[0],
        load_lag_s=lags[1],
        load_interval_s=0.03,
        sample_s=0.25,
        outages=tuple(outages),
        scalings=tuple(scalings),
        notes_decisions=True,
    )
    router = ObservingRouter(inner=make_router())
    simulation, report = simulate(config, arrivals, router)
    slow_router = ObservingRouter(inner=make_router())
    _, slow = simulate(attrs.evolve(config, fast_forward=False), arrivals, slow_router)
    assert encode_report(report) == encode_report(slow)
    assert router.history == slow_router.history, "the router sees the same"

    assert report.num_finished + report.num_refused + report.num_unfinished == len(arrivals)
    assert all(0 <= each.busy_share <= 1 for each in report.replicas)
    assert len({rid for _, _, rid in router.finished}) == len(router.finished)
    if router.up:
        assert report.num_unfinished == 0
    for place in simulation._places:  # what the events say is what the caches hold
        if place.scheduler is not None:
            assert not place.scheduler.results.failures.counts
            assert not place.scheduler.kv_events.failures.counts
            place.scheduler.cache.check_integrity()
            if place.index in router.up:
                held = {group: set(blocks) for group, blocks in place.scheduler.cache.held_blocks().items()}
                said = router.blocks[place.index]
                assert {group: said.get(group, set()) for group in held} == held
                assert said.keys() <= held.keys()
