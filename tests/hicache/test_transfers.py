"""Transfers between tiers: their limits, retries, failures and counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from kit.hicache_rank import PAGE_SIZE, HiCacheRank, prompt

from scheduler_components import CacheIntegrityError
from scheduler_components.cache import DEFAULT_NAMESPACE
from scheduler_components.cache.block_hash import DIGEST_BYTES, pack_tokens, page_digests
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.prefetch import ActivePrefetches
from scheduler_components.hicache.tiers import TierTree
from scheduler_components.hicache.transfers import TierTransfers
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages

# --- pages counted as stored ---


def test_a_backup_that_ends_when_storage_is_detached_does_not_count() -> None:
    it = HiCacheRank()
    it.cache_on_host(0, 4)
    assert it.end_backups() == 4
    it.has_storage = False
    it.step()
    assert it.pages_on() == (0, 4, 0)
    assert it.cache.stats().pages_not_backed_up == 4


def test_landed_pages_are_kept_when_storage_is_detached_but_not_counted_as_stored() -> None:
    it = HiCacheRank()
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
    it = HiCacheRank()
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
    it = HiCacheRank()
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


def test_a_prefix_is_written_to_the_host_before_what_follows_is_read() -> None:
    """The pages that are read need their prefix on the host."""
    it = HiCacheRank(HiCachePolicy(write="write_back", prefetch="wait_complete", prefetch_threshold_pages=1))
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
    it = HiCacheRank()
    it.cache_on_host(0, 3)
    for chat, num_pages, num_cached in ((0, 6, 3), (1, 4, 0)):
        it.cache.prefetch_queue.start(f"r{chat}", prompt(chat, num_pages))
        [query] = it.pop(QueryStorage)
        whole = page_digests(pack_tokens(prompt(chat, num_pages)), PAGE_SIZE, DEFAULT_NAMESPACE.seed())
        assert query.digests == whole[num_cached * DIGEST_BYTES :]


def test_the_prefix_of_a_prefetch_stays_on_the_host_until_it_ends() -> None:
    it = HiCacheRank(num_host_pages=8)
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
    it = HiCacheRank()
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
    it = HiCacheRank(num_host_pages=9)
    read = it.read("r", 0, 8, num_hit=8)
    assert len(read.host_pages) == 4
    assert len(read.digests) == 4 * DIGEST_BYTES


def test_evictable_host_pages_count_as_free_for_a_prefetch() -> None:
    it = HiCacheRank(num_host_pages=8)
    it.cache_on_host(0, 6)
    it.end_backups()
    it.step()
    read = it.read("r", 1, 4, num_hit=4)
    assert len(read.host_pages) == 4


def test_a_hit_of_threshold_length_is_read_if_the_host_has_room() -> None:
    policy = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=3)
    assert len(HiCacheRank(policy).read("r", 0, 4, num_hit=3).host_pages) == 3
    it = HiCacheRank(policy, num_host_pages=5)
    it.cache.prefetch_queue.start("r", prompt(0, 4))
    [query] = it.pop(QueryStorage)
    it.cache.handle(QueryDone(query.op, 3))
    it.step()
    it.step()
    assert it.pop(ReadFromStorage) == []
    assert it.cache.num_operations == 0
    assert it.host.pool.num_free == 5


def test_a_clear_during_a_prefetch_raises() -> None:
    """The prefetch locks no page of the tree, so the check counts operations."""
    it = HiCacheRank()
    read = it.read("r", 0, 4, num_hit=4)
    with pytest.raises(CacheIntegrityError, match="1 operations are under way"):
        it.cache.clear()
    it.end_read(read, 4)
    it.step()
    it.cache.clear()
    assert it.host.pool.num_free == 16


def test_host_pages_of_a_terminated_prefetch_are_freed_after_the_last_write() -> None:
    it = HiCacheRank(num_host_pages=8)
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
    it = HiCacheRank(HiCachePolicy(write="write_back", clean_ahead_pages=num_ahead))
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
    it = HiCacheRank(num_host_pages=16)
    for chat in range(3):
        it.compute(chat, 2)
    it.end_writes()
    it.step()
    assert [len(write.host_pages) for write in it.pop(WriteToStorage)] == [2, 2]
    assert it.cache.stats().pages_not_backed_up == 2


def test_loads_of_one_step_share_the_agreed_budget() -> None:
    it = HiCacheRank()
    for chat in range(2):
        it.cache_on_host(chat, 3)
    it.load_back_budget_pages = 4
    it.step()
    for chat in range(2):
        assert not it.cache.prefetch_queue.is_done(f"r{chat}", prompt(chat, 3))
    assert [len(copy.device_pages) for copy in it.pop(CopyToDevice)] == [3, 1]


def test_a_request_loads_no_more_pages_than_its_prompt_has() -> None:
    """Otherwise two requests that evict each other's pages would load forever."""
    it = HiCacheRank()
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


def test_the_parent_of_a_load_stays_on_the_device() -> None:
    it = HiCacheRank(num_device_pages=4)
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
    it = HiCacheRank(num_device_pages=4, num_host_pages=8)
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


def cache_two_nodes_unwritten(it: HiCacheRank, chat: int) -> None:
    """Cache a prompt and its continuation on the device in two nodes whose writes failed."""
    for num_pages in (2, 4):
        it.compute(chat, num_pages)
        it.end_writes(is_ok=False)
        it.step()
        it.step()  # one failed write ends per step


def test_a_path_whose_writes_failed_is_written_at_its_next_use() -> None:
    it = HiCacheRank(num_device_pages=16)
    cache_two_nodes_unwritten(it, 0)
    it.compute(0, 5)
    assert sum(len(copy.device_pages) for copy in it.pop(CopyToHost)) == 5


def test_pages_below_an_unwritten_page_are_not_written() -> None:
    it = HiCacheRank(num_device_pages=16, num_host_pages=4)
    it.compute(0, 5)
    it.compute(0, 6)
    assert it.pop(CopyToHost) == []
    assert it.cache.stats().pages_not_written == 5 + 5


def test_a_page_is_backed_up_only_with_its_prefix() -> None:
    it = HiCacheRank(num_host_pages=16)
    it.compute(0, 2)
    it.end_writes()
    it.step()
    it.compute(0, 4)  # the backup of its prefix is in flight
    it.end_writes()
    it.step()
    assert [len(write.host_pages) for write in it.pop(WriteToStorage)] == [2, 2]
    it = HiCacheRank(num_host_pages=16)
    it.compute(0, 6)  # more than backups may lock
    it.end_writes()
    it.step()
    it.compute(0, 8)
    it.end_writes()
    it.step()
    assert it.pop(WriteToStorage) == []
    assert it.cache.stats().pages_not_backed_up >= 6


def test_a_page_whose_prefix_was_not_written_is_freed() -> None:
    it = HiCacheRank()
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
    it = HiCacheRank()
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
    tiers = TierTree(page_size=PAGE_SIZE, capacity_tokens=8, host=host, num_host_pages=4, record=False)
    controller = HiCacheController(host=host, prefetches=ActivePrefetches(policy=policy, host=host))
    transfers = TierTransfers.over(tiers, controller, policy)
    transfers.check()
    tiers.host.num_pages_used += 1
    with pytest.raises(
        CacheIntegrityError, match=r"0 host pages in the tree \+ 0 in flight, but 1 of 4 are counted as used"
    ):
        transfers.check()


def test_counts_of_moved_pages_add_up() -> None:
    it = HiCacheRank(num_device_pages=32, num_host_pages=32)
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
    it = HiCacheRank()
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
    it = HiCacheRank(num_host_pages=32)
    for chat, num_read in enumerate((3, 2, 0)):
        read = it.read(f"r{chat}", chat, 4, num_hit=3)
        it.end_read(read, num_read)
        it.step()
    stats = it.cache.stats()
    assert (stats.pages_prefetched, stats.pages_revoked) == (3 + 2, 1 + 3)
    assert (stats.prefetches, stats.prefetches_revoked) == (3, 1)


def test_an_admitted_request_may_load_again_after_a_retraction() -> None:
    it = HiCacheRank()
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
    it = HiCacheRank(HiCachePolicy(write="write_through_selective", write_threshold_hits=num_hits))
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
    it = HiCacheRank(HiCachePolicy(write="write_through_selective", write_threshold_hits=2))
    it.compute(0, 4)
    for rid, num_pages, copied in (("a", 4, []), ("b", 2, [2]), ("c", 4, [2])):
        it.cache.prefetch_queue.is_done(rid, prompt(0, num_pages))
        assert [len(copy.device_pages) for copy in it.pop(CopyToHost)] == copied


def test_a_failed_copy_is_repeated_at_the_next_hit() -> None:
    it = HiCacheRank(HiCachePolicy(write="write_through_selective"))
    it.compute(0, 2)
    it.cache.prefetch_queue.is_done("r", prompt(0, 2))
    it.end_writes(is_ok=False)
    it.step()
    it.compute(0, 3)
    [copy] = it.pop(CopyToHost)
    assert len(copy.device_pages) == 2


# --- digests that ranks compare ---


def read_four(it: HiCacheRank) -> None:
    it.read("r", 9, 6, num_hit=4)


def read_five(it: HiCacheRank) -> None:
    it.read("r", 9, 6, num_hit=5)


def on_host_and_device(chat_on_host: int) -> Callable[[HiCacheRank], None]:
    """Cache two chats of two pages, one only on the host and the other only on the device."""

    def run(it: HiCacheRank) -> None:
        it.has_storage = False
        it.step()
        it.cache_on_host(chat_on_host, 2)
        it.compute(1 - chat_on_host, 2)
        it.end_writes(is_ok=False)
        it.step()
        assert it.pages_on() == (2, 2, 0)

    return run


def stored(chat_in_storage: int) -> Callable[[HiCacheRank], None]:
    """Cache two chats of two pages on the host, one of them also in storage."""

    def run(it: HiCacheRank) -> None:
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


DIFFERENCES: dict[str, tuple[Callable[[HiCacheRank], object], Callable[[HiCacheRank], object]]] = {
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
        it, twin = HiCacheRank(), HiCacheRank()
        change(it)
        change(twin)
        assert it.cache.state_digest == twin.cache.state_digest
        digests.append(it.cache.state_digest)
    assert digests[0] != digests[1]
