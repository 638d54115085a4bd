"""Every prefix-cache check passes on the kit's cache, and fails, with its trace, on a cache that breaks its promise."""

from __future__ import annotations

import pytest
from kit.variants import found, instead_of, variants
from msgspec.structs import replace

from scheduler_components import BlockStored, CacheIntegrityError, OutOfPagesError
from scheduler_components.cache import BlockTableCache, RadixCache
from scheduler_components.testing import ConformanceError
from scheduler_components.testing import prefix_cache_checks as checks

EVENTS = checks.check_events_match_the_contents
COPIES = checks.check_equal_prompts_keep_their_pages
UNEQUAL = "broken rules|in a reader's view"
OPENED = set()


def opening(kind, **settings):
    return lambda num_pages: kind(page_size=2, capacity_tokens=2 * num_pages, record=True, **settings)


@pytest.mark.parametrize("check", checks.PREFIX_CACHE_CHECKS)
def test_the_radix_cache_passes(check):
    check(opening(RadixCache))


@pytest.mark.parametrize("reserves_page_0", [False, True])
@pytest.mark.parametrize("check", checks.BLOCK_TABLE_CACHE_CHECKS)
def test_the_block_table_cache_passes(check, reserves_page_0):
    check(opening(BlockTableCache, reserves_page_0=reserves_page_0))


class BrokenCache(RadixCache):
    @instead_of("match_prefix", checks.check_whole_pages_come_back, "match_prefix")
    def rounds_up(self, token_ids, namespace=None):
        found = super().match_prefix(token_ids, namespace)
        return replace(found, num_tokens=min(len(token_ids), found.num_tokens + 1))

    @instead_of("insert", checks.check_equal_prompts_share_pages, "two of the second's pages were freed")
    def keeps_duplicates(self, token_ids, pages, namespace=None):
        known = self.match_prefix(token_ids, namespace)
        return super().insert(token_ids, [*known.pages, *pages[len(known.pages) :]], namespace)

    forgets_locks = found(
        checks.check_locked_prefixes_stay,
        "(used, evictable) tokens",
        lock=lambda self, node: None,
        unlock=lambda self, node: None,
    )
    tells_parents_first = found(EVENTS, UNEQUAL, take_events=lambda self: super().take_events()[::-1])

    @instead_of("allocate", checks.check_failed_allocation_changes_nothing, "still cached: 2")
    def evicts_first(self, num_pages):
        try:
            return super().allocate(num_pages)
        except OutOfPagesError:
            self.evict(num_pages)
            raise

    shares_tenants = found(
        checks.check_tenants_share_nothing,
        "before it stored any: 0",
        match_prefix=lambda self, token_ids, namespace=None: super().match_prefix(token_ids),
        insert=lambda self, token_ids, pages, namespace=None: super().insert(token_ids, pages),
    )

    @instead_of("clear", checks.check_clear_publishes_all_blocks_cleared, "in a reader's view")
    def clears_in_silence(self):
        super().clear()
        self.take_events()

    @instead_of("take_events", EVENTS, UNEQUAL)
    def tells_half(self):
        return tuple(event for event in super().take_events() if isinstance(event, BlockStored))

    @instead_of("evict", checks.check_leaves_are_evicted_first, "tokens still matched: 4")
    def evicts_the_root(self, num_pages):
        return min(super().evict(num_pages + 1 if num_pages == 1 else num_pages), num_pages)

    @instead_of("allocate", checks.check_equal_calls_give_equal_events, "the other cache's pages")
    def takes_turns(self, num_pages):
        """Depends on how many caches there are: a stand-in for a clock."""
        OPENED.add(self)
        pages = super().allocate(num_pages)
        return pages if len(OPENED) % 2 else pages[::-1]


class BrokenTable(BlockTableCache):
    @instead_of("evict", COPIES, UNEQUAL)
    def publishes_copies(self, num_pages):
        """Publishes the removal of every copy, as vLLM 0.32 does."""
        gone = [next(iter(self._evictable)) for _ in range(min(num_pages, 1)) if self._evictable]
        for page in gone:
            block = self._block_of[page]
            if block is not None and len(block.pages) > 1:
                self._recorder.remove((block.block_hash,))
        return super().evict(num_pages)

    @instead_of("insert", COPIES, "the second's own pages")
    def returns_the_oldest_copy(self, token_ids, pages, namespace=None):
        """Replaces the pages of the second request."""
        super().insert(token_ids, pages, namespace)
        return self.match_prefix(token_ids, namespace)


BROKEN = variants(BrokenCache, BrokenTable)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cache_fails_with_its_trace(name):
    broken, check, message = BROKEN[name]
    OPENED.clear()
    with pytest.raises(ConformanceError) as failed:
        check(opening(broken))
    assert any(each in str(failed.value) for each in message.split("|")), str(failed.value)
    assert "1. opened a cache" in str(failed.value)


def test_every_check_has_a_broken_cache():
    found_by = {check for _, check, _ in BROKEN.values()}
    assert found_by == {*checks.PREFIX_CACHE_CHECKS, *checks.BLOCK_TABLE_CACHE_CHECKS}


def test_an_error_of_the_cache_becomes_a_trace():
    class Raises(RadixCache):
        def lock(self, node):
            raise CacheIntegrityError("no such node")

    with pytest.raises(ConformanceError, match=r"(?s)served a request.*found: +CacheIntegrityError: no such node"):
        checks.check_locked_prefixes_stay(opening(Raises))
