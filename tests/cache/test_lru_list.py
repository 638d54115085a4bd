"""The eviction order evicts a path from its end, counts locks, and its check detects each kind of damage."""

from __future__ import annotations

from array import array

import pytest

from scheduler_components import CacheIntegrityError
from scheduler_components.cache import DEFAULT_NAMESPACE, RadixNode
from scheduler_components.cache.block_hash import pack_tokens
from scheduler_components.cache.lru_list import LruList
from scheduler_components.cache.radix_tree import RadixTree


def parent_and_child() -> tuple[RadixNode, RadixNode]:
    tree = RadixTree(1, hashed=False)
    parent = tree.append(tree.root, pack_tokens([1, 2]), array("I", [0, 1]), DEFAULT_NAMESPACE)
    return parent, tree.append(parent, pack_tokens([3]), array("I", [2]), DEFAULT_NAMESPACE)


def test_a_path_is_evicted_from_its_end() -> None:
    parent, child = parent_and_child()
    order = LruList()
    order.touch([parent])
    order.touch([child])
    order.touch([child, parent])
    order.check([parent, child])
    assert order.num_pages == 3
    assert [order.pop_oldest(), order.pop_oldest()] == [child, parent]
    assert order.num_pages == 0


def test_a_parent_before_its_child_is_reported() -> None:
    parent, child = parent_and_child()
    order = LruList()
    order.touch([parent])
    order.touch([child])
    with pytest.raises(CacheIntegrityError, match="precedes one of its children"):
        order.check([parent, child])


def test_a_missing_node_is_reported() -> None:
    parent, child = parent_and_child()
    order = LruList()
    order.touch([child])
    with pytest.raises(CacheIntegrityError, match="2 unlocked nodes, 1 in the eviction order"):
        order.check([parent, child])


def test_a_wrong_count_of_pages_is_reported() -> None:
    parent, child = parent_and_child()
    order = LruList()
    order.touch([child])
    order.touch([parent])
    parent.num_pages += 1
    with pytest.raises(CacheIntegrityError, match="hold 4 pages, 3 are counted evictable"):
        order.check([parent, child])


def test_locks_are_counted_along_the_path() -> None:
    parent, child = parent_and_child()
    order = LruList()
    order.touch([child])
    order.touch([parent])
    order.lock([child, parent])
    order.lock([parent])
    assert order.num_pages == 0
    order.unlock([child, parent])
    assert (list(order), order.num_pages) == ([child], 1)
    order.unlock([parent])
    assert (list(order), order.num_pages) == ([child, parent], 3)
    order.check([parent, child])


def test_a_parent_with_fewer_locks_than_its_children_is_reported() -> None:
    parent, child = parent_and_child()
    order = LruList()
    order.touch([child, parent])
    order.lock([child])
    with pytest.raises(CacheIntegrityError, match="precedes one of its children"):
        order.check([parent, child])
    order.lock([child, parent])
    with pytest.raises(CacheIntegrityError, match="1 locks, its children 2"):
        order.check([parent, child])
