"""Routers over replicas with a speed: bounded imbalance with old reports, no starved replica, and in the simulation."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.routing import KvRouter, LeastCost, Pick, Picker, PowerOfTwo, ReplicaSet, Softmax
from scheduler_components.values import LoadSnapshot
from scheduler_engine.simulation import (
    Outage,
    ReplicaConfig,
    RoundRobin,
    Router,
    Scaling,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TraceRequest,
    encode_report,
)

STEP_S = 0.05
INTERVAL_S = 0.1


@dataclass(slots=True, kw_only=True)
class Server:
    """A replica that computes a number of blocks per second, and reports what is left to compute.

    Attributes:
        blocks_per_s: its speed.
        queue: blocks to compute of each request.
        watermarks: the last received ticket of each dispatcher.
        is_dead: it computes and reports nothing.
    """

    blocks_per_s: float
    queue: deque[float] = field(default_factory=deque)
    watermarks: dict[str, int] = field(default_factory=dict)
    is_dead: bool = False
    num_reports: int = 0

    @property
    def blocks(self) -> float:
        return sum(self.queue)

    def receive(self, pick: Pick, blocks: float) -> None:
        self.queue.append(blocks)
        self.watermarks[pick.ticket[0]] = pick.ticket[1]

    def run(self, seconds: float) -> None:
        left = 0.0 if self.is_dead else self.blocks_per_s * seconds
        while self.queue and left > 0:
            done = min(left, self.queue[0])
            left -= done
            self.queue[0] -= done
            if self.queue[0] <= 0:
                self.queue.popleft()

    def report(self) -> LoadSnapshot:
        self.num_reports += 1
        return LoadSnapshot(
            sequence=self.num_reports,
            num_waiting_uncached_tokens=round(self.blocks),
            num_total_tokens=round(self.blocks),
            dispatched_watermarks=tuple(self.watermarks.items()),
        )


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Servers behind routers that get their reports ``lag_s`` late. Pages have one token, prompts are distinct.

    Attributes:
        routers: take turns. None knows what the others send before a report includes it.
        forgets: break the router: it does not count what it has sent.
    """

    routers: list[KvRouter]
    servers: list[Server]
    lag_s: float
    forgets: bool = False
    now_s: float = 0.0
    counts: list[int] = field(default_factory=list)
    _reports: deque[tuple[float, int, LoadSnapshot]] = field(default_factory=deque)
    _next_report_s: float = 0.0
    _num_prompts: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.servers)
        for place in range(len(self.servers)):
            for router in self.routers:
                router.on_replica_up(place, 0.0)

    def send(self, blocks: int) -> int:
        self._num_prompts += 1
        prompt = range(1000 * self._num_prompts, 1000 * self._num_prompts + blocks)
        router = self.routers[self._num_prompts % len(self.routers)]
        pick = router.route_tokens(prompt, now_s=self.now_s)
        assert pick is not None
        assert isinstance(pick.replica, int)
        if self.forgets:
            router.finish(pick)
        self.servers[pick.replica].receive(pick, blocks)
        self.counts[pick.replica] += 1
        return pick.replica

    def run_step(self) -> None:
        self.now_s += STEP_S
        for server in self.servers:
            server.run(STEP_S)
        if self.now_s >= self._next_report_s:
            self._next_report_s += INTERVAL_S
            alive = [(place, server) for place, server in enumerate(self.servers) if not server.is_dead]
            self._reports += [(self.now_s + self.lag_s, place, server.report()) for place, server in alive]
        while self._reports and self._reports[0][0] <= self.now_s:
            _, place, load = self._reports.popleft()
            for router in self.routers:
                router.on_load_report(place, load, self.now_s)

    def imbalances(self, rng: random.Random, *, blocks: int, usage: float, duration_s: float) -> Iterator[float]:
        """Serve random arrivals, and yield the difference between the most and the least loaded server."""
        per_step = usage * sum(server.blocks_per_s for server in self.servers) / blocks * STEP_S
        due = 0.0
        for _ in range(round(duration_s / STEP_S)):
            due += rng.uniform(0, 2 * per_step)
            while due >= 1:
                due -= 1
                self.send(blocks)
            loads = [server.blocks for server in self.servers]
            yield max(loads) - min(loads)
            self.run_step()


def make_fleet(num_servers: int, blocks_per_s: float, **settings: object) -> Fleet:
    servers = [Server(blocks_per_s=blocks_per_s) for _ in range(num_servers)]
    return Fleet(**{"routers": [KvRouter(page_size=1)], "servers": servers, "lag_s": 1.0, **settings})  # type: ignore[arg-type]


def bound(blocks_per_s: float, blocks: int, lag_s: float = 1.0) -> float:
    """The largest imbalance: one request, and what a server computes in the age of a report."""
    return blocks + blocks_per_s * (lag_s + INTERVAL_S + 2 * STEP_S) + 1  # reports round


@given(st.integers(0, 10**6), st.integers(2, 8), st.sampled_from([10.0, 40.0]), st.sampled_from([2, 8, 20]))
@settings(max_examples=15)
def test_the_imbalance_is_bounded_with_reports_of_one_second_ago(
    seed: int, num_servers: int, blocks_per_s: float, blocks: int
) -> None:
    fleet = make_fleet(num_servers, blocks_per_s)
    worst = max(fleet.imbalances(random.Random(seed), blocks=blocks, usage=0.95, duration_s=8.0))
    assert worst <= bound(blocks_per_s, blocks)


def test_a_router_that_does_not_count_what_it_sent_makes_herds() -> None:
    fleet = make_fleet(8, 40.0, forgets=True)
    worst = max(fleet.imbalances(random.Random(1), blocks=8, usage=0.95, duration_s=8.0))
    assert worst > 3 * bound(40.0, 8)


def test_routers_that_do_not_know_of_each_other_pick_at_random() -> None:
    """All of them see the same old reports, so the cheapest replica is the same for all."""

    def worst(pickers: list[Picker]) -> float:
        routers = [KvRouter(page_size=1, picker=picker, name=f"r{number}") for number, picker in enumerate(pickers)]
        fleet = make_fleet(8, 40.0, routers=routers)
        return max(fleet.imbalances(random.Random(4), blocks=8, usage=0.8, duration_s=10.0))

    least = worst([LeastCost() for _ in range(16)])
    assert worst([Softmax(rng=random.Random(seed), temperature=0.5) for seed in range(16)]) < 0.8 * least
    assert worst([PowerOfTwo(rng=random.Random(seed)) for seed in range(16)]) < 0.8 * least


def test_no_replica_starves_under_load() -> None:
    fleet = make_fleet(6, 20.0)
    for _ in fleet.imbalances(random.Random(2), blocks=5, usage=0.9, duration_s=20.0):
        pass
    assert min(fleet.counts) > sum(fleet.counts) / 6 / 2


@pytest.mark.parametrize("usage", [0.1, 0.9])
@pytest.mark.parametrize(
    "picker", [Softmax(rng=random.Random(1)), PowerOfTwo(rng=random.Random(1))], ids=["softmax", "power-of-two"]
)
def test_no_replica_starves_with_a_random_picker(picker: Softmax | PowerOfTwo, usage: float) -> None:
    fleet = make_fleet(6, 20.0, routers=[KvRouter(page_size=1, picker=picker)])
    for _ in fleet.imbalances(random.Random(2), blocks=5, usage=usage, duration_s=30.0):
        pass
    assert min(fleet.counts) > sum(fleet.counts) / 6 / 3


def test_idle_replicas_take_turns() -> None:
    fleet = make_fleet(5, 1000.0)
    for _ in range(52):
        fleet.send(5)
        for _ in range(30):
            fleet.run_step()
    assert max(fleet.counts) - min(fleet.counts) <= 1


@given(st.integers(0, 10**6), st.sampled_from([0.5, 1.5, 3.0]))
@settings(max_examples=10)
def test_a_dead_replica_receives_nothing_after_its_bound(seed: int, silence_s: float) -> None:
    router = KvRouter(page_size=1, replicas=ReplicaSet(silence_s=silence_s))
    fleet = make_fleet(3, 20.0, routers=[router], lag_s=0.2)
    rng = random.Random(seed)
    for _ in fleet.imbalances(rng, blocks=4, usage=0.5, duration_s=2.0):
        pass
    fleet.servers[1].is_dead, died_s = True, fleet.now_s
    counts_at_bound = None
    for _ in fleet.imbalances(rng, blocks=4, usage=0.5, duration_s=silence_s + 3.0):
        if counts_at_bound is None and fleet.now_s > died_s + fleet.lag_s + silence_s:
            counts_at_bound = list(fleet.counts)
    assert counts_at_bound is not None
    assert fleet.counts[1] == counts_at_bound[1]
    assert fleet.counts[0] > counts_at_bound[0]


def test_requests_of_a_new_prompt_follow_the_first_one() -> None:
    """Until events come, only the speculative entries know where the prompt is."""

    def num_computed(ttl_s: float) -> int:
        router = KvRouter(page_size=1)
        router.speculative.ttl_s = ttl_s
        for place in range(8):
            router.on_replica_up(place, 0.0)
        total = 0
        for number in range(20):
            pick = router.route_tokens(range(100), now_s=number / 50)
            assert pick is not None
            total += 100 - pick.device_blocks
            router.finish(pick)
        return total

    assert num_computed(10.0) == 100, "the first one computes it"
    assert num_computed(1e-9) == 2000, "without entries all of them do"


def test_equal_requests_at_one_time_are_spread_evenly() -> None:
    router = KvRouter(page_size=1)
    for place in range(8):
        router.on_replica_up(place, 0.0)
    counts = [0] * 8
    for _ in range(160):
        pick = router.route_tokens(range(100), now_s=0.0)
        assert pick is not None
        assert isinstance(pick.replica, int)
        counts[pick.replica] += 1
        assert max(counts) - min(counts) <= 2, "a cached prompt is worth one more request"


# --- in the simulation ---

SMALL = ReplicaConfig(page_size=16, kv_tokens=8192, max_running_requests=8, max_prefill_tokens=1024, chunk_tokens=512)


def conversations(num_requests: int, num_conversations: int, seed: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    return [
        TraceRequest(
            index=index,
            arrival_s=index / 8,
            input_length=1024,
            output_length=rng.randrange(5, 20),
            hash_ids=(conversation := rng.randrange(num_conversations), 1000 + conversation),
        )
        for index in range(num_requests)
    ]


def simulate(router: Router, **settings: object) -> SimulationReport:
    config = SimulationConfig(**{"replica": SMALL, "num_replicas": 4, "load_lag_s": 0.05, **settings})  # type: ignore[arg-type]
    simulation = Simulation(config=config, router=router, arrivals=conversations(120, 12, seed=3))
    for _ in simulation.run():
        pass
    return simulation.report()


def test_in_the_simulation_it_finds_the_cached_prefixes() -> None:
    ours = simulate(KvRouter(page_size=16), event_lag_s=0.05)
    theirs = simulate(RoundRobin())
    assert ours.num_finished == theirs.num_finished == 120
    assert ours.hit_rate["device"] > 1.3 * theirs.hit_rate["device"]
    assert min(each.num_requests for each in ours.replicas) > 0


def test_in_the_simulation_replicas_fail_return_and_scale() -> None:
    outages = (Outage(replica=1, at_s=3.0, down_s=3.0, detection_s=0.5),)
    scalings = (Scaling(at_s=8.0, num_replicas=6), Scaling(at_s=12.0, num_replicas=2))
    reports = [
        encode_report(
            simulate(
                KvRouter(page_size=16), event_lag_s=0.2, outages=outages, scalings=scalings, fast_forward=fast_forward
            )
        )
        for fast_forward in (True, True, False)
    ]
    assert reports[0] == reports[1] == reports[2]
    assert b'"num_unfinished":0' in reports[0]
