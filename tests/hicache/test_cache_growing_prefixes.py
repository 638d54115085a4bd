"""A prefix that grows page by page stays a few runs, whatever is on its way; who holds a prefix keeps holding it.

The model: requests that grow, end, begin in the middle of another's prefix, and come back; a cache of one tier and one
of three, whose copies, backups and reads end when the example says. After every call the whole tree is checked, and
every lock still ends where its prefix does. In the end all pages can be given back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import OutOfPagesError
from scheduler_components.cache import RadixCache, RadixNode
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiRadixCache
from scheduler_components.values.page_operations import (
    BackupDone,
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages

PAGE_SIZE, DEVICE_PAGES, HOST_PAGES = 2, 24, 32


class Growing:
    """Requests of a few chats over one cache."""

    def __init__(self, cache: RadixCache | HiRadixCache) -> None:
        self.cache = cache
        self.running: dict[int, tuple[list[int], tuple[int, ...], RadixNode]] = {}

    def begin(self, rid: int, num_pages: int) -> None:
        if rid in self.running:
            return
        match = self.cache.match_prefix(tokens_of(rid, num_pages))
        self.cache.lock(match.node)
        self.running[rid] = list(tokens_of(rid, num_pages)[: match.num_tokens]), match.pages, match.node

    def grow(self, rid: int) -> None:
        self.begin(rid, 12)
        tokens, pages, node = self.running[rid]
        try:
            fresh = self.cache.allocate(1)
        except OutOfPagesError:
            return
        tokens = tokens_of(rid, len(pages) + 1)
        match = self.cache.insert(tokens, [*pages, *fresh])
        self.cache.lock(match.node)
        self.cache.unlock(node)
        self.running[rid] = tokens, match.pages, match.node

    def end(self, rid: int) -> None:
        if rid in self.running:
            self.cache.unlock(self.running.pop(rid)[2])

    def check(self) -> None:
        self.cache.check_integrity()
        for tokens, _, node in self.running.values():
            spelled, above = b"", node
            while above.parent is not None:
                spelled, above = bytes(above.tokens) + spelled, above.parent
            assert len(spelled) == 4 * len(tokens)


def tokens_of(rid: int, num_pages: int) -> list[int]:
    """Chats 0 and 1, and 2 and 3, begin alike, for three pages."""
    return [rid // 2 if at < 3 * PAGE_SIZE else 100 * (rid + 1) + at for at in range(num_pages * PAGE_SIZE)]


class Tiers:
    """A ``HiRadixCache`` whose I/O ends, well or not, when it is let."""

    def __init__(self) -> None:
        self.host = SimulatedHostPages(HOST_PAGES, rng=random.Random(0), failure=0.0)
        self.cache = HiRadixCache(
            page_size=PAGE_SIZE,
            capacity_tokens=DEVICE_PAGES * PAGE_SIZE,
            host=self.host,
            num_host_pages=HOST_PAGES,
            policy=HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1),
            record=True,
        )
        self._pending: list[Instruction] = []
        self._num_steps = 0

    def step(self, num_ends: int, *, are_good: bool = True) -> None:
        self._pending += self.cache.pop_instructions()
        ended, self._pending = self._pending[:num_ends], self._pending[num_ends:]
        for instruction in ended:
            for event in answers(instruction, are_good):
                self.cache.handle(event)
        self._num_steps += 1
        proposal = self.cache.proposal(self._num_steps, has_storage=True, load_back_budget_pages=8, now_s=0.0)
        self.cache.apply(self._num_steps, proposal.unpack(proposal.pack(0)))


def answers(instruction: Instruction, is_ok: bool) -> Sequence[IoEvent]:
    match instruction:
        case CopyToHost(op):
            return [WriteDone(op, is_ok)]
        case CopyToDevice(op):
            return [LoadBackDone(op, is_ok)]
        case WriteToStorage(op):
            return [BackupDone(op, is_ok)]
        case QueryStorage(op, digests):
            return [QueryDone(op, len(digests) // 32 if is_ok else 0)]
        case ReadFromStorage(op, _, host_pages):
            return [PagesRead(op, len(host_pages) if is_ok else 0), ReadDone(op)]
    return []


RIDS = st.integers(0, 2)
CALLS = st.one_of(
    st.tuples(st.just("begin"), RIDS, st.integers(0, 8)),
    st.tuples(st.just("grow"), RIDS, st.integers(1, 4)),
    st.tuples(st.just("end"), RIDS, st.just(0)),
    st.tuples(st.just("evict"), st.just(0), st.integers(0, 8)),
    st.tuples(st.just("step"), st.integers(0, 3), st.integers(0, 8)),
    st.tuples(st.just("prepare"), RIDS, st.integers(1, 8)),
)


@pytest.mark.soak
@pytest.mark.parametrize("has_tiers", [False, True], ids=["device", "three tiers"])
@settings(max_examples=num_examples(2), deadline=None)
@given(calls=st.lists(CALLS, min_size=20, max_size=60))
@example(calls=[("begin", 0, 0), ("grow", 0, 4), ("step", 0, 8), ("grow", 0, 4), ("step", 0, 8), ("evict", 0, 1)])
def test_merges_keep_the_prefix_of_every_lock(has_tiers: bool, calls: list[tuple[str, int, int]]) -> None:
    tiers = Tiers()
    cache = tiers.cache if has_tiers else RadixCache(page_size=PAGE_SIZE, capacity_tokens=DEVICE_PAGES * PAGE_SIZE)
    growing = Growing(cache)
    for name, rid, number in calls:
        if name == "begin":
            growing.begin(rid, number)
        elif name == "grow":
            for _ in range(number):
                growing.grow(rid)
        elif name == "end":
            growing.end(rid)
        elif name == "evict":
            cache.evict(number)
        elif has_tiers and name == "step":
            tiers.step(number, are_good=rid < 3)
        elif has_tiers and rid not in growing.running:
            tiers.cache.prefetch_queue.start(str(rid), tokens_of(rid, number))
            tiers.cache.prefetch_queue.is_done(str(rid), tokens_of(rid, number))
        growing.check()
    for rid in range(4):
        growing.end(rid)
        tiers.cache.prefetch_queue.cancel(str(rid))
    for _ in range(20 if has_tiers else 0):
        tiers.step(1000)
    growing.check()
    cache.clear()
    assert cache.free_tokens == cache.capacity_tokens
    assert tiers.host.pool.num_free == HOST_PAGES


@pytest.mark.parametrize("has_tiers", [False, True], ids=["device", "three tiers"])
def test_a_prefix_that_grows_is_a_few_runs(has_tiers: bool) -> None:
    """What its copies and backups keep apart until they end, and the last page."""
    tiers = Tiers()
    cache = tiers.cache if has_tiers else RadixCache(page_size=PAGE_SIZE, capacity_tokens=DEVICE_PAGES * PAGE_SIZE)
    growing = Growing(cache)
    growing.begin(0, 0)
    for _ in range(20):
        growing.grow(0)
        growing.check()
        for _ in range(3):
            tiers.step(1000)
    _, pages, node = growing.running[0]
    runs = []
    while node.parent is not None:
        runs.append(node.num_pages)
        node = node.parent
    assert len(pages) == sum(runs) == 20
    assert len(runs) <= 3
    if has_tiers:
        assert [tiers.cache.num_pages_on(tier) for tier in (Tier.DEVICE, Tier.HOST)] == [20, 20]


def test_a_locked_end_is_not_merged() -> None:
    cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=DEVICE_PAGES * PAGE_SIZE)
    growing = Growing(cache)
    growing.begin(0, 0)
    for _ in range(3):
        growing.grow(0)
    held = growing.running[0][2]
    cache.lock(held)
    for _ in range(3):
        growing.grow(0)
    cache.evict(1)
    assert held.parent is not None
    cache.unlock(held)
    growing.grow(0)
    growing.grow(0)
    assert held.parent is None, "and no longer"


def test_a_stored_page_is_not_merged_with_one_whose_backup_failed() -> None:
    tiers = Tiers()
    growing = Growing(tiers.cache)
    tiers.step(0)
    growing.grow(0)
    tiers.step(1000)
    growing.grow(0)
    backup, copy = tiers.cache.pop_instructions()
    tiers.cache.handle(WriteDone(copy.op, True))
    tiers.step(0)
    tiers.cache.handle(BackupDone(backup.op, False))
    tiers.step(0)
    tiers.cache.evict(0)
    tiers.step(1000)
    growing.check()


def test_the_anchor_of_a_prefetch_is_not_merged() -> None:
    tiers = Tiers()
    growing = Growing(tiers.cache)
    growing.grow(0)
    for _ in range(3):
        tiers.step(1000)
    tiers.cache.prefetch_queue.start("r", tokens_of(1, 8))
    [query] = tiers.cache.pop_instructions()
    growing.grow(0)
    for _ in range(3):
        tiers.step(1000)
    tiers.cache.evict(0)
    tiers.cache.handle(QueryDone(query.op, 0))
    tiers.step(1000)
    growing.check()
