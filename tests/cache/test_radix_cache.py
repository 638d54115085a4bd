"""Single calls of the radix cache: ownership of pages, locks, and invalid calls that change nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import (
    BlockRemoved,
    BlockStored,
    CacheIntegrityError,
    ConfigError,
    OutOfPagesError,
)
from scheduler_components.cache import PrefixMatch, PrefixNamespace, RadixCache, RadixNode

MADE: list[RadixCache] = []


@pytest.fixture(autouse=True)
def _check_every_cache_at_the_end() -> Iterator[None]:
    MADE.clear()
    yield
    for cache in MADE:
        cache.check_integrity()


def make_cache(num_pages: int = 8, page_size: int = 2) -> RadixCache:
    cache = RadixCache(page_size=page_size, capacity_tokens=num_pages * page_size, record=True)
    MADE.append(cache)
    return cache


def store(cache: RadixCache, tokens: list[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
    """Cache a request from match to insert, on a cache with room."""
    found = cache.match_prefix(tokens, namespace)
    lacking = len(tokens) // cache.page_size - len(found.pages)
    return cache.insert(tokens, [*found.pages, *cache.allocate(lacking)], namespace)


def test_an_array_matches_like_a_list() -> None:
    cache = make_cache()
    stored = store(cache, [1, 2, 3, 4])
    assert cache.match_prefix(array("I", [1, 2, 3, 4, 5])) == cache.match_prefix([1, 2, 3, 4, 5]) == stored


def test_sessions_share_pages() -> None:
    cache = make_cache()
    stored = store(cache, [1, 2], PrefixNamespace(session_id="first"))
    assert cache.match_prefix([1, 2], PrefixNamespace(session_id="second")).pages == stored.pages


def test_the_least_recently_used_pages_go_first_and_a_prefix_from_its_end() -> None:
    cache = make_cache(num_pages=4)
    old, young = store(cache, [1, 1, 2, 2]), store(cache, [3, 3, 4, 4])
    assert cache.match_prefix([1, 1]).pages == old.pages[:1]
    cache.take_events()
    # Oldest use first: the end of [1,1,2,2], which the last match did not include, then all of [3,3,4,4], then [1,1].
    assert cache.evict(1) == 1
    assert cache.match_prefix([1, 1, 2, 2]).num_tokens == 2
    assert cache.evict(1) == 1
    assert cache.match_prefix([3, 3, 4, 4]).pages == young.pages[:1]
    (removed,) = cache.take_events()
    assert isinstance(removed, BlockRemoved)
    assert len(removed.block_hashes) == 2


def test_runs_that_were_used_at_different_times_are_not_joined() -> None:
    """Joining them would evict the younger pages at the end of the run before older ones."""
    cache = make_cache(num_pages=6, page_size=1)
    page = cache.allocate(1)  # an allocation joins runs, so allocate before
    store(cache, [1, 2])
    store(cache, [1, 2, 3, 4])
    cache.insert([9], page)
    cache.match_prefix([1, 2])
    cache.evict(3)
    assert cache.match_prefix([9]).num_tokens == 0
    assert cache.match_prefix([1, 2, 3, 4]).num_tokens == 2


def test_a_locked_prefix_stays_and_nothing_is_evicted_in_vain() -> None:
    cache = make_cache(num_pages=4)
    kept = store(cache, [1, 1, 2, 2])
    store(cache, [3, 3])
    cache.lock(kept.node)
    assert (cache.used_tokens, cache.evictable_tokens, cache.free_tokens) == (4, 2, 2)
    with pytest.raises(OutOfPagesError) as caught:
        cache.allocate(3)
    assert (caught.value.wanted_pages, caught.value.free_pages) == (3, 2)
    assert cache.evictable_tokens == 2
    assert cache.evict(9) == 1
    cache.unlock(kept.node)
    assert len(cache.allocate(4)) == 4


def test_events_carry_the_namespace() -> None:
    cache = make_cache()
    namespace = PrefixNamespace(lora_id=3, lora_name="ad", cache_salt="s", extra_key="img", session_id="chat")
    store(cache, [1, 2, 3, 4, 5], namespace)
    (event,) = cache.take_events()
    assert event == BlockStored(
        block_hashes=tuple(cache.block_hashes()),
        parent_block_hash=None,
        token_ids=(1, 2, 3, 4),
        block_size=2,
        lora_id=3,
        lora_name="ad",
        cache_salt="s",
        extra_keys=(("img",), ("img",)),
        session_id="chat",
    )


def evicted_node(cache: RadixCache) -> PrefixMatch:
    gone = store(cache, [8, 8])
    cache.evict(8)
    return gone


MISUSES: dict[str, tuple[Callable[[RadixCache], object], type[Exception], str]] = {
    "free twice": (lambda cache: cache.free([7, 7]), CacheIntegrityError, "named twice"),
    "free a free page": (lambda cache: cache.free([7]), CacheIntegrityError, "page 7 is free, not held"),
    "free a cached page": (lambda cache: cache.free([0]), CacheIntegrityError, "page 0 is cached, not held"),
    "free no page of ours": (lambda cache: cache.free([-1]), CacheIntegrityError, "page -1 is not one of 0 to 7"),
    "insert a free page": (lambda cache: cache.insert([9, 9], [7]), CacheIntegrityError, "page 7 is free"),
    "insert a cached page": (lambda cache: cache.insert([9, 9], [0]), CacheIntegrityError, "page 0 is cached"),
    "insert too few pages": (lambda cache: cache.insert([1, 1, 9, 9], [0]), ConfigError, "give 2 for 4 tokens"),
    "insert too many pages": (lambda cache: cache.insert([1, 1, 9], [0, 1]), ConfigError, "give 1 for 3 tokens"),
    "insert no token": (lambda cache: cache.insert([1, 2**32], [2]), ConfigError, "token_ids=4294967296"),
    "match no token": (lambda cache: cache.match_prefix([1, -5]), ConfigError, "token_ids=-5"),
    "match no namespace": (
        lambda cache: cache.match_prefix([1], PrefixNamespace(cache_salt="\udc00")),
        ConfigError,
        "namespace",
    ),
    "allocate less than nothing": (lambda cache: cache.allocate(-1), ConfigError, "num_pages=-1"),
    "unlock what is not locked": (
        lambda cache: cache.unlock(cache.match_prefix([1, 1, 2, 2]).node),
        CacheIntegrityError,
        "is not locked",
    ),
    "lock what was evicted": (
        lambda cache: cache.lock(evicted_node(cache).node),
        CacheIntegrityError,
        "not in the tree",
    ),
    "lock a node of another cache": (
        lambda cache: cache.lock(store(make_cache(), [1, 1]).node),
        CacheIntegrityError,
        "not in the tree",
    ),
    "clear while locked": (lambda cache: cache.clear(), CacheIntegrityError, "2 of 2 cached pages are locked"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_and_changes_nothing(name: str) -> None:
    misuse, error, message = MISUSES[name]
    cache = make_cache()
    kept = store(cache, [1, 1, 2, 2])
    if name != "unlock what is not locked":
        cache.lock(kept.node)
    before = (list(cache.block_hashes()), repr(cache))
    with pytest.raises(error, match=message):
        misuse(cache)
    assert (list(cache.block_hashes()), repr(cache)) == before
    cache.check_integrity()


@pytest.mark.parametrize("wrong", ["free", "the duplicate again"])
def test_an_insert_with_one_wrong_page_frees_no_duplicate(wrong: str) -> None:
    cache = make_cache()
    store(cache, [1, 1, 2, 2])
    (duplicate,) = cache.allocate(1)
    before = (list(cache.block_hashes()), repr(cache))
    with pytest.raises(CacheIntegrityError):
        cache.insert([1, 1, 9, 9], [duplicate, 7 if wrong == "free" else duplicate])
    assert (list(cache.block_hashes()), repr(cache)) == before
    cache.free([duplicate])
    cache.check_integrity()


def test_a_node_that_was_cleared_cannot_be_locked() -> None:
    cache = make_cache()
    stored = store(cache, [1, 1])
    cache.clear()
    with pytest.raises(CacheIntegrityError, match="not in the tree"):
        cache.lock(stored.node)


def test_part_of_a_match_that_was_evicted_is_noticed_at_the_lock() -> None:
    cache = make_cache()
    stored = store(cache, [1, 1, 2, 2, 3, 3])
    cache.evict(1)
    with pytest.raises(CacheIntegrityError, match="not in the tree"):
        cache.lock(stored.node)


@pytest.mark.parametrize(
    ("page_size", "capacity_tokens", "field"), [(0, 8, "page_size"), (-1, 8, "page_size"), (4, 3, "capacity_tokens")]
)
def test_a_pool_without_a_page_is_refused(page_size: int, capacity_tokens: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RadixCache(page_size=page_size, capacity_tokens=capacity_tokens)
    assert caught.value.field == field


def test_the_repr_is_a_summary_of_the_pool() -> None:
    cache = make_cache()
    cache.lock(store(cache, [1, 1]).node)
    store(cache, [2, 2, 3, 3])
    cache.allocate(1)
    assert repr(cache) == "<RadixCache page_size=2, 8 pages: 4 free, 2 evictable, 1 locked, 1 held by requests>"


DAMAGES: dict[str, tuple[Callable[[RadixCache, RadixNode], object], str]] = {
    "a node that the order has lost": (lambda cache, node: cache.lru.discard(node), "in the eviction order"),
    "a lost page": (lambda _, node: node.pages.pop(), "1 page indices, 2 pages"),
    "a changed token": (lambda _, node: node.tokens.__setitem__(8, 9), "digests do not follow"),
    "a changed first token": (lambda _, node: node.tokens.__setitem__(0, 9), "key is not its first page"),
    "a wrong count": (lambda _, node: setattr(node, "num_pages", 3), "16 token bytes, 3 pages of 8"),
    "a lost parent": (lambda _, node: setattr(node, "parent", None), "parent does not have it"),
    "a foreign page": (lambda _, node: node.pages.__setitem__(0, 5), "page 5 is free, not cached"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tree_is_reported(name: str) -> None:
    damage, message = DAMAGES[name]
    cache = RadixCache(page_size=2, capacity_tokens=16, record=True)
    damage(cache, store(cache, [1, 1, 2, 2]).node)
    with pytest.raises(CacheIntegrityError, match=message):
        cache.check_integrity()


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.sampled_from([None, "salt"])), max_size=12
)


@settings(deadline=None)
@given(page_size=st.integers(1, 3), prompts=prompts, num_evicted=st.integers(0, 6))
def test_hashes_computed_later_equal_those_kept(
    page_size: int, prompts: list[tuple[list[int], str | None]], num_evicted: int
) -> None:
    early, late = (RadixCache(page_size=page_size, capacity_tokens=200, record=record) for record in (True, False))
    for tokens, salt in prompts:
        for cache in (early, late):
            store(cache, tokens[: len(tokens) // page_size * page_size], PrefixNamespace(cache_salt=salt))
    for cache in (early, late):
        cache.evict(num_evicted)
    assert not any(node.digests for node in late.tree.walk()), "without events, hashes are computed on demand"
    assert list(late.block_hashes()) == list(early.block_hashes())
    assert {place: list(hashes) for place, hashes in late.held_blocks().items()} == {
        place: list(hashes) for place, hashes in early.held_blocks().items()
    }


def test_a_match_has_its_pages_as_an_array_of_its_own() -> None:
    cache = RadixCache(page_size=1, capacity_tokens=8)
    match = store(cache, [1, 2, 3])
    assert (match.pages, list(match.page_array)) == ((0, 1, 2), [0, 1, 2])
    match.page_array[0] = 7
    assert cache.match_prefix([1, 2, 3]).pages == (0, 1, 2)
    given = cache.allocate_array(2)
    assert (type(given), given.typecode, list(given)) == (array, "I", [3, 4])
    cache.insert([8, 9], given)
    given[0] = 7
    assert cache.match_prefix([8, 9]).pages == (3, 4)
    cache.check_integrity()
