"""Transfers between tiers: their limits, retries, failures and counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from scheduler_components import CacheIntegrityError
from scheduler_components.cache import DEFAULT_NAMESPACE
from scheduler_components.cache.block_hash import DIGEST_BYTES, pack_tokens, page_digests
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiRadixCache
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.prefetch import ActivePrefetches
from scheduler_components.hicache.tiers import TierTree
from scheduler_components.hicache.transfers import TierTransfers
from scheduler_components.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    Instruction,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_components.ports import NullPageHook
from scheduler_components.reference.device.hicache_sim import SimulatedHostPages

PAGE_SIZE = 2
PATIENT = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1)

AnInstruction = TypeVar("AnInstruction", bound=Instruction)


class Rank:
    """One rank whose I/O ends when the test says so. Storage is attached while ``has_storage`` is True."""

    def __init__(self, policy: HiCachePolicy = PATIENT, *, num_device_pages: int = 8, num_host_pages: int = 16) -> None:
        self.host = SimulatedHostPages(num_host_pages, rng=random.Random(0), failure=0.0)
        self.cache = HiRadixCache(
            page_size=PAGE_SIZE,
            capacity_tokens=num_device_pages * PAGE_SIZE,
            host=self.host,
            num_host_pages=num_host_pages,
            policy=policy,
        )
        self.has_storage, self.load_back_budget_pages = True, 100
        self._instructions: list[Instruction] = []
        self._step = 0
        self.step()

    def step(self) -> None:
        """Agree once, without ending any I/O."""
        self._step += 1
        cache = self.cache
        proposal = cache.proposal(
            self._step,
            has_storage=self.has_storage,
            load_back_budget_pages=self.load_back_budget_pages,
            now_s=float(self._step),
        )
        cache.apply(self._step, proposal.unpack(proposal.pack(0)))
        cache.check_integrity()

    def pop(self, kind: type[AnInstruction]) -> list[AnInstruction]:
        """Return the new instructions of one kind."""
        self._instructions += self.cache.pop_instructions()
        popped = [instruction for instruction in self._instructions if isinstance(instruction, kind)]
        self._instructions = [instruction for instruction in self._instructions if not isinstance(instruction, kind)]
        return popped

    def end_writes(self, *, is_ok: bool = True) -> None:
        for copy in self.pop(CopyToHost):
            self.cache.handle(WriteDone(copy.op, is_ok))

    def end_loads(self, *, is_ok: bool = True) -> int:
        """End all loads and return their number of pages."""
        loads = self.pop(CopyToDevice)
        for copy in loads:
            self.cache.handle(LoadBackDone(copy.op, is_ok))
        return sum(len(copy.device_pages) for copy in loads)

    def end_backups(self, *, is_ok: bool = True) -> int:
        """End all backups and return their number of pages."""
        writes = self.pop(WriteToStorage)
        for write in writes:
            self.cache.handle(BackupDone(write.op, is_ok))
        return sum(len(write.host_pages) for write in writes)

    def compute(self, chat: int, num_pages: int) -> None:
        """Compute a prompt of a chat after its cached prefix, without ending any I/O."""
        tokens = prompt(chat, num_pages)
        match = self.cache.match_prefix(tokens)
        self.cache.lock(match.node)
        self.cache.insert(tokens, [*match.pages, *self.cache.allocate(num_pages - len(match.pages))])
        self.cache.unlock(match.node)

    def cache_on_host(self, chat: int, num_pages: int) -> None:
        """Compute a prompt, copy it to the host and evict it from the device. Backups stay in flight."""
        self.compute(chat, num_pages)
        self.end_writes()
        self.step()
        assert self.cache.evict(num_pages) == num_pages

    def read(self, rid: str, chat: int, num_pages: int, *, num_hit: int) -> ReadFromStorage:
        """Start a prefetch and return its read."""
        self.cache.prefetch_queue.start(rid, prompt(chat, num_pages))
        [query] = self.pop(QueryStorage)
        self.cache.handle(QueryDone(query.op, num_hit))
        self.step()
        self.step()
        [read] = self.pop(ReadFromStorage)
        return read

    def end_read(self, read: ReadFromStorage, num_read: int) -> None:
        self.cache.handle(PagesRead(read.op, num_read))
        self.cache.handle(ReadDone(read.op))

    def pages_on(self) -> tuple[int, int, int]:
        device, host, storage = (self.cache.num_pages_on(tier) for tier in Tier)
        return device, host, storage


def prompt(chat: int, num_pages: int) -> list[int]:
    return [chat * 100 + at for at in range(num_pages * PAGE_SIZE)]


# --- pages counted as stored ---


def test_a_backup_that_ends_when_storage_is_detached_does_not_count() -> None:
    it = Rank()
    it.cache_on_host(0, 4)
    assert it.end_backups() == 4
    it.has_storage = False
    it.step()
    assert it.pages_on() == (0, 4, 0)
    assert it.cache.stats().pages_not_backed_up == 4


def test_landed_pages_are_kept_when_storage_is_detached_but_not_counted_as_stored() -> None:
    it = Rank()
    read = it.read("r", 0, 4, num_hit=4)
    it.cache.handle(PagesRead(read.op, 4))
    it.step()
    it.has_storage = False
    it.step()
    assert it.pages_on() == (0, 4, 0)
    it.cache.handle(ReadDone(read.op))
    it.step()
    assert it.cache.num_operations == 0


def test_pages_read_below_an_unstored_prefix_do_not_count_as_stored() -> None:
    it = Rank()
    it.has_storage = False
    it.step()
    it.cache_on_host(0, 2)
    it.has_storage = True
    it.step()
    read = it.read("r", 0, 6, num_hit=4)
    it.end_read(read, 4)
    it.step()
    assert it.pages_on() == (0, 6, 0)


def test_pages_missing_from_storage_are_written_again() -> None:
    it = Rank()
    it.compute(0, 4)
    it.end_writes()
    it.step()
    with pytest.raises(CacheIntegrityError, match="step until none is, then clear the index"):
        it.cache.clear_storage_index()
    assert it.end_backups() == 4
    it.step()
    assert it.pages_on() == (4, 4, 4)
    it.cache.clear_storage_index()
    it.cache.check_integrity()
    assert it.pages_on() == (4, 4, 0)
    it.compute(0, 4)
    assert it.end_backups() == 4
    it.step()
    assert it.pages_on() == (4, 4, 4)


# --- prefetches ---


class Waiter:
    """A waiting request for a prompt of four pages."""

    def __init__(self, policy: HiCachePolicy) -> None:
        self.rank = Rank(policy)
        self.rank.cache.prefetch_queue.start("r", prompt(0, 4))

    def answer(self, num_hit: int) -> None:
        [query] = self.rank.pop(QueryStorage)
        self.rank.cache.handle(QueryDone(query.op, num_hit))
        self.rank.step()

    def steps_until_query(self, at_most: int, *, is_next: bool = False) -> int | None:
        """Return the steps until storage is queried again; None if it is not."""
        for num_steps in range(1, at_most + 1):
            self.rank.cache.prefetch_queue.is_done("r", prompt(0, 4), is_next=is_next)
            self.rank.step()
            if self.rank.cache.num_operations:
                return num_steps
        return None


RETRYING = HiCachePolicy(prefetch_threshold_pages=2, prefetch_retry_steps=3, prefetch_max_retries=2)


@pytest.mark.parametrize("num_hit", [0, 1])
def test_a_miss_is_retried_at_intervals_up_to_the_limit(num_hit: int) -> None:
    """A later query may find pages that another request was writing. A hit that is too short counts as a miss."""
    it = Waiter(RETRYING)
    it.answer(num_hit)
    assert it.steps_until_query(9) == 3
    it.answer(num_hit)
    assert it.steps_until_query(9) == 3
    it.answer(num_hit)
    assert it.steps_until_query(9) is None
    assert it.rank.cache.stats().prefetches == 3


def test_pages_found_by_a_retry_are_used() -> None:
    it = Waiter(RETRYING)
    it.answer(0)
    it.steps_until_query(3)
    it.answer(4)
    it.rank.step()
    [read] = it.rank.pop(ReadFromStorage)
    it.rank.end_read(read, 4)
    it.rank.step()
    assert it.rank.pages_on() == (0, 4, 4)
    assert it.rank.cache.stats().prefetches_revoked == 1
    assert it.steps_until_query(9) == 1  # waits for a load only
    assert not it.rank.pop(QueryStorage)


def test_wait_complete_waits_for_a_retry() -> None:
    it = Waiter(HiCachePolicy(prefetch="wait_complete", prefetch_retry_steps=1))
    it.answer(0)
    assert it.steps_until_query(1) == 1
    assert not it.rank.cache.prefetch_queue.is_done("r", prompt(0, 4))
    it.answer(0)
    assert it.rank.cache.prefetch_queue.is_done("r", prompt(0, 4))


def test_a_request_without_start_does_not_query_storage() -> None:
    it = Rank(RETRYING)
    for _ in range(9):
        assert it.cache.prefetch_queue.is_done("unknown", prompt(0, 4), is_next=False)
        it.step()
    assert it.cache.stats().prefetches == 0


def test_a_request_that_is_next_does_not_retry() -> None:
    it = Waiter(RETRYING)
    it.answer(0)
    assert it.steps_until_query(2) is None
    assert it.steps_until_query(9, is_next=True) is None
    assert it.rank.cache.prefetch_queue.is_done("r", prompt(0, 4))


@pytest.mark.parametrize("policy", [{"prefetch_retry_steps": 0}, {"prefetch_max_retries": 0}])
def test_without_retries_storage_is_queried_once(policy: dict[str, int]) -> None:
    it = Waiter(HiCachePolicy(prefetch_threshold_pages=2, **policy))
    it.answer(0)
    assert it.steps_until_query(20) is None


def test_a_retry_skips_pages_that_are_cached_by_then() -> None:
    it = Waiter(RETRYING)
    it.answer(0)
    it.rank.cache_on_host(0, 4)
    it.rank.end_backups()
    it.rank.step()
    it.rank.cache.prefetch_queue.is_done("r", prompt(0, 4), is_next=False)
    it.rank.end_loads()
    it.rank.step()
    assert it.steps_until_query(9) is None
    assert it.rank.cache.stats().prefetches == 1


def test_a_prefix_is_written_to_the_host_before_what_follows_is_read() -> None:
    """The pages that are read need their prefix on the host."""
    it = Rank(HiCachePolicy(write="write_back", prefetch="wait_complete", prefetch_threshold_pages=1))
    it.compute(0, 2)
    assert it.pop(CopyToHost) == []
    it.cache.prefetch_queue.start("r", prompt(0, 6))
    it.end_writes()
    [query] = it.pop(QueryStorage)
    it.cache.handle(QueryDone(query.op, 4))
    it.step()
    it.step()
    [read] = it.pop(ReadFromStorage)
    it.end_read(read, 4)
    it.step()
    assert it.pages_on() == (2, 6, 0)


def test_a_query_uses_the_chained_digests_after_the_prefix() -> None:
    """A page's digest covers the whole prefix."""
    it = Rank()
    it.cache_on_host(0, 3)
    for chat, num_pages, num_cached in ((0, 6, 3), (1, 4, 0)):
        it.cache.prefetch_queue.start(f"r{chat}", prompt(chat, num_pages))
        [query] = it.pop(QueryStorage)
        whole = page_digests(pack_tokens(prompt(chat, num_pages)), PAGE_SIZE, DEFAULT_NAMESPACE.seed())
        assert query.digests == whole[num_cached * DIGEST_BYTES :]


def test_the_prefix_of_a_prefetch_stays_on_the_host_until_it_ends() -> None:
    it = Rank(num_host_pages=8)
    it.cache_on_host(0, 2)
    it.end_backups()
    it.step()
    read = it.read("r", 0, 4, num_hit=2)
    it.compute(1, 6)  # needs six host pages, of which four are free, and may not evict the prefix
    it.end_writes()
    it.step()
    assert it.cache.stats().pages_not_written == 6
    it.end_read(read, 2)
    it.step()
    assert it.pages_on()[1] == 4
    it.compute(2, 8)  # needs the whole host; the prefix is no longer locked
    it.end_writes()
    it.step()
    assert it.pages_on()[1] == 8


def test_pages_below_an_evicted_prefix_are_freed() -> None:
    """The prefix was only on the device, where a waiting request does not lock it."""
    it = Rank()
    it.compute(0, 4)
    it.end_writes(is_ok=False)
    it.step()
    it.cache.prefetch_queue.start("r", prompt(0, 7))
    it.end_writes(is_ok=False)
    it.step()
    [query] = it.pop(QueryStorage)
    it.cache.handle(QueryDone(query.op, 3))
    it.step()
    it.step()
    [read] = it.pop(ReadFromStorage)
    assert it.cache.evict(4) == 4
    it.end_read(read, 3)
    it.step()
    assert it.pages_on() == (0, 0, 0)
    assert it.host.pool.num_free == 16
    assert it.cache.stats().pages_revoked == 3


def test_a_prefetch_uses_at_most_half_of_the_available_host_pages() -> None:
    it = Rank(num_host_pages=9)
    read = it.read("r", 0, 8, num_hit=8)
    assert len(read.host_pages) == 4
    assert len(read.digests) == 4 * DIGEST_BYTES


def test_evictable_host_pages_count_as_free_for_a_prefetch() -> None:
    it = Rank(num_host_pages=8)
    it.cache_on_host(0, 6)
    it.end_backups()
    it.step()
    read = it.read("r", 1, 4, num_hit=4)
    assert len(read.host_pages) == 4


def test_a_hit_of_threshold_length_is_read_if_the_host_has_room() -> None:
    policy = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=3)
    assert len(Rank(policy).read("r", 0, 4, num_hit=3).host_pages) == 3
    it = Rank(policy, num_host_pages=5)
    it.cache.prefetch_queue.start("r", prompt(0, 4))
    [query] = it.pop(QueryStorage)
    it.cache.handle(QueryDone(query.op, 3))
    it.step()
    it.step()
    assert it.pop(ReadFromStorage) == []
    assert it.cache.num_operations == 0
    assert it.host.pool.num_free == 5


def test_a_cancelled_request_reads_no_further() -> None:
    it = Rank()
    read = it.read("r", 0, 4, num_hit=4)
    it.cache.prefetch_queue.cancel("r")
    it.step()
    assert it.pop(CancelPrefetch) == [CancelPrefetch(read.op)]


def test_a_clear_during_a_prefetch_raises() -> None:
    """The prefetch locks no page of the tree, so the check counts operations."""
    it = Rank()
    read = it.read("r", 0, 4, num_hit=4)
    with pytest.raises(CacheIntegrityError, match="1 operations are under way"):
        it.cache.clear()
    it.end_read(read, 4)
    it.step()
    it.cache.clear()
    assert it.host.pool.num_free == 16


def test_host_pages_of_a_terminated_prefetch_are_freed_after_the_last_write() -> None:
    it = Rank(num_host_pages=8)
    read = it.read("r", 0, 4, num_hit=4)
    it.cache.handle(PagesRead(read.op, 1))
    it.step()
    it.cache.prefetch_queue.cancel("r")
    it.step()
    assert (it.pages_on()[1], it.host.pool.num_free) == (1, 4), "storage may still write to three pages"
    assert [stop.op for stop in it.pop(CancelPrefetch)] == [read.op]
    it.cache.handle(ReadDone(read.op))
    it.step()
    assert it.host.pool.num_free == 7
    it.compute(1, 8)
    it.end_writes()
    it.step()
    assert it.pages_on()[1] == 8, "the count of used pages includes them"


# --- copies ahead of eviction ---


@pytest.mark.parametrize("num_ahead", [1, 2, 3])
def test_write_back_copies_ahead_only_when_free_pages_run_short(num_ahead: int) -> None:
    it = Rank(HiCachePolicy(write="write_back", clean_ahead_pages=num_ahead))
    for chat in range(8 - num_ahead):
        it.compute(chat, 1)
    it.step()
    assert it.pop(CopyToHost) == [], "enough pages are free"
    it.compute(90, 1)
    it.step()
    copies = it.pop(CopyToHost)
    assert sum(len(copy.device_pages) for copy in copies) == num_ahead
    for copy in copies:
        it.cache.handle(WriteDone(copy.op, False))
    it.step()
    it.step()
    assert it.pop(CopyToHost) == [], "a failed copy is repeated at the next insertion"
    it.compute(91, 1)
    it.step()
    copies = it.pop(CopyToHost)
    assert sum(len(copy.device_pages) for copy in copies) == num_ahead
    for copy in copies:
        it.cache.handle(WriteDone(copy.op, True))
    it.step()
    assert it.pages_on()[1] == num_ahead


# --- backups and loads ---


def test_backups_lock_at_most_a_quarter_of_the_host() -> None:
    it = Rank(num_host_pages=16)
    for chat in range(3):
        it.compute(chat, 2)
    it.end_writes()
    it.step()
    assert [len(write.host_pages) for write in it.pop(WriteToStorage)] == [2, 2]
    assert it.cache.stats().pages_not_backed_up == 2


def test_loads_of_one_step_share_the_agreed_budget() -> None:
    it = Rank()
    for chat in range(2):
        it.cache_on_host(chat, 3)
    it.load_back_budget_pages = 4
    it.step()
    for chat in range(2):
        assert not it.cache.prefetch_queue.is_done(f"r{chat}", prompt(chat, 3))
    assert [len(copy.device_pages) for copy in it.pop(CopyToDevice)] == [3, 1]


def test_a_request_waits_for_budget_only_if_a_load_is_under_way() -> None:
    it = Rank()
    for chat in range(3):
        it.cache_on_host(chat, 3)
    it.load_back_budget_pages = 0
    it.step()
    assert it.cache.prefetch_queue.is_done("not loaded", prompt(0, 3))
    it.load_back_budget_pages = 3
    it.step()
    assert not it.cache.prefetch_queue.is_done("loads", prompt(1, 3))
    assert not it.cache.prefetch_queue.is_done("waits", prompt(2, 3))
    it.end_loads()
    it.step()
    assert not it.cache.prefetch_queue.is_done("waits", prompt(2, 3))
    assert [len(copy.device_pages) for copy in it.pop(CopyToDevice)] == [3]


def test_a_request_loads_no_more_pages_than_its_prompt_has() -> None:
    """Otherwise two requests that evict each other's pages would load forever."""
    it = Rank()
    it.cache_on_host(0, 4)
    it.load_back_budget_pages = 3
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.end_loads() == 3
    it.step()
    assert it.cache.evict(3) == 3
    it.load_back_budget_pages = 100
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.end_loads() == 1
    it.step()
    assert it.cache.evict(1) == 1
    assert it.cache.prefetch_queue.is_done("r", prompt(0, 4))


def test_a_request_waits_until_its_load_has_ended() -> None:
    it = Rank()
    it.cache_on_host(0, 4)
    for _ in range(3):
        assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
        it.step()
    assert it.end_loads() == 4
    it.step()
    assert it.cache.prefetch_queue.is_done("r", prompt(0, 4))


def test_a_request_recomputes_after_a_failed_load() -> None:
    it = Rank()
    it.cache_on_host(0, 4)
    it.load_back_budget_pages = 2
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.end_loads(is_ok=False) == 2
    it.step()
    assert it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.pop(CopyToDevice) == []


def test_the_parent_of_a_load_stays_on_the_device() -> None:
    it = Rank(num_device_pages=4)
    it.cache_on_host(0, 4)
    it.load_back_budget_pages = 2
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    it.end_loads()
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.cache.evict(2) == 0
    it.end_loads()
    it.step()
    assert it.pages_on()[0] == 4
    assert it.cache.evict(4) == 4


def test_a_load_without_device_pages_locks_nothing() -> None:
    it = Rank(num_device_pages=4, num_host_pages=8)
    it.cache_on_host(0, 4)
    it.end_backups()
    it.step()
    held = it.cache.allocate(2)
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.pop(CopyToDevice) == []
    it.cache.free(held)
    for chat in (1, 2):  # each needs four of eight host pages, so the pages of the load may be evicted
        it.cache_on_host(chat, 4)
        it.end_backups()
        it.step()
    assert not it.cache.prefetch_queue.is_done("other", prompt(2, 4))
    assert it.cache.prefetch_queue.is_done("r", prompt(0, 4))


# --- writes of whole paths ---


def cache_two_nodes_unwritten(it: Rank, chat: int) -> None:
    """Cache a prompt and its continuation on the device in two nodes whose writes failed."""
    for num_pages in (2, 4):
        it.compute(chat, num_pages)
        it.end_writes(is_ok=False)
        it.step()
        it.step()  # one failed write ends per step


def test_a_path_whose_writes_failed_is_written_at_its_next_use() -> None:
    it = Rank(num_device_pages=16)
    cache_two_nodes_unwritten(it, 0)
    it.compute(0, 5)
    assert sum(len(copy.device_pages) for copy in it.pop(CopyToHost)) == 5


def test_pages_below_an_unwritten_page_are_not_written() -> None:
    it = Rank(num_device_pages=16, num_host_pages=4)
    it.compute(0, 5)
    it.compute(0, 6)
    assert it.pop(CopyToHost) == []
    assert it.cache.stats().pages_not_written == 5 + 5


def test_a_page_is_backed_up_only_with_its_prefix() -> None:
    it = Rank(num_host_pages=16)
    it.compute(0, 2)
    it.end_writes()
    it.step()
    it.compute(0, 4)  # the backup of its prefix is in flight
    it.end_writes()
    it.step()
    assert [len(write.host_pages) for write in it.pop(WriteToStorage)] == [2, 2]
    it = Rank(num_host_pages=16)
    it.compute(0, 6)  # more than backups may lock
    it.end_writes()
    it.step()
    it.compute(0, 8)
    it.end_writes()
    it.step()
    assert it.pop(WriteToStorage) == []
    assert it.cache.stats().pages_not_backed_up >= 6


def test_a_page_whose_prefix_was_not_written_is_freed() -> None:
    it = Rank()
    it.compute(0, 2)
    it.compute(0, 4)
    first, second = it.pop(CopyToHost)
    it.cache.handle(WriteDone(first.op, False))
    it.cache.handle(WriteDone(second.op, True))
    it.step()
    it.step()
    assert it.pages_on() == (4, 0, 0)
    assert it.host.pool.num_free == 16
    assert it.cache.stats().pages_not_written == 4


def test_each_page_is_stored_once_and_only_while_storage_is_attached() -> None:
    it = Rank()
    it.has_storage = False
    it.step()
    it.compute(0, 2)
    it.end_writes()
    it.step()
    assert it.pop(WriteToStorage) == []
    it.has_storage = True
    it.step()
    for pages in (2, 0):
        it.compute(0, 2)
        assert it.end_backups() == pages
        it.step()
    assert it.pages_on() == (2, 2, 2)


# --- statistics ---


def test_check_compares_the_host_pages_with_the_count_of_used_pages() -> None:
    host, policy = SimulatedHostPages(4, rng=random.Random(0), failure=0.0), HiCachePolicy()
    tiers = TierTree(
        page_size=PAGE_SIZE,
        capacity_tokens=8,
        host=host,
        num_host_pages=4,
        record=False,
        page_hook=NullPageHook(),
    )
    controller = HiCacheController(host=host, prefetches=ActivePrefetches(policy=policy, host=host))
    transfers = TierTransfers.over(tiers, controller, policy)
    transfers.check()
    tiers.host.num_pages_used += 1
    with pytest.raises(
        CacheIntegrityError, match=r"0 host pages in the tree \+ 0 in flight, but 1 of 4 are counted as used"
    ):
        transfers.check()


def test_counts_of_moved_pages_add_up() -> None:
    it = Rank(num_device_pages=32, num_host_pages=32)
    for chat, is_ok in enumerate((True, False, True, False, True)):
        it.compute(chat, 1 + chat)
        it.end_writes(is_ok=is_ok)
        it.step()
        it.end_backups(is_ok=chat == 2)
        it.step()
    stats = it.cache.stats()
    assert (stats.pages_written, stats.pages_not_written) == (1 + 3 + 5, 2 + 4)
    assert (stats.pages_backed_up, stats.pages_not_backed_up) == (3, 1 + 5)
    for chat in (10, 11):
        it.compute(chat, 9)  # more than backups may lock
        it.end_writes()
        it.step()
    assert it.cache.stats().pages_not_backed_up == 1 + 5 + 9 + 9
    it = Rank()
    for chat in range(4):
        it.cache_on_host(chat, 2)
        it.end_backups()
        it.step()
        assert not it.cache.prefetch_queue.is_done(f"r{chat}", prompt(chat, 2))
        assert it.end_loads(is_ok=chat % 2 == 0) == 2
        it.step()
        it.cache.evict(8)
    stats = it.cache.stats()
    assert (stats.pages_loaded, stats.pages_not_loaded, stats.pages_backed_up) == (4, 4, 8)


def test_counts_of_prefetched_pages_add_up() -> None:
    it = Rank(num_host_pages=32)
    for chat, num_read in enumerate((3, 2, 0)):
        read = it.read(f"r{chat}", chat, 4, num_hit=3)
        it.end_read(read, num_read)
        it.step()
    stats = it.cache.stats()
    assert (stats.pages_prefetched, stats.pages_revoked) == (3 + 2, 1 + 3)
    assert (stats.prefetches, stats.prefetches_revoked) == (3, 1)


def test_an_admission_counts_each_token_where_it_was_found() -> None:
    it = Rank(num_device_pages=16)
    it.compute(0, 3)
    read = it.read("r", 0, 7, num_hit=2)
    it.end_writes()
    it.end_read(read, 2)
    it.step()
    it.end_backups()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 7))
    assert it.end_loads() == 2
    it.step()
    for rid in ("r", "not prefetched"):
        assert it.cache.prefetch_queue.is_done(rid, prompt(0, 7))
        it.cache.prefetch_queue.record_admission(rid, prompt_tokens=14, cached_tokens=10)
    stats = it.cache.stats()
    assert (stats.prompt_tokens, stats.storage_hit_tokens, stats.host_hit_tokens) == (28, 4, 0)
    assert stats.device_hit_tokens == 6 + 10


def test_pages_that_a_prefetch_did_not_read_are_no_storage_hits() -> None:
    it = Rank()
    it.cache_on_host(0, 2)
    it.cache.prefetch_queue.start("r", prompt(0, 4))
    [query] = it.pop(QueryStorage)
    it.cache.handle(QueryDone(query.op, 0))
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    it.end_loads()
    it.step()
    it.cache.prefetch_queue.record_admission("r", prompt_tokens=8, cached_tokens=4)
    it.cache.prefetch_queue.record_admission("not prefetched", prompt_tokens=8, cached_tokens=4)
    stats = it.cache.stats()
    assert (stats.device_hit_tokens, stats.host_hit_tokens, stats.storage_hit_tokens) == (4, 4, 0)


def test_an_admitted_request_may_load_again_after_a_retraction() -> None:
    it = Rank()
    it.cache_on_host(0, 2)
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 2))
    it.end_loads()
    it.step()
    it.cache.prefetch_queue.record_admission("r", prompt_tokens=4, cached_tokens=4)
    assert it.cache.evict(2) == 2
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 2)), "after a retraction its pages are loaded again"


# --- selective copies ---


@pytest.mark.parametrize("num_hits", [1, 2])
def test_a_prefix_is_copied_once_enough_requests_have_found_it(num_hits: int) -> None:
    it = Rank(HiCachePolicy(write="write_through_selective", write_threshold_hits=num_hits))
    it.compute(0, 4)
    for hit in range(num_hits):
        assert it.pop(CopyToHost) == []
        for _ in range(5):  # queried in every step, counted once
            assert it.cache.prefetch_queue.is_done(f"r{hit}", prompt(0, 2))
        it.cache.prefetch_queue.record_admission(f"r{hit}", prompt_tokens=5, cached_tokens=4)
    [copy] = it.pop(CopyToHost)
    assert len(copy.device_pages) == 2, "only the pages that were hit"
    it.cache.handle(WriteDone(copy.op, True))
    it.step()
    it.compute(0, 6)
    assert it.pop(CopyToHost) == []
    assert it.pages_on() == (6, 2, 0)


def test_both_parts_of_a_split_have_the_hits_of_the_run() -> None:
    it = Rank(HiCachePolicy(write="write_through_selective", write_threshold_hits=2))
    it.compute(0, 4)
    for rid, num_pages, copied in (("a", 4, []), ("b", 2, [2]), ("c", 4, [2])):
        it.cache.prefetch_queue.is_done(rid, prompt(0, num_pages))
        assert [len(copy.device_pages) for copy in it.pop(CopyToHost)] == copied


def test_a_failed_copy_is_repeated_at_the_next_hit() -> None:
    it = Rank(HiCachePolicy(write="write_through_selective"))
    it.compute(0, 2)
    it.cache.prefetch_queue.is_done("r", prompt(0, 2))
    it.end_writes(is_ok=False)
    it.step()
    it.compute(0, 3)
    [copy] = it.pop(CopyToHost)
    assert len(copy.device_pages) == 2


# --- digests that ranks compare ---


def read_four(it: Rank) -> None:
    it.read("r", 9, 6, num_hit=4)


def read_five(it: Rank) -> None:
    it.read("r", 9, 6, num_hit=5)


def on_host_and_device(chat_on_host: int) -> Callable[[Rank], None]:
    """Cache two chats of two pages, one only on the host and the other only on the device."""

    def run(it: Rank) -> None:
        it.has_storage = False
        it.step()
        it.cache_on_host(chat_on_host, 2)
        it.compute(1 - chat_on_host, 2)
        it.end_writes(is_ok=False)
        it.step()
        assert it.pages_on() == (2, 2, 0)

    return run


def stored(chat_in_storage: int) -> Callable[[Rank], None]:
    """Cache two chats of two pages on the host, one of them also in storage."""

    def run(it: Rank) -> None:
        for chat in (0, 1):
            it.compute(chat, 2)
        it.end_writes()
        it.step()
        for chat, write in enumerate(it.pop(WriteToStorage)):
            it.cache.handle(BackupDone(write.op, chat == chat_in_storage))
        it.step()
        it.step()
        assert it.pages_on() == (4, 4, 2)

    return run


DIFFERENCES: dict[str, tuple[Callable[[Rank], object], Callable[[Rank], object]]] = {
    "operations under way": (lambda it: None, lambda it: it.cache.prefetch_queue.start("r", prompt(9, 6))),
    "host pages in flight": (read_four, read_five),
    "free device pages": (lambda it: None, lambda it: it.cache.allocate(1)),
    "pages of the device and of the host": (on_host_and_device(0), on_host_and_device(1)),
    "pages of storage": (stored(0), stored(1)),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_in_different_states_have_different_digests(name: str) -> None:
    digests = []
    for change in DIFFERENCES[name]:
        it, twin = Rank(), Rank()
        change(it)
        change(twin)
        assert it.cache.state_digest == twin.cache.state_digest
        digests.append(it.cache.state_digest)
    assert digests[0] != digests[1]
