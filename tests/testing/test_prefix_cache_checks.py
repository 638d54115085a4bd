"""Every prefix-cache check passes on the kit's cache, and fails, with its trace, on a cache that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from scheduler_components import BlockStored, CacheIntegrityError, KVCacheEvent, OutOfPagesError
from scheduler_components.cache import BlockTableCache, PrefixMatch, PrefixNamespace, RadixCache, TableMatch
from scheduler_components.testing import ConformanceError
from scheduler_components.testing import prefix_cache_checks as checks


def opening(kind: type[RadixCache | BlockTableCache]) -> checks.OpenCache:
    return lambda num_pages: kind(page_size=2, capacity_tokens=2 * num_pages, record=True)


@pytest.mark.parametrize("check", checks.PREFIX_CACHE_CHECKS)
def test_the_radix_cache_passes(check: Callable[[checks.OpenCache], None]) -> None:
    check(opening(RadixCache))


@pytest.mark.parametrize("reserves_page_0", [False, True])
@pytest.mark.parametrize("check", checks.BLOCK_TABLE_CACHE_CHECKS)
def test_the_block_table_cache_passes(check: Callable[[checks.OpenCache], None], reserves_page_0: bool) -> None:
    check(
        lambda num_pages: BlockTableCache(
            page_size=2, capacity_tokens=2 * num_pages, reserves_page_0=reserves_page_0, record=True
        )
    )


class RoundsUp(RadixCache):
    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        found = super().match_prefix(token_ids, namespace)
        return msgspec.structs.replace(found, num_tokens=min(len(token_ids), found.num_tokens + 1))


class KeepsDuplicates(RadixCache):
    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> PrefixMatch:
        known = self.match_prefix(token_ids, namespace)
        return super().insert(token_ids, [*known.pages, *pages[len(known.pages) :]], namespace)


class ForgetsLocks(RadixCache):
    def lock(self, node: Any) -> None:
        pass

    def unlock(self, node: Any) -> None:
        pass


class TellsParentsFirst(RadixCache):
    def take_events(self) -> tuple[KVCacheEvent, ...]:
        return tuple(reversed(super().take_events()))


class EvictsFirst(RadixCache):
    def allocate(self, num_pages: int) -> list[int]:
        try:
            return super().allocate(num_pages)
        except OutOfPagesError:
            self.evict(num_pages)
            raise


class SharesTenants(RadixCache):
    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        return super().match_prefix(token_ids)

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> PrefixMatch:
        return super().insert(token_ids, pages)


class ClearsInSilence(RadixCache):
    def clear(self) -> None:
        super().clear()
        self.take_events()


class TellsHalf(RadixCache):
    def take_events(self) -> tuple[KVCacheEvent, ...]:
        return tuple(event for event in super().take_events() if isinstance(event, BlockStored))


class EvictsTheRoot(RadixCache):
    def evict(self, num_pages: int) -> int:
        gone = super().evict(num_pages + 1 if num_pages == 1 else num_pages)
        return min(gone, num_pages)


class PublishesCopies(BlockTableCache):
    """Publishes the removal of every copy, as vLLM 0.32 does."""

    def evict(self, num_pages: int) -> int:
        gone = [next(iter(self._evictable)) for _ in range(min(num_pages, 1)) if self._evictable]
        for page in gone:
            block = self._block_of[page]
            if block is not None and len(block.pages) > 1:
                self._recorder.remove((block.block_hash,))
        return super().evict(num_pages)


class ReturnsTheOldestCopy(BlockTableCache):
    """Replaces the pages of the second request."""

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> TableMatch:
        super().insert(token_ids, pages, namespace)
        return self.match_prefix(token_ids, namespace)


OPENED: list[RadixCache] = []


class TakesTurns(RadixCache):
    """Depends on how many caches there are: a stand-in for a clock."""

    def allocate(self, num_pages: int) -> list[int]:
        OPENED.append(self)
        pages = super().allocate(num_pages)
        return pages if len({id(cache) for cache in OPENED}) % 2 else pages[::-1]


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        (checks.check_whole_pages_come_back, RoundsUp, "match_prefix"),
        (checks.check_equal_prompts_share_pages, KeepsDuplicates, "two of the second's pages were freed"),
        (checks.check_locked_prefixes_stay, ForgetsLocks, "(used, evictable) tokens"),
        (checks.check_leaves_are_evicted_first, EvictsTheRoot, "tokens still matched: 4"),
        (checks.check_failed_allocation_changes_nothing, EvictsFirst, "still cached: 2"),
        (checks.check_tenants_share_nothing, SharesTenants, "before it stored any: 0"),
        (checks.check_clear_publishes_all_blocks_cleared, ClearsInSilence, "in a reader's view"),
        (checks.check_events_match_the_contents, TellsHalf, "broken rules|in a reader's view"),
        (checks.check_events_match_the_contents, TellsParentsFirst, "broken rules|in a reader's view"),
        (checks.check_equal_calls_give_equal_events, TakesTurns, "the other cache's pages"),
        (checks.check_equal_prompts_keep_their_pages, ReturnsTheOldestCopy, "the second's own pages"),
        (checks.check_equal_prompts_keep_their_pages, PublishesCopies, "broken rules|in a reader's view"),
    ],
)
def test_a_broken_cache_fails_with_its_trace(
    check: Callable[[checks.OpenCache], None], broken: type[RadixCache | BlockTableCache], message: str
) -> None:
    OPENED.clear()
    with pytest.raises(ConformanceError) as failed:
        check(opening(broken))
    assert any(each in str(failed.value) for each in message.split("|")), str(failed.value)
    assert "1. opened a cache" in str(failed.value)


def test_every_check_has_a_broken_cache() -> None:
    cases = next(mark for mark in test_a_broken_cache_fails_with_its_trace.pytestmark if mark.name == "parametrize")
    assert {check for check, _, _ in cases.args[1]} == {*checks.PREFIX_CACHE_CHECKS, *checks.BLOCK_TABLE_CACHE_CHECKS}


def test_an_error_of_the_cache_becomes_a_trace() -> None:
    class Raises(RadixCache):
        def lock(self, node: Any) -> None:
            raise CacheIntegrityError("no such node")

    with pytest.raises(ConformanceError, match=r"(?s)served a request.*found: +CacheIntegrityError: no such node"):
        checks.check_locked_prefixes_stay(opening(Raises))
