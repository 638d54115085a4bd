"""All ranks of a replica, given the same calls, take the same decisions; only the stream's owner speaks.

Ranks differ here in everything that may differ: rank, device speed, clocks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.digest_workloads import digest_of
from kit.searches import num_examples

from scheduler_components import ParallelState
from scheduler_components.scheduling.composition import Clocks, SchedulerSinks
from scheduler_components.testing.fakes import ListEventSink
from scheduler_components.values import BatchingStats, LoadSnapshot, SchedulerStats
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler, StepResult

MODEL = SimulatedModel(vocab_size=4)


@dataclass(frozen=True)
class Submit:
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Abort:
    number: int


Call = Submit | Abort
calls = st.one_of(
    st.builds(Submit, st.lists(st.integers(0, 3), min_size=1, max_size=16).map(tuple), st.integers(1, 11)),
    st.builds(Abort, st.integers(0, 10)),
)
workloads = st.lists(st.lists(calls, max_size=4), min_size=1, max_size=20)


@dataclass
class SchedulerRank:
    """One scheduler process, in this process: its own clocks, its own device."""

    parallel: ParallelState
    kv_pages: int = 9
    publisher: ListEventSink = field(default_factory=ListEventSink)

    def __post_init__(self) -> None:
        ticks = itertools.count(1000 * self.parallel.tp_rank, 0.01 * (1 + self.parallel.tp_rank))
        self.scheduler = Scheduler.compose(
            SchedulerConfig(page_size=2, kv_tokens=2 * self.kv_pages + 8, max_prefill_tokens=12, chunk_tokens=5),
            self.parallel,
            SimulatedDevice(
                model=MODEL, speed=1 + self.parallel.tp_rank, clock=lambda: float(next(ticks)), sleep=lambda _: None
            ),
            sinks=SchedulerSinks(events=self.publisher),
            clocks=Clocks(wall=lambda: float(next(ticks)), monotonic=lambda: float(next(ticks))),
        )
        self.num_submitted = 0

    def call(self, call: Call) -> None:
        if isinstance(call, Abort):
            self.scheduler.abort(f"r{call.number}")
            return
        self.scheduler.submit(EngineRequest(f"r{self.num_submitted}", call.prompt, SamplingLimits(call.max_new_tokens)))
        self.num_submitted += 1

    def step(self, step_calls: list[Call]) -> StepResult:
        for call in step_calls:
            self.call(call)
        return self.scheduler.step()

    def blocks(self) -> list[int]:
        return list(self.scheduler.cache.block_hashes())


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(1))
@given(workloads, st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4)]))
@example([[Submit((0, 1, 2, 3) * 4, 8), Submit((3, 2, 1, 0) * 4, 8)], [], [Abort(0)]], (2, 2))
@example(
    [*[[Submit((0,), 1)]] * 2, [Submit((0, 1, *[0] * 9), 1), Submit((0,) * 15, 1)], *[[]] * 5, [Submit((0,), 1)]],
    (1, 2),
)
def test_ranks_of_a_replica_stay_equal(workload: list[list[Call]], sizes: tuple[int, int]) -> None:
    cp_size, tp_size = sizes
    world = [
        ParallelState.from_tp_rank(rank, tp_size=2 * cp_size * tp_size, attn_dp_size=2, attn_cp_size=cp_size)
        for rank in range(2 * cp_size * tp_size)
    ]
    replica = [SchedulerRank(parallel) for parallel in world if parallel.attn_dp_rank == 1]
    steps = iter(workload)
    while (step_calls := next(steps, None)) is not None or replica[0].scheduler.has_work:
        results = [rank.step(step_calls or []) for rank in replica]
        assert all(result == results[0] for result in results)
        assert all(rank.blocks() == replica[0].blocks() for rank in replica)
        assert all(counters(rank) == counters(replica[0]) for rank in replica)
    speakers = [rank for rank in replica if rank.publisher.batches]
    assert all(rank.parallel.owns_kv_stream for rank in speakers)
    assert bool(speakers) == bool(replica[0].publisher.batches)
    assert {batch.attn_dp_rank for rank in speakers for batch in rank.publisher.batches} <= {1}


def counters(rank: SchedulerRank) -> SchedulerStats:
    """Return all statistics except times, rates and forecasts, which depend on each rank's clock."""
    sources = rank.scheduler.metrics.sources
    return SchedulerStats(
        (),
        LoadSnapshot(),
        msgspec.structs.replace(sources["counters"].stats(), preemptions_per_s=0.0),
        tiers=sources["tiers"].stats(),
        receiver=sources["receiver"].stats(),
        quiesce=sources["quiesce"].stats(),
        batching=BatchingStats(new_token_ratio=sources["batching"].stats().new_token_ratio),
    )


def digests(workload: list[list[Call]], kv_pages: int = 9) -> list[int]:
    rank = SchedulerRank(ParallelState.trivial(), kv_pages)
    return [rank.step(step_calls).digest for step_calls in workload]


BASE: list[list[Call]] = [[Submit((0, 1, 2), 4)], [Submit((3, 3, 1, 2), 4)], [], [Abort(1)], []]


def test_the_digest_shows_every_difference_between_two_ranks() -> None:
    """From the step on in which they part, not later, and for good."""
    others: list[tuple[int, list[list[Call]]]] = [
        (0, [[Submit((0, 1, 2, 3), 4)], *BASE[1:]]),  # a longer prompt
        (1, [BASE[0], [], *BASE[2:]]),  # a request that did not arrive
        (2, [*BASE[:2], [Abort(0)], *BASE[3:]]),  # an abort too many
        (3, [*BASE[:3], [Abort(0)], BASE[4]]),  # an abort of another
    ]
    base = digests(BASE)
    for parts_at, workload in others:
        equal = [one == other for one, other in zip(base, digests(workload), strict=True)]
        assert equal == [True] * parts_at + [False] * (len(BASE) - parts_at)


def test_the_digest_shows_a_pool_of_another_size_in_the_first_step() -> None:
    assert all(one != other for one, other in zip(digests(BASE), digests(BASE, kv_pages=10), strict=True))


def test_the_digest_shows_a_call_before_the_next_step() -> None:
    """Also where the next batch is the same with and without it: a request that waits changes no batch."""
    plain, submits, aborts = (SchedulerRank(ParallelState.trivial()) for _ in range(3))
    for rank in (plain, submits, aborts):
        rank.step([Submit((0, 1, 2), 4)])
    submits.call(Submit((1,), 1))
    aborts.call(Abort(0))
    assert len({rank.scheduler.state_digest for rank in (plain, submits, aborts)}) == 3
    plain.call(Abort(99))  # an unknown id changes nothing
    again = SchedulerRank(ParallelState.trivial())
    assert again.step([Submit((0, 1, 2), 4)]).digest == plain.scheduler.state_digest


GOLDEN = [
    (3994451558, 9),
    (115633261, 14),
    (2847696118, 2),
    (653326707, 0),
    (3901756914, 11),
    (790610727, 2),
    (1880017922, 17),
    (3035607158, 16),
]
"""Digest and retractions of ``digest_of(seed)``. The digest is that of ``DecisionLog``. When it replaced the one of
0.4.0, no decision changed: the sequences of decisions of forty workloads were equal before and after."""


@pytest.mark.parametrize(("seed", "golden"), list(enumerate(GOLDEN)))
def test_first_come_first_served_with_the_latest_arrival_as_victim_decides_as_before(
    seed: int, golden: tuple[int, int]
) -> None:
    assert digest_of(seed) == golden
