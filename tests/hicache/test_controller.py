"""What one rank cannot, none does; operations are acknowledged everywhere in the order in which they began."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import CacheIntegrityError
from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.hicache.ack_queue import AckQueue
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.prefetch import MAX_ACTIVE_PREFETCHES, ActivePrefetches
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.values.page_operations import (
    CancelPrefetch,
    Instruction,
    IoEvent,
    PagesRead,
    PrefetchDrained,
    PrefetchHit,
    PrefetchOutcome,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    TierDecision,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, bool]]]]:
    """For each rank, the operations in the order in which they end there, and how."""
    num_operations = draw(st.integers(0, 8))
    order = st.permutations(range(num_operations))
    ranks = draw(st.lists(order, min_size=1, max_size=4))
    return num_operations, [[(number, draw(st.booleans())) for number in rank] for rank in ranks]


@pytest.mark.soak
@settings(max_examples=num_examples(4), deadline=None)
@given(schedule=schedules(), steps=st.lists(st.integers(0, 3), max_size=60))
def test_all_ranks_settle_the_same_operations(
    schedule: tuple[int, list[list[tuple[int, bool]]]], steps: list[int]
) -> None:
    num_operations, ends = schedule
    queues = [AckQueue[str]() for _ in ends]
    for queue in queues:
        for number in range(num_operations):
            queue.push(number, f"operation {number}")
    good_everywhere = [all(dict(rank)[number] for rank in ends) for number in range(num_operations)]
    ended = [dict.fromkeys(range(num_operations), False) for _ in ends]
    left = [list(rank) for rank in ends]
    popped: list[int] = []
    for step in steps + [num_operations] * (num_operations + 1):
        for rank, queue in enumerate(queues):
            for number, is_ok in left[rank][: step + rank]:
                queue.acknowledge(number, is_ok)
                ended[rank][number] = True
            del left[rank][: step + rank]
        done, good = min(queue.num_done() for queue in queues), min(queue.num_ok() for queue in queues)
        settled = [queue.pop(done, good) for queue in queues]
        assert all(one == settled[0] for one in settled)
        for number, operation, is_ok in settled[0]:
            assert operation == f"operation {number}"
            assert all(rank[number] for rank in ended)
            assert is_ok == good_everywhere[number]
            popped.append(number)
    assert popped == list(range(num_operations))
    assert not any(len(queue) for queue in queues)


def test_an_operation_ends_once() -> None:
    queue = AckQueue[None]()
    queue.push(1, None)
    queue.acknowledge(1, True)
    with pytest.raises(CacheIntegrityError, match="operation 1 ended twice"):
        queue.acknowledge(1, False)
    queue.pop(1, 1)
    with pytest.raises(CacheIntegrityError, match="operation 1 ended, but is not under way"):
        queue.acknowledge(1, True)


DIGESTS = bytes(range(32)) * 6


def test_terminate_all_cancels_every_read() -> None:
    ranks = TwoRanks(HiCachePolicy())
    for number in (1, 2, 3):
        ranks.begin(number)
    ranks.handle(QueryDone(1, 4))
    decisions, instructions = ranks.lanes[0].terminate_all()
    assert len(decisions) == 3
    assert sorted(stop.op for stop in instructions) == [1, 2, 3]


class TwoRanks:
    """Two ranks' prefetches, and a clock each."""

    def __init__(self, policy: HiCachePolicy, host_pages: tuple[int, int] = (10, 10)) -> None:
        hosts = [SimulatedHostPages(count, rng=random.Random(0), failure=0.0) for count in host_pages]
        self.pools = [host.pool for host in hosts]
        self.lanes = [ActivePrefetches(policy=policy, host=host) for host in hosts]
        self.controllers = [
            HiCacheController(host=host, prefetches=lanes) for host, lanes in zip(hosts, self.lanes, strict=True)
        ]
        self.now_s = [0.0, 0.0]
        self._sync = InProcessGroups({0: [(0, 1)], 1: [(0, 1)]})
        self._step = 0

    def begin(self, number: int = 1) -> list[list[Instruction]]:
        return [lanes.start(number, DIGESTS) for lanes in self.lanes]

    def handle(self, event: IoEvent) -> None:
        for controller in self.controllers:
            controller.handle(event)

    def agree(self, without: str = "no slot has this name") -> list[tuple[list[TierDecision], list[Instruction]]]:
        """One agreement; slots that end in ``without`` are each rank's own."""
        self._step += 1
        proposals = {}
        for rank, lanes in enumerate(self.lanes):
            proposals[rank] = Proposal("step", step=self._step)
            leads = not rank or without == "now us"
            proposals[rank].clock(self.now_s[rank] if leads else None)
            lanes.fill(proposals[rank])
        agreed_values = self._sync.reduce(proposals)
        settled = []
        for rank, lanes in enumerate(self.lanes):
            own, agreed = proposals[rank].own_values(), agreed_values[rank]
            numbers = {name: own.numbers[name] for name in agreed.numbers if name.endswith(without)}
            settled.append(lanes.apply(AgreedValues(agreed.numbers | numbers, agreed.flags)))
        return settled

    def reading(self) -> None:
        """Bring a prefetch of four pages to where both ranks read."""
        self.begin()
        self.handle(QueryDone(1, 4))
        assert self.agree() == [([PrefetchHit(1, 4)], [])] * 2
        self.reserve()
        for decisions, instructions in self.agree():
            assert not decisions
            assert [type(instruction) for instruction in instructions] == [ReadFromStorage]

    def reserve(self, num_pages: int = 4, *, max_wait_s: float = 4.0) -> None:
        for lanes in self.lanes:
            lanes.reserve(1, num_pages, max_wait_s=max_wait_s)

    def terminate(self, number: int = 1) -> list[tuple[PrefetchOutcome, list[Instruction]]]:
        return [lanes.terminate(number) for lanes in self.lanes]


PATIENT = HiCachePolicy(prefetch="timeout", prefetch_timeout_s=2.0)


@pytest.mark.parametrize("without, num_settled", [("no slot has this name", [1, 1]), ("now us", [1, 0])])
def test_the_leading_ranks_clock_stops_all_ranks(without: str, num_settled: list[int]) -> None:
    """And if each rank uses its own clock, it stops one, while the others read on and make it wait."""
    ranks = TwoRanks(PATIENT)
    ranks.reading()
    for lanes in ranks.lanes:
        lanes.mark_blocking(1)
    ranks.now_s = [4.0, 4.0]
    assert ranks.agree(without) == [([], [])] * 2
    ranks.now_s = [4.1, 3.9]
    settled = ranks.agree(without)
    assert [len(decisions) for decisions, _ in settled] == num_settled
    assert [CancelPrefetch(1) in instructions for _, instructions in settled] == [bool(count) for count in num_settled]


def test_the_time_runs_from_the_first_moment_that_a_request_is_blocked() -> None:
    ranks = TwoRanks(PATIENT)
    ranks.begin()
    for now_s in (0.0, 10.0):
        ranks.now_s = [now_s, now_s]
        assert ranks.agree() == [([], [])] * 2
    for now_s in (10.0, 12.0):
        for lanes in ranks.lanes:
            lanes.mark_blocking(1)
        ranks.now_s = [now_s, now_s]
        assert ranks.agree() == [([], [])] * 2
    ranks.now_s = [12.1, 12.1]
    assert ranks.agree() == [([PrefetchOutcome(1, ())], [CancelPrefetch(1)])] * 2


def test_a_waiting_prefetch_times_out_too() -> None:
    ranks = TwoRanks(PATIENT)
    for number in range(1, MAX_ACTIVE_PREFETCHES + 4):
        ranks.begin(number)
    ranks.agree()
    for lanes in ranks.lanes:
        lanes.mark_blocking(MAX_ACTIVE_PREFETCHES + 3)
        lanes.mark_blocking(MAX_ACTIVE_PREFETCHES + 1)
    ranks.now_s = [2.1, 2.0]
    settled = [PrefetchOutcome(MAX_ACTIVE_PREFETCHES + 3, ()), PrefetchOutcome(MAX_ACTIVE_PREFETCHES + 1, ())]
    assert ranks.agree() == [(settled, [])] * 2


def test_pages_that_landed_on_every_rank_are_kept_and_the_others_freed() -> None:
    ranks = TwoRanks(HiCachePolicy())
    ranks.reading()
    for controller, landed in zip(ranks.controllers, (4, 2), strict=True):
        controller.handle(PagesRead(1, landed))
    ranks.controllers[0].handle(ReadDone(1))
    assert ranks.agree() == [([], [])] * 2
    ranks.controllers[1].handle(ReadDone(1))
    for decisions, _ in ranks.agree():
        [settled] = decisions
        assert isinstance(settled, PrefetchOutcome)
        assert len(settled.host_pages) == 2
    assert [(pool.num_cached, pool.num_held) for pool in ranks.pools] == [(2, 0)] * 2


def test_a_miss_on_one_rank_is_a_miss() -> None:
    ranks = TwoRanks(HiCachePolicy())
    ranks.begin()
    ranks.controllers[0].handle(QueryDone(1, 6))
    assert ranks.agree() == [([], [])] * 2
    ranks.controllers[1].handle(QueryDone(1, 0))
    assert ranks.agree() == [([PrefetchOutcome(1, ())], [])] * 2
    assert [len(lanes) for lanes in ranks.lanes] == [0, 0]


def test_no_rank_reads_if_one_rank_has_no_host_pages() -> None:
    ranks = TwoRanks(HiCachePolicy(), host_pages=(10, 3))
    ranks.begin()
    ranks.handle(QueryDone(1, 4))
    ranks.agree()
    ranks.reserve()
    assert [pool.num_held for pool in ranks.pools] == [4, 0]
    assert ranks.agree() == [([PrefetchOutcome(1, ())], [])] * 2
    assert [pool.num_free for pool in ranks.pools] == [10, 3]


@pytest.mark.parametrize("when", ["in line", "querying", "voting", "reading"])
def test_a_terminated_prefetch_settles_immediately_and_frees_its_pages(when: str) -> None:
    """What a rank may still write to goes back when no rank does."""
    ranks = TwoRanks(HiCachePolicy())
    if when == "in line":
        for number in range(2, MAX_ACTIVE_PREFETCHES + 2):
            ranks.begin(number)
    if when == "reading":
        ranks.reading()
    else:
        ranks.begin()
    if when == "voting":
        ranks.handle(QueryDone(1, 4))
        ranks.agree()
        ranks.reserve()
    drains, draining_pages = when in ("querying", "reading"), 4 * (when == "reading")
    stops = [CancelPrefetch(1)] if drains else []
    assert ranks.terminate() == [(PrefetchOutcome(1, (), draining_pages), stops)] * 2
    assert [pool.num_held for pool in ranks.pools] == [draining_pages] * 2
    if drains:
        assert [len(lanes) for lanes in ranks.lanes] == [1, 1]
        end = ReadDone(1) if when == "reading" else QueryDone(1, 4)
        ranks.controllers[0].handle(end)
        assert ranks.agree() == [([], [])] * 2
        ranks.controllers[1].handle(end)
        assert ranks.agree() == [([PrefetchDrained(1, draining_pages)], [])] * 2
    assert [len(lanes) for lanes in ranks.lanes] == [MAX_ACTIVE_PREFETCHES * (when == "in line")] * 2
    assert [pool.num_free for pool in ranks.pools] == [10, 10]


def test_a_terminated_prefetch_keeps_the_pages_of_the_last_agreement() -> None:
    ranks = TwoRanks(HiCachePolicy())
    ranks.reading()
    ranks.controllers[0].handle(PagesRead(1, 4))
    ranks.controllers[1].handle(PagesRead(1, 2))
    ranks.agree()
    ranks.controllers[1].handle(PagesRead(1, 3))  # no other rank knows yet
    ranks.controllers[1].handle(ReadDone(1))
    assert [(len(settled.host_pages), settled.num_draining_pages) for settled, _ in ranks.terminate()] == [(2, 2)] * 2
    ranks.controllers[0].handle(ReadDone(1))
    assert [decisions for decisions, _ in ranks.agree()] == [[PrefetchDrained(1, 2)]] * 2
    assert [(pool.num_cached, pool.num_held) for pool in ranks.pools] == [(2, 0)] * 2


def test_a_terminated_prefetch_frees_its_lane() -> None:
    ranks = TwoRanks(HiCachePolicy())
    for number in range(1, MAX_ACTIVE_PREFETCHES + 2):
        ranks.begin(number)
    for _, instructions in ranks.terminate(3):
        assert instructions == [CancelPrefetch(3), QueryStorage(MAX_ACTIVE_PREFETCHES + 1, DIGESTS)]


def test_a_blocking_prefetch_gets_the_next_free_lane() -> None:
    ranks = TwoRanks(HiCachePolicy(prefetch="wait_complete"))
    for number in range(1, MAX_ACTIVE_PREFETCHES + 4):
        ranks.begin(number)
    for lanes in ranks.lanes:
        lanes.mark_blocking(MAX_ACTIVE_PREFETCHES + 3)
    ranks.handle(QueryDone(1, 0))
    for _, instructions in ranks.agree():
        assert instructions == [QueryStorage(MAX_ACTIVE_PREFETCHES + 3, DIGESTS)]


def test_prefetches_beyond_the_lanes_wait_their_turn() -> None:
    ranks = TwoRanks(HiCachePolicy())
    started = [ranks.begin(number) for number in range(1, MAX_ACTIVE_PREFETCHES + 2)]
    assert all(
        instructions == [QueryStorage(number + 1, DIGESTS)] for number, [instructions, _] in enumerate(started[:-1])
    )
    assert started[-1] == [[], []]
    ranks.handle(QueryDone(3, 0))
    for _, instructions in ranks.agree():
        assert instructions == [QueryStorage(MAX_ACTIVE_PREFETCHES + 1, DIGESTS)]


def test_an_event_of_a_settled_prefetch_is_an_error() -> None:
    ranks = TwoRanks(HiCachePolicy())
    with pytest.raises(CacheIntegrityError, match="not under way"):
        ranks.controllers[0].handle(ReadDone(7))
