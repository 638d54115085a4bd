"""A waiting request retries a miss, waits as its policy says, and is counted at its admission."""

from __future__ import annotations

import pytest
from kit.hicache_rank import HiCacheRank, prompt

from scheduler_components.hicache import HiCachePolicy
from scheduler_components.values.page_operations import (
    CancelPrefetch,
    CopyToDevice,
    QueryDone,
    QueryStorage,
    ReadFromStorage,
)


class Waiter:
    """A waiting request for a prompt of four pages."""

    def __init__(self, policy: HiCachePolicy) -> None:
        self.rank = HiCacheRank(policy)
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
    it = HiCacheRank(RETRYING)
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


def test_a_cancelled_request_reads_no_further() -> None:
    it = HiCacheRank()
    read = it.read("r", 0, 4, num_hit=4)
    it.cache.prefetch_queue.cancel("r")
    it.step()
    assert it.pop(CancelPrefetch) == [CancelPrefetch(read.op)]


def test_a_request_waits_for_budget_only_if_a_load_is_under_way() -> None:
    it = HiCacheRank()
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


def test_a_request_waits_until_its_load_has_ended() -> None:
    it = HiCacheRank()
    it.cache_on_host(0, 4)
    for _ in range(3):
        assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
        it.step()
    assert it.end_loads() == 4
    it.step()
    assert it.cache.prefetch_queue.is_done("r", prompt(0, 4))


def test_a_request_recomputes_after_a_failed_load() -> None:
    it = HiCacheRank()
    it.cache_on_host(0, 4)
    it.load_back_budget_pages = 2
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.end_loads(is_ok=False) == 2
    it.step()
    assert it.cache.prefetch_queue.is_done("r", prompt(0, 4))
    assert it.pop(CopyToDevice) == []
    assert (it.pages_on()[:2], it.cache.free_tokens) == ((0, 4), it.cache.capacity_tokens)


def test_an_admission_counts_each_token_where_it_was_found() -> None:
    it = HiCacheRank(num_device_pages=16)
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
    it = HiCacheRank()
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
