"""The recorder is bounded, and a reader of its events always ends in the tree's state."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace, RadixCache, RadixNode, hash_pages
from scheduler_components.cache.block_hash import pack_tokens
from scheduler_components.cache.radix_tree import RadixTree
from scheduler_components.cache.recorder import MAX_EVENT_TOKENS, EventRecorder
from scheduler_components.events import ValidatedEvents
from scheduler_components.testing import EventLedger


def tree_with(tokens: list[int], page_size: int = 1) -> tuple[RadixTree, RadixNode]:
    tree = RadixTree(page_size, hashed=True)
    pages = array("I", range(len(tokens) // page_size))
    return tree, tree.append(tree.root, pack_tokens(tokens), pages, DEFAULT_NAMESPACE)


def replay(events: tuple[KVCacheEvent, ...]) -> set[int]:
    ledger = EventLedger()
    assert ledger.apply_all(events) == []
    return ledger.hashes()


def test_removals_in_a_row_are_one_event_and_order_is_kept() -> None:
    tree, node = tree_with([1, 2])
    recorder = EventRecorder(tree, max_pending_blocks=100)
    first, second = hash_pages([1, 2], 1)
    recorder.record_removed(node)
    recorder.record_removed(node)
    recorder.record_stored(node)
    recorder.record_removed(node)
    removed, stored, again = recorder.take_events()
    assert removed == BlockRemoved(block_hashes=(second, first, second, first))
    assert isinstance(stored, BlockStored)
    assert again == BlockRemoved(block_hashes=(second, first))


def test_removals_from_two_media_are_two_events() -> None:
    tree, node = tree_with([1])
    recorder = EventRecorder(tree, max_pending_blocks=100)
    hashes = hash_pages([1], 1)
    recorder.record_removed(node)
    recorder.record_removed(node, "CPU")
    recorder.record_stored(node, "CPU")
    recorder.record_removed(node)
    events = recorder.take_events()
    assert events[:2] == (BlockRemoved(block_hashes=hashes), BlockRemoved(block_hashes=hashes, medium="CPU"))
    assert isinstance(events[2], BlockStored)
    assert events[2].medium == "CPU"
    assert events[3] == BlockRemoved(block_hashes=hashes)


def test_a_clear_drops_the_events_before_it() -> None:
    tree, node = tree_with([1])
    recorder = EventRecorder(tree, max_pending_blocks=100)
    recorder.record_removed(node)
    recorder.record_cleared()
    recorder.record_cleared()
    assert recorder.take_events() == (AllBlocksCleared(),)
    assert recorder.take_events() == ()


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.soak_only), 7])
def test_a_very_long_run_becomes_several_events(page_size: int) -> None:
    num_pages = 2 * (MAX_EVENT_TOKENS // page_size) + 1
    tokens = [token % 1000 for token in range(num_pages * page_size)]
    tree, node = tree_with(tokens, page_size)
    recorder = EventRecorder(tree, max_pending_blocks=10**9)
    recorder.record_stored(node)
    stored = recorder.take_events()
    assert len(stored) == 3
    tokens_of_events: list[int] = []
    parent: int | None = None
    for event in stored:
        assert isinstance(event, BlockStored)
        assert len(event.token_ids) == len(event.block_hashes) * page_size <= MAX_EVENT_TOKENS
        assert event.parent_block_hash == parent
        parent = event.block_hashes[-1]
        tokens_of_events.extend(event.token_ids)
    assert tokens_of_events == tokens
    recorder.record_removed(node)
    assert replay((*stored, *recorder.take_events())) == set()


def test_a_page_longer_than_the_limit_is_one_event() -> None:
    page_size = MAX_EVENT_TOKENS + 1
    tree, node = tree_with([5] * page_size, page_size)
    recorder = EventRecorder(tree, max_pending_blocks=1)
    recorder.record_stored(node)
    (event,) = recorder.take_events()
    assert isinstance(event, BlockStored)
    assert len(event.token_ids) == page_size


@pytest.mark.parametrize("end", ["content", "nothing", "clear"])
def test_events_that_are_not_taken_collapse_into_the_present_content(end: str) -> None:
    cache = RadixCache(page_size=1, capacity_tokens=4, record=True)
    for token in range(50):
        cache.insert([token, token], cache.allocate(2))
    assert cache.num_event_collapses == 1
    if end == "nothing":
        cache.evict(4)
    elif end == "clear":
        cache.clear()
    events = cache.take_events()
    assert events[0] == AllBlocksCleared()
    assert len(events) == (3 if end == "content" else 1)
    assert replay(events) == set(cache.block_hashes())

    cache.insert([90], cache.allocate(1))
    assert replay((*events, *cache.take_events())) == set(cache.block_hashes())
    assert cache.num_event_collapses == 1


def test_a_collapsed_backlog_does_not_grow() -> None:
    tree, node = tree_with([5, 6, 7], 1)
    recorder = EventRecorder(tree, max_pending_blocks=2)
    for collapses in (1, 2):
        recorder.record_stored(node)
        tracemalloc.start()
        try:
            for _ in range(5_000):
                recorder.record_removed(node)
                recorder.record_stored(node)
            grown_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown_bytes < 100_000  # 5,000 events would be ten times as many
        assert replay(recorder.take_events()) == set(tree.block_hashes())
        assert recorder.num_collapses == collapses


def test_one_turnover_of_the_whole_pool_in_one_step_does_not_collapse() -> None:
    cache = RadixCache(page_size=1, capacity_tokens=4, record=True)
    cache.insert([1, 2, 3, 4], cache.allocate(4))
    cache.take_events()
    cache.insert([5, 6, 7, 8], cache.allocate(4))
    assert [type(event) for event in cache.take_events()] == [BlockRemoved, BlockStored]
    assert cache.num_event_collapses == 0


@pytest.mark.parametrize(
    ("namespace", "kind"),
    [
        (PrefixNamespace(lora_id=1, lora_name="a", cache_salt="b", extra_key="c", session_id="d"), ValidatedEvents),
        (PrefixNamespace(session_id=b"d"), tuple),  # type: ignore[arg-type]
        (PrefixNamespace(cache_salt=5), tuple),  # type: ignore[arg-type]
        (PrefixNamespace(lora_id=True), tuple),
    ],
)
def test_events_of_a_namespace_are_checked_when_they_are_recorded(namespace: PrefixNamespace, kind: type) -> None:
    """So a publisher checks values again only if a request gave values of unexpected types."""
    tree = RadixTree(1, hashed=True)
    node = tree.append(tree.root, pack_tokens([1, 2]), array("I", range(2)), namespace)
    recorder = EventRecorder(tree, max_pending_blocks=100)
    recorder.record_stored(node)
    assert type(recorder.take_events()) is kind
    recorder.record_cleared()
    assert type(recorder.take_events()) is ValidatedEvents
