"""Checks of every prefix cache. Run each of ``PREFIX_CACHE_CHECKS`` on a cache of your own, or each of
``BLOCK_TABLE_CACHE_CHECKS`` on one that never replaces a page of a request.

A check takes a function that opens an empty, recording cache with a number of pages of ``PAGE_SIZE`` tokens, and raises
``ConformanceError`` with its trace. ``PrefixCacheMachine`` finds further errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from scheduler_components import CacheIntegrityError, OutOfPagesError
from scheduler_components.cache import PrefixNamespace
from scheduler_components.scheduling.request_kv_cache import CachedPrefix
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.interfaces import PAGE_SIZE, CheckedPrefixCache

__all__ = ["BLOCK_TABLE_CACHE_CHECKS", "PREFIX_CACHE_CHECKS", "OpenCache"]

OpenCache = Callable[[int], CheckedPrefixCache]
"""Opens a cache with a number of pages."""


def check_whole_pages_come_back(open_cache: OpenCache) -> None:
    """A partial last page is neither cached nor matched, and pages are matched in order."""
    trace, cache = _begin("A prompt's whole pages are cached, and matched in order", open_cache, 8)
    stored = _serve(trace, cache, [1, 2, 3, 4, 5])
    trace.expect(4, stored.num_tokens, "tokens cached of 5, with 2 per page")
    for tokens, matched in (([1], 0), ([1, 2], 2), ([1, 2, 3], 2), ([1, 2, 3, 4, 5, 6], 4), ([9, 2, 3, 4], 0)):
        found = trace.call(f"match_prefix({tokens})", lambda tokens=tokens: cache.match_prefix(tokens))  # type: ignore[misc]
        trace.expect(
            (matched, tuple(stored.page_array)[: matched // PAGE_SIZE]), (found.num_tokens, tuple(found.page_array))
        )
    trace.call("check_integrity()", cache.check_integrity)


def check_equal_prompts_share_pages(open_cache: OpenCache) -> None:
    """If two requests computed the same page, one of the two pages is freed."""
    trace, cache = _begin("Two requests with one prompt end up sharing its pages", open_cache, 8)
    first = list(trace.call("allocate(2) for the first", lambda: cache.allocate(2)))
    second = list(trace.call("allocate(3) for the second", lambda: cache.allocate(3)))
    trace.call("insert([1, 2, 3, 4]) by the first", lambda: cache.insert([1, 2, 3, 4], first))
    trace.expect(3 * PAGE_SIZE, cache.free_tokens, "free tokens")
    merged = trace.call("insert([1 ... 6]) by the second", lambda: cache.insert([1, 2, 3, 4, 5, 6], second))
    trace.expect((*first, second[2]), tuple(merged.page_array), "the first's pages, then the new one")
    trace.expect(5 * PAGE_SIZE, cache.free_tokens, "free tokens: two of the second's pages were freed")
    trace.call("check_integrity()", cache.check_integrity)


def check_locked_prefixes_stay(open_cache: OpenCache) -> None:
    """Eviction takes only unlocked pages."""
    trace, cache = _begin("A locked prefix is never evicted", open_cache, 4)
    kept = _serve(trace, cache, [1, 2, 3, 4])
    _serve(trace, cache, [5, 6])
    trace.call("lock([1, 2, 3, 4])", lambda: cache.lock(kept.node))
    trace.expect((4, 2), (cache.used_tokens, cache.evictable_tokens), "(used, evictable) tokens")
    trace.expect(1, trace.call("evict(4)", lambda: cache.evict(4)), "pages that can be evicted")
    trace.expect(4, cache.match_prefix([1, 2, 3, 4]).num_tokens, "tokens of the locked prefix")
    trace.expect(0, cache.match_prefix([5, 6]).num_tokens, "tokens of the evicted one")
    trace.call("unlock([1, 2, 3, 4])", lambda: cache.unlock(kept.node))
    trace.expect(2, trace.call("evict(4)", lambda: cache.evict(4)), "pages that can be evicted")
    trace.call("check_integrity()", cache.check_integrity)


def check_leaves_are_evicted_first(open_cache: OpenCache) -> None:
    """After an eviction every page can still be reached from the root."""
    trace, cache = _begin("Eviction takes a prefix's deepest page first", open_cache, 4)
    _serve(trace, cache, [1, 2, 3, 4, 5, 6])
    trace.expect(1, trace.call("evict(1)", lambda: cache.evict(1)), "pages evicted")
    trace.expect(4, cache.match_prefix([1, 2, 3, 4, 5, 6]).num_tokens, "tokens still matched")
    _read(trace, cache, EventLedger(block_size=PAGE_SIZE))


def check_failed_allocation_changes_nothing(open_cache: OpenCache) -> None:
    """A failed allocation changes nothing."""
    trace, cache = _begin("A failed allocation evicts nothing", open_cache, 4)
    kept = _serve(trace, cache, [1, 2])
    _serve(trace, cache, [3, 4])
    trace.call("lock([1, 2])", lambda: cache.lock(kept.node))
    trace.expect_error("allocate(4) with 3 obtainable", OutOfPagesError, lambda: cache.allocate(4))
    trace.expect(2, cache.match_prefix([3, 4]).num_tokens, "tokens of the other prefix, still cached")
    pages = trace.call("allocate(3)", lambda: cache.allocate(3))
    trace.expect(3, len(set(pages)), "different pages")
    trace.call("free() of them", lambda: cache.free(pages))
    trace.expect_error("free() of the same pages again", CacheIntegrityError, lambda: cache.free(pages))
    trace.call("check_integrity()", cache.check_integrity)


def check_tenants_share_nothing(open_cache: OpenCache) -> None:
    """Equal tokens with another salt or adapter are another prefix with other hashes."""
    trace, cache = _begin("Prefixes of different namespaces share neither pages nor hashes", open_cache, 8)
    spaces = (None, PrefixNamespace(cache_salt="a"), PrefixNamespace(lora_id=1, lora_name="a"))
    for space in spaces:
        trace.expect(0, cache.match_prefix([1, 2], space).num_tokens, f"tokens of {space} before it stored any")
        _serve(trace, cache, [1, 2], space)
    trace.expect(len(spaces), len(set(cache.block_hashes())), "different block hashes")
    _read(trace, cache, EventLedger(block_size=PAGE_SIZE))


def check_clear_publishes_all_blocks_cleared(open_cache: OpenCache) -> None:
    """After a clear nothing is cached, and the events clear a reader's view."""
    trace, cache = _begin("clear() removes every prefix unless one is locked", open_cache, 4)
    stored = _serve(trace, cache, [1, 2, 3, 4])
    ledger = EventLedger(block_size=PAGE_SIZE)
    trace.call("lock", lambda: cache.lock(stored.node))
    trace.expect_error("clear() while a prefix is locked", CacheIntegrityError, cache.clear)
    trace.call("unlock", lambda: cache.unlock(stored.node))
    _read(trace, cache, ledger)
    trace.call("clear()", cache.clear)
    trace.expect(cache.capacity_tokens, cache.free_tokens, "free tokens")
    _read(trace, cache, ledger)


def check_events_match_the_contents(open_cache: OpenCache) -> None:
    """A hundred random requests in a small pool: the events break no rule and add up to the cache."""
    trace, cache = _begin("A reader of the events has the cache's blocks", open_cache, 12)
    ledger, random = EventLedger(block_size=PAGE_SIZE), Random(12)
    for number in range(100):
        _serve(trace, cache, _prompt(random))
        if number % 3 == 2:  # One drain has several stores and removals.
            _read(trace, cache, ledger)
    _read(trace, cache, ledger)
    trace.expect((), tuple(cache.take_events()), "events taken twice")


def check_equal_calls_give_equal_events(open_cache: OpenCache) -> None:
    """Two caches with the same calls hold the same pages: no decision depends on a clock or on chance."""
    trace, cache = _begin("Two caches with the same calls behave in the same way", open_cache, 6)
    other, random = open_cache(6), Random(7)
    for _ in range(60):
        tokens = _prompt(random)
        pages = tuple(_serve(trace, cache, tokens).page_array)
        trace.expect(pages, tuple(_serve(CheckTrace(trace.title), other, tokens).page_array), "the other cache's pages")
        trace.expect(tuple(cache.take_events()), tuple(other.take_events()), "the other cache's events")


def _begin(title: str, open_cache: OpenCache, num_pages: int) -> tuple[CheckTrace, CheckedPrefixCache]:
    trace = CheckTrace(title)
    cache = trace.call(f"opened a cache of {num_pages} pages of {PAGE_SIZE} tokens", lambda: open_cache(num_pages))
    trace.expect(PAGE_SIZE, cache.page_size, "page_size")
    return trace, cache


def _serve(
    trace: CheckTrace, cache: CheckedPrefixCache, tokens: Sequence[int], namespace: PrefixNamespace | None = None
) -> CachedPrefix[Any]:
    """Run a request from its match to its end, on a cache with enough free pages."""

    def run() -> CachedPrefix[Any]:
        found = cache.match_prefix(tokens, namespace)
        cache.lock(found.node)
        own = cache.allocate(len(tokens) // PAGE_SIZE - len(found.page_array))
        stored = cache.insert(tokens, [*found.page_array, *own], namespace)
        cache.unlock(found.node)
        return stored

    return trace.call(f"served a request for {list(tokens)}{f' of {namespace}' if namespace else ''}", run)


def _read(trace: CheckTrace, cache: CheckedPrefixCache, ledger: EventLedger) -> None:
    """Apply the new events; they must break no rule and add up to the contents."""
    events = trace.call("took its events", cache.take_events)
    trace.expect([], ledger.apply_all(events), "broken rules of the wire")
    trace.expect(sorted(cache.block_hashes()), sorted(ledger.hashes()), "the cache's blocks, in a reader's view")
    trace.call("check_integrity()", cache.check_integrity)


def _prompt(random: Random) -> list[int]:
    """Return a prompt of two different tokens, so that prompts share prefixes."""
    return random.choices((0, 1), k=random.randint(PAGE_SIZE, 5 * PAGE_SIZE))


PREFIX_CACHE_CHECKS: tuple[Callable[[OpenCache], None], ...] = checks_in(globals())
"""All checks of a prefix cache."""


def check_equal_prompts_keep_their_pages(open_cache: OpenCache) -> None:
    """If two requests computed the same page, both keep theirs, and readers see one block until both are gone."""
    trace, cache = _begin("A request's pages are never replaced, and copies are one block to readers", open_cache, 4)
    ledger = EventLedger(block_size=PAGE_SIZE)
    first, second = (list(cache.allocate(2)) for _ in range(2))
    stored = trace.call("insert([1, 2, 3, 4]) by the first", lambda: cache.insert([1, 2, 3, 4], first))
    trace.call("lock by the first", lambda: cache.lock(stored.node))
    copied = trace.call("insert([1, 2, 3, 4]) by the second", lambda: cache.insert([1, 2, 3, 4], second))
    trace.expect(tuple(second), tuple(copied.page_array), "the second's own pages")
    trace.expect((0, 4), (cache.free_tokens, cache.evictable_tokens), "(free, evictable) tokens")
    trace.expect(tuple(first), tuple(cache.match_prefix([1, 2, 3, 4]).page_array), "the pages of a match: the first's")
    _read(trace, cache, ledger)
    trace.expect(2, trace.call("evict(4)", lambda: cache.evict(4)), "pages that can be evicted: the second's")
    trace.expect(4, cache.match_prefix([1, 2, 3, 4]).num_tokens, "tokens that still match")
    _read(trace, cache, ledger)
    trace.call("unlock by the first", lambda: cache.unlock(stored.node))
    trace.expect(2, trace.call("evict(4)", lambda: cache.evict(4)), "pages that can be evicted: the first's")
    _read(trace, cache, ledger)


BLOCK_TABLE_CACHE_CHECKS: tuple[Callable[[OpenCache], None], ...] = tuple(
    check for check in checks_in(globals()) if check is not check_equal_prompts_share_pages
)
"""All checks of a prefix cache whose requests keep their own pages: a ``BlockTableCache``."""
