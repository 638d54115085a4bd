"""Tiers of a simulated replica: pages come back from host and storage, in the time that their links take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import attrs
import pytest
from kit.recording_router import RecordingRouter

from scheduler_components import ConfigError, ParallelState
from scheduler_components._internal.virtual_clock import NEVER_NS, VirtualClock
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.agreement.step_agreement import AgreementPart
from scheduler_components.cache import PrefixNamespace
from scheduler_components.checks.pool_stats_observer import AuditedPool
from scheduler_components.events import BlockRemoved, BlockStored, medium_group
from scheduler_components.hicache import HiCachePolicy, HiRadixCache
from scheduler_components.hicache.prefetch_queue import PrefetchQueue
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.scheduling.composition import Clocks
from scheduler_components.values import CachedTokens, TierStats
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler
from scheduler_engine.simulation import (
    Outage,
    ReplicaConfig,
    RoundRobin,
    Router,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TierConfig,
    TraceRequest,
)
from scheduler_engine.simulation.replica import SimulatedReplica
from scheduler_engine.simulation.request import SimulatedRequest
from scheduler_engine.simulation.tiers import SimulatedTiers, make_storage
from tests.scheduler_engine.simulation.test_replica import SLOW_TIERS, SMALL, recorded, serve

PAGE_S = 4e-3
"""A page of four tokens takes 4 ms on each link."""

TIERS = TierConfig(
    host_tokens=400,
    write_gb_per_s=1e-3,
    load_gb_per_s=1e-3,
    host_latency_s=0.0,
    storage_write_gb_per_s=1e-3,
    storage_read_gb_per_s=1e-3,
    storage_latency_s=0.0,
    token_bytes=1000,
    policy=HiCachePolicy(prefetch_threshold_pages=1),
)
ONE_PROMPT = attrs.evolve(SMALL, kv_tokens=44)
"""A pool that holds one prompt of 40 tokens."""


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    requests = [recorded(0, 0.0, 40, 2, 1), recorded(1, 1.0, 40, 2, 2), recorded(2, 2.0, 40, 2, 1)]
    run = serve(attrs.evolve(ONE_PROMPT, tiers=TIERS), requests, fast=True)
    assert run.cached == {"r0": CachedTokens(), "r1": CachedTokens(), "r2": CachedTokens(host=36)}
    assert run.tiers is not None
    assert (run.tiers.pages_loaded, run.tiers.pages_dropped) == (9, 0)
    computed = serve(ONE_PROMPT, requests, fast=True)
    saved_s = 5e-3 + 36 * 40e-6 + 32 * 40e-9  # the step of the first chunk, and 36 of 40 tokens
    late_s = (run.tips[2][2] - computed.tips[2][2]) / 1e9
    assert late_s == pytest.approx(9 * PAGE_S - saved_s, abs=1e-6), "here loading is slower than computing"


def test_a_load_by_layer_overlaps_the_forward() -> None:
    """The prompt of 40 tokens is computed in 6.6 ms and loaded in 9 pages: whichever is longer counts."""
    requests = [recorded(0, 0.0, 40, 2, 1), recorded(1, 1.0, 40, 2, 2), recorded(2, 2.0, 40, 2, 1)]
    policy = HiCachePolicy(load="by_layer")
    end_ns = {}
    for gb_per_s in (1e-3, 1.0):
        tiers = attrs.evolve(TIERS, policy=policy, load_gb_per_s=gb_per_s)
        run = serve(attrs.evolve(ONE_PROMPT, tiers=tiers), requests, fast=True)
        assert run.cached["r2"] == CachedTokens(host=36)
        end_ns[gb_per_s] = run.tips[2][2]
    forward_s = 5e-3 + 4 * 40e-6 + 40 * 40e-9
    expected_s = 9 * PAGE_S + forward_s / 32 - forward_s
    assert (end_ns[1e-3] - end_ns[1.0]) / 1e9 == pytest.approx(expected_s, abs=1e-6)


def test_what_the_host_cannot_hold_is_computed_again() -> None:
    requests = [recorded(index, float(index), 40, 2, index % 3) for index in range(6)]
    small = serve(attrs.evolve(ONE_PROMPT, tiers=attrs.evolve(TIERS, host_tokens=40)), requests, fast=True)
    large = serve(attrs.evolve(ONE_PROMPT, tiers=TIERS), requests, fast=True)
    assert sum(cached.host for cached in small.cached.values()) == 0
    assert sum(cached.host for cached in large.cached.values()) == 3 * 36


def test_preempted_requests_find_their_pages_on_the_host() -> None:
    policy = HiCachePolicy(write="write_through_selective", write_threshold_hits=99)
    config = attrs.evolve(SMALL, kv_tokens=128, new_token_ratio=0.1, tiers=attrs.evolve(TIERS, policy=policy))
    run = serve(config, [recorded(index, 0.0, 30, 70) for index in range(3)], fast=True)
    assert run.tiers is not None
    assert run.tiers.pages_written > 0, "only preemptions write"


def simulate(
    config: SimulationConfig, arrivals: Sequence[TraceRequest], router: Router | None = None
) -> SimulationReport:
    simulation = Simulation(config=config, router=router or RoundRobin(), arrivals=arrivals)
    for _ in simulation.run():
        pass
    return simulation.report()


def test_one_replica_reads_from_storage_what_another_one_has_written() -> None:
    config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=SHARED), num_replicas=2)
    report = simulate(config, [recorded(index, 5.0 * index, 40, 2, 1) for index in range(2)])
    assert report.hit_rate == {"device": 0.0, "host": 0.0, "storage": pytest.approx(36 / 80)}
    alone = attrs.evolve(config, replica=attrs.evolve(SMALL, tiers=TIERS))
    assert simulate(alone, [recorded(index, 5.0 * index, 40, 2, 1) for index in range(2)]).hit_rate == {
        "device": 0.0,
        "host": 0.0,
    }


def test_a_page_that_is_still_being_written_is_a_miss() -> None:
    """The write of ten pages to the host and to storage takes 80 ms. A request 50 ms later finds nothing."""
    config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=SHARED), num_replicas=2)
    for after_s, share in ((0.05, 0.0), (0.15, 36 / 80)):
        report = simulate(config, [recorded(index, after_s * index, 40, 2, 1) for index in range(2)])
        assert report.hit_rate["storage"] == pytest.approx(share)


def test_a_replica_that_fails_has_not_written_what_was_under_way() -> None:
    for at_s, share in ((0.06, 0.0), (0.15, 36 / 80)):
        outage = Outage(replica=0, at_s=at_s, detection_s=0.0)
        config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=SHARED), num_replicas=2, outages=(outage,))
        report = simulate(config, [recorded(index, 5.0 * index, 40, 2, 1) for index in range(2)])
        assert report.hit_rate["storage"] == pytest.approx(share)


SHARED = attrs.evolve(TIERS, storage_tokens=400, policy=attrs.evolve(TIERS.policy, prefetch="wait_complete"))
"""The same with storage, from which a request takes all that it finds."""


def test_each_direction_has_its_own_bandwidth_and_each_tier_its_latency() -> None:
    tiers = attrs.evolve(
        SHARED,
        load_gb_per_s=2e-3,
        host_latency_s=1e-3,
        storage_write_gb_per_s=4e-3,
        storage_read_gb_per_s=8e-3,
        storage_latency_s=2e-3,
    )
    mover = open_tiers(attrs.evolve(SMALL, tiers=tiers), VirtualClock()).mover
    links = (mover.to_host, mover.to_device, mover.to_storage, mover.from_storage)
    assert [link.duration_ns(1) / 1e6 for link in links] == [4 + 1, 2 + 1, 1 + 2, 0.5 + 2]


def test_storage_has_the_pages_and_the_bandwidth_of_its_settings() -> None:
    tiers = attrs.evolve(SHARED, storage_tokens=403, storage_total_gb_per_s=2e-3)
    storage = make_storage(tiers, SMALL.page_size)
    assert storage is not None
    assert (storage.pages.capacity_bytes, storage.ns_per_page) == (100, 2e6)
    unbounded = make_storage(SHARED, SMALL.page_size)
    assert unbounded is not None
    assert unbounded.ns_per_page == 0


def test_replicas_share_the_bandwidth_of_storage() -> None:
    """Two replicas write ten pages each, in 40 ms. If storage takes 8 ms per page, it has none of the second's then."""
    arrivals = [*(recorded(index, 0.0, 40, 2, index) for index in range(2)), recorded(2, 0.1, 40, 2, 1)]
    for total_gb_per_s, share in ((0.0, 36 / 120), (0.5e-3, 0.0)):
        tiers = attrs.evolve(SHARED, write_gb_per_s=1.0, storage_total_gb_per_s=total_gb_per_s)
        config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=tiers), num_replicas=2)
        assert simulate(config, arrivals).hit_rate["storage"] == pytest.approx(share)


def test_storage_serves_replicas_that_step_together_by_their_index() -> None:
    """The second replica gets its request first. At 70 ms storage has eight pages of the first one, and no other."""

    class Backwards(RoundRobin):
        def route(self, request: SimulatedRequest, now_s: float) -> int | None:
            return (1 - request.recorded.index) % 2

    tiers = attrs.evolve(SHARED, write_gb_per_s=1.0, storage_total_gb_per_s=0.5e-3)
    config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=tiers), num_replicas=2)
    for prefix, share in ((0, 0.0), (1, 32 / 120)):
        arrivals = [*(recorded(index, 0.0, 40, 2, index) for index in range(2)), recorded(2, 0.1, 40, 2, prefix)]
        assert simulate(config, arrivals, Backwards()).hit_rate["storage"] == pytest.approx(share)


def test_replicas_that_share_storage_step_in_the_order_of_time() -> None:
    """Two replicas get the same prompt together. What the first one writes is in storage 80 ms later: too late."""
    config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=SHARED), num_replicas=2)
    report = simulate(config, [recorded(index, 0.0, 40, 2, 1) for index in range(2)])
    assert report.hit_rate == {"device": 0.0, "host": 0.0, "storage": 0.0}


@pytest.mark.parametrize("fast", [True, False])
def test_a_plan_to_poll_a_copy_lapses_when_a_request_arrives_earlier(fast: bool) -> None:
    """A copy of the first prompt to the host ends at 38 ms. No request waits for it, and none is received late."""
    for third_s in (0.039, 0.041, 0.043, 0.045):
        arrivals = [recorded(0, 0.0, 40, 2, 1), recorded(1, 0.02, 40, 20, 2), recorded(2, third_s, 8, 2, 3)]
        with_host, without = (
            simulate(
                SimulationConfig(replica=attrs.evolve(SMALL, tiers=tiers), num_replicas=1, fast_forward=fast), arrivals
            )
            for tiers in (TIERS, None)
        )
        assert (with_host.queue_s, with_host.ttft_s, with_host.e2e_s) == (
            without.queue_s,
            without.ttft_s,
            without.e2e_s,
        )


def test_a_replica_reports_that_it_is_idle_while_copies_are_under_way() -> None:
    router = RecordingRouter(inner=RoundRobin())
    config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=TIERS), num_replicas=1, load_interval_s=9.0)
    simulate(config, [recorded(0, 0.0, 40, 2, 1)], router)
    idle_ns = [time_ns for _, time_ns, load in router.reports if not load.num_running_reqs]
    [(_, end_ns, _)] = router.finished
    assert idle_ns[0] == end_ns


def test_a_request_that_migrates_keeps_where_its_prompt_was_found_first() -> None:
    """Nothing was cached at first. The other replica reads the prompt from storage, which is no hit of the client's."""
    outage = Outage(replica=0, at_s=0.3, detection_s=0.0)
    config = SimulationConfig(replica=attrs.evolve(SMALL, tiers=SHARED), num_replicas=2, outages=(outage,))
    report = simulate(config, [recorded(0, 0.0, 40, 100, 1)])
    read = report.replicas[1].tiers
    assert read is not None
    assert (report.num_finished, report.num_migrations) == (1, 1)
    assert read.storage_hit_tokens >= 36
    assert report.hit_rate == {"device": 0.0, "host": 0.0, "storage": 0.0}


def test_load_reports_do_not_count_what_storage_brings() -> None:
    config, storage = attrs.evolve(SMALL, tiers=SHARED), make_storage(SHARED, SMALL.page_size)
    writer, reader = (SimulatedReplica.compose(config, storage=storage) for _ in range(2))
    counts: list[int] = []
    for index, replica in enumerate((writer, reader)):
        counts.clear()
        replica.clock.now_ns = writer.clock.now_ns
        replica.submit(SimulatedRequest(recorded(index, 0.0, 40, 2, 1)))
        while replica.has_work:
            replica.clock.now_ns = replica.ready_ns
            replica.step()
            counts.append(replica.get_loads().num_waiting_uncached_tokens)
    assert list(dict.fromkeys(counts)) == [40, 4, 0], "before the answer to the query, until the admission, after it"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("host_tokens", 2**35, "host_tokens="),
        ("host_tokens", 2**34, "host_tokens=17179869184: has more than 16,777,216 pages of 4 tokens"),
        ("host_tokens", 3, "host_tokens=3: does not hold one page"),
        ("storage_tokens", 2**35, "storage_tokens="),
        ("storage_tokens", 2, "storage_tokens=2: does not hold one page"),
        ("token_bytes", 2**40, "token_bytes="),
        ("load_gb_per_s", 1e-300, "load_gb_per_s="),
        ("load_gb_per_s", 0, "load_gb_per_s=0: is not a bandwidth"),
        ("storage_total_gb_per_s", 1e-300, "storage_total_gb_per_s="),
        ("storage_latency_s", 1e300, "storage_latency_s="),
    ],
)
def test_impossible_tiers_are_refused(name: str, value: float, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        attrs.evolve(SMALL, tiers=attrs.evolve(TIERS, **{name: value}))


def test_events_say_which_tier_holds_what() -> None:
    payloads: list[bytes] = []
    config = attrs.evolve(ONE_PROMPT, tiers=attrs.evolve(TIERS, storage_tokens=400))
    replica = SimulatedReplica.compose(config, deliver_events=payloads.append)
    for index, prefix in enumerate((1, 2, 1, 3)):
        replica.submit(SimulatedRequest(recorded(index, 0.0, 40, 2, prefix)))
        while replica.has_work:
            replica.clock.now_ns = replica.ready_ns
            replica.step()
    held: dict[object, set[object]] = {}
    for payload in payloads:
        for event in BatchDecoder().decode(payload).events:
            assert isinstance(event, BlockStored | BlockRemoved)
            blocks = held.setdefault(medium_group(event.medium), set())
            (blocks.update if isinstance(event, BlockStored) else blocks.difference_update)(event.block_hashes)
    assert held == {group: set(blocks) for group, blocks in replica.cache.held_blocks().items()}
    assert sorted(map(len, held.values())) == [10, 30, 30]


@dataclass(slots=True, kw_only=True)
class ReferenceTiers:
    """The ``CacheTiers`` of a reference scheduler over the tiers of a simulated replica.

    It is the ``LayerDoneCounter`` of the device, too. Its caller advances the clock while the scheduler waits.
    """

    tiers: SimulatedTiers
    lower_pools: ClassVar[Sequence[AuditedPool]] = ()

    @property
    def cache(self) -> HiRadixCache:
        return self.tiers.cache

    @property
    def prefetch_queue(self) -> PrefetchQueue:
        return self.tiers.cache.prefetch_queue

    @property
    def num_operations(self) -> int:
        return self.tiers.num_operations

    @property
    def num_pages_in_transfer(self) -> int:
        return self.tiers.cache.num_pages_in_transfer

    @property
    def state_digest(self) -> int:
        return self.tiers.state_digest

    @property
    def agreement_parts(self) -> Sequence[AgreementPart]:
        return (self.tiers.stepper,)

    def write_to_host(self, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        self.tiers.cache.write_to_host(token_ids, namespace)

    def stats(self) -> TierStats:
        return self.tiers.stats()

    def clear_storage_index(self) -> None:
        self.tiers.cache.clear_storage_index()

    def wait(self) -> None:
        self.tiers.submit()

    def close(self) -> None:
        pass

    def start_batch(self) -> None:
        self.tiers.submit()

    def wait_until(self, layer: int) -> None:
        """Return: this policy loads pages before a request runs."""


@pytest.mark.parametrize("storage_tokens", [0, 400])
def test_decisions_equal_those_of_the_reference_engine(storage_tokens: int) -> None:
    policy = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1)
    tiers = attrs.evolve(SLOW_TIERS, policy=policy, storage_tokens=storage_tokens)
    config = attrs.evolve(SMALL, kv_tokens=160, tiers=tiers)
    requests = [recorded(index, 0.2 * index, 25 + 5 * index, 45, index % 3) for index in range(9)]
    ours = serve(config, requests, fast=True)
    assert ours.tiers is not None
    assert ours.tiers.host_hit_tokens > 0

    clock, log, tips = VirtualClock(), DecisionLog(), list[tuple[str, int]]()
    virtual = ReferenceTiers(tiers=open_tiers(config, clock))
    reference = Scheduler.compose(
        SchedulerConfig(
            page_size=config.page_size,
            kv_tokens=config.kv_tokens,
            max_running_requests=config.max_running_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            chunk_tokens=config.chunk_tokens,
        ),
        ParallelState.trivial(),
        SimulatedDevice(clock=clock, sleep=lambda seconds: advance(clock, seconds), layer_counter=virtual),
        tiers=virtual,
        clocks=Clocks(wall=clock, monotonic=clock),
        decisions=log,
    )
    waiting, running = list(requests), list[EngineRequest]()
    while waiting or reference.has_work:
        arrival_ns = round(waiting[0].arrival_s * 1e9) if waiting else NEVER_NS
        if not reference.has_work:
            clock.now_ns = max(clock.now_ns, arrival_ns)
        while waiting and round(waiting[0].arrival_s * 1e9) <= clock.now_ns:
            simulated = SimulatedRequest(waiting.pop(0))
            limits = SamplingLimits(max_new_tokens=simulated.limits.max_new_tokens, ignore_eos=True)
            running.append(EngineRequest(simulated.rid, simulated.token_ids, limits, stream_interval=0))
            reference.submit(running[-1])
        num_calls, now_ns = virtual.tiers.num_calls, clock.now_ns
        reference.step()
        virtual.tiers.submit()
        ended = [request for request in running if request.finish_reason is not None]
        tips += [(request.rid, log.tip) for request in ended]
        running = [request for request in running if request.finish_reason is None]
        if clock.now_ns == now_ns and virtual.tiers.num_calls == num_calls:  # it waits for a transfer or an arrival
            arrival_ns = round(waiting[0].arrival_s * 1e9) if waiting else NEVER_NS
            clock.now_ns = max(now_ns, min(virtual.tiers.next_end_ns, arrival_ns))
    assert tips == [(rid, tip) for rid, tip, _ in ours.tips]


def open_tiers(config: ReplicaConfig, clock: VirtualClock) -> SimulatedTiers:
    assert config.tiers is not None
    return SimulatedTiers.open(
        config.tiers,
        page_size=config.page_size,
        kv_tokens=config.kv_tokens,
        clock=clock,
        storage=make_storage(config.tiers, config.page_size),
        record=False,
    )


def advance(clock: VirtualClock, seconds: float) -> None:
    clock.now_ns += round(seconds * 1e9)
