"""A split of a run keeps the locks, the place in the eviction order and the count of pages."""

from __future__ import annotations

from array import array

from scheduler_components.cache import DEFAULT_NAMESPACE
from scheduler_components.cache.block_hash import pack_tokens
from scheduler_components.cache.lru_list import LruList
from scheduler_components.cache.radix_tree import RadixTree


def test_a_split_keeps_locks_or_place_and_the_count_of_pages() -> None:
    tree = RadixTree(1, hashed=False)
    run = tree.append(tree.root, pack_tokens([1, 2, 3]), array("I", [0, 1, 2]), DEFAULT_NAMESPACE)
    order = LruList()
    order.touch([run])
    upper = tree.split(run, 1)
    order.split(upper, run)
    order.check([run, upper])
    assert (list(order), order.num_pages) == ([run, upper], 3)
    order.lock([run, upper])
    middle = tree.split(run, 1)
    order.split(middle, run)
    assert [node.lock_count for node in (upper, middle, run)] == [1, 1, 1]
    order.check([run, middle, upper])
