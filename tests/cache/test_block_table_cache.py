"""BlockTableCache against a naive model of vLLM's pool. The checks of the kit run in tests/testing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.block_pool_model import HISTORIES, PAGE_SIZE, BlockTableComparison, NaiveBlockPool
from kit.searches import num_examples

from scheduler_components import CacheIntegrityError, ConfigError
from scheduler_components.cache import BlockTableCache, PrefixNamespace, RadixCache
from scheduler_components.values import DEFAULT_WEIGHT_VERSION


def open_cache(num_pages: int, *, reserves_page_0: bool = True, record: bool = True) -> BlockTableCache:
    return BlockTableCache(
        page_size=PAGE_SIZE, capacity_tokens=num_pages * PAGE_SIZE, reserves_page_0=reserves_page_0, record=record
    )


@pytest.mark.soak
@settings(max_examples=num_examples(1), deadline=None)
@given(history=HISTORIES, num_pages=st.integers(1, 16))
def test_every_history_has_the_pages_of_vllms_rules(history: list[tuple[object, ...]], num_pages: int) -> None:
    BlockTableComparison(open_cache(num_pages), NaiveBlockPool(num_pages)).run(history)


def test_page_0_is_reserved() -> None:
    cache = open_cache(3)
    assert (cache.num_pages, cache.capacity_tokens, cache.free_tokens, cache.used_tokens) == (3, 6, 6, 0)
    assert cache.allocate(3) == [1, 2, 3]
    cache = open_cache(3, reserves_page_0=False)
    assert cache.allocate(3) == [0, 1, 2]


def test_a_match_does_not_change_the_order_of_eviction() -> None:
    """A policy may therefore match waiting requests as often as it likes."""
    cache = open_cache(2)
    for token in (1, 2):
        cache.insert([token] * PAGE_SIZE, cache.allocate(1))
    assert cache.match_prefix([1] * PAGE_SIZE).num_tokens
    cache.evict(1)
    assert not cache.match_prefix([1] * PAGE_SIZE).num_tokens


def test_an_insert_without_a_lock_keeps_parents_longer_than_children() -> None:
    cache = open_cache(4)
    first = cache.insert([1, 2], cache.allocate(1))
    cache.insert([9, 9], cache.allocate(1))
    cache.insert([1, 2, 3, 4], [*first.pages, *cache.allocate(1)])
    cache.check_integrity()
    assert cache.evict(2) == 2
    assert cache.match_prefix([1, 2, 3, 4]).num_tokens == 2, "the root was evicted before its child"


def test_hashes_are_those_of_the_radix_cache() -> None:
    """A reader can join the streams of both caches."""
    radix = RadixCache(page_size=PAGE_SIZE, capacity_tokens=16, record=True)
    table = open_cache(8)
    for space in (None, PrefixNamespace(cache_salt="a", lora_id=3, lora_name="poems")):
        for cache in (radix, table):
            cache.insert([1, 2, 3, 4], cache.allocate(2), space)
    assert table.take_events() == tuple(radix.take_events())
    [(place, held)] = table.held_blocks().items()
    assert {place: sorted(held)} == {each: sorted(hashes) for each, hashes in radix.held_blocks().items()}


def test_a_clear_changes_the_namespace_with_the_weights() -> None:
    cache = open_cache(4)
    cache.insert([1, 2], cache.allocate(1))
    cache.clear("v2")
    assert not cache.match_prefix([1, 2]).num_tokens
    second = cache.insert([1, 2], cache.allocate(1))
    hashes = list(cache.block_hashes())
    cache.clear(DEFAULT_WEIGHT_VERSION)
    cache.insert([1, 2], cache.allocate(1))
    assert list(cache.block_hashes()) != hashes
    with pytest.raises(CacheIntegrityError, match="evicted before it was locked"):
        cache.lock(second.node)


def test_errors_change_nothing() -> None:
    cache = open_cache(4)
    stored = cache.insert([1, 2], cache.allocate(1))
    held = cache.allocate(2)
    cases = [
        (ConfigError, "is not one page per 2 tokens", lambda: cache.insert([1, 2, 3, 4], held[:1])),
        (CacheIntegrityError, "is cached, not held", lambda: cache.insert([5, 6], stored.pages)),
        (CacheIntegrityError, "named twice", lambda: cache.insert([5, 6, 7, 8], [held[0], held[0]])),
        (CacheIntegrityError, "is free, not held", lambda: cache.insert([5, 6], [4])),
        (CacheIntegrityError, "is cached, not held", lambda: cache.free(stored.pages)),
        (CacheIntegrityError, "unlocked twice", lambda: cache.unlock(stored)),
    ]
    before = cache.free_tokens, cache.evictable_tokens, cache.num_locks, list(cache.block_hashes())
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
        assert (cache.free_tokens, cache.evictable_tokens, cache.num_locks, list(cache.block_hashes())) == before
        cache.check_integrity()
    with pytest.raises(ConfigError, match="does not hold one page"):
        BlockTableCache(page_size=4, capacity_tokens=3)


def test_without_a_record_there_are_no_events() -> None:
    cache = open_cache(1, record=False)
    cache.insert([1, 2], cache.allocate(1))
    cache.allocate(1)
    cache.clear()
    assert cache.take_events() == ()
    assert cache.num_event_collapses == 0


def test_events_that_are_not_taken_collapse_to_the_content() -> None:
    cache = open_cache(2)
    for token in range(10):
        cache.insert([token, token], cache.allocate(1))
    assert cache.num_event_collapses == 1
    events = cache.take_events()
    assert [type(event).__name__ for event in events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache: cache._table.clear(), "name different blocks"),
        (lambda cache: cache._evictable.popitem(), "in the eviction order"),
        (lambda cache: cache._evictable.move_to_end(cache.match_prefix([1, 2, 3, 4]).pages[1]), "is evicted before it"),
    ],
)
def test_the_integrity_check_names_a_damage(damage, message) -> None:  # type: ignore[no-untyped-def]
    cache = open_cache(4)
    cache.insert([1, 2, 3, 4], cache.allocate(2))
    cache.check_integrity()
    damage(cache)
    with pytest.raises(CacheIntegrityError, match=message):
        cache.check_integrity()
