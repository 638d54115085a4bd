"""Which node is evicted next: least recently used first, descendants before their ancestors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.errors import CacheIntegrityError

__all__ = ["EvictionOrder"]


class EvictionOrder:
    """The unlocked nodes, oldest use first.

    A path is touched from its deepest node up, so descendants always stand before their ancestors and the oldest node
    is a leaf: eviction never searches. Time is the order of calls, so ranks that make the same calls evict the same.
    """

    __slots__ = ("_nodes", "num_pages")

    def __init__(self) -> None:
        self._nodes: OrderedDict[RadixNode, None] = OrderedDict()
        self.num_pages = 0  # pages of all unlocked nodes

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def add(self, node: RadixNode) -> None:
        """Take in a new leaf; ``touch`` its path next."""
        self._nodes[node] = None
        self.num_pages += node.num_pages

    def touch(self, path_up: Iterable[RadixNode]) -> None:
        """Make a path the most recently used; the upper part of a node just split comes in here.

        Args:
            path_up: from the deepest node to the child of the root.
        """
        nodes = self._nodes
        for node in path_up:
            if not node.lock_count:
                nodes[node] = None
                nodes.move_to_end(node)

    def lock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one more holder on every node of a path."""
        for node in path_up:
            if not node.lock_count:
                del self._nodes[node]
                self.num_pages -= node.num_pages
            node.lock_count += 1

    def unlock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one holder less on every node of a path; what nobody holds any more becomes the most recently used."""
        for node in path_up:
            node.lock_count -= 1
            if not node.lock_count:
                self._nodes[node] = None
                self.num_pages += node.num_pages

    def pop_oldest(self) -> RadixNode:
        """Remove and return the least recently used node: a leaf."""
        node, _ = self._nodes.popitem(last=False)
        self.num_pages -= node.num_pages
        return node

    def put_oldest(self, node: RadixNode) -> None:
        """Take in what is left of the node that ``pop_oldest`` returned."""
        self.add(node)
        self._nodes.move_to_end(node, last=False)

    def clear(self) -> None:
        """Forget every node."""
        self._nodes.clear()
        self.num_pages = 0

    def check(self, nodes: Iterable[RadixNode]) -> None:
        """Check the order against all nodes of the tree.

        Raises:
            CacheIntegrityError: with the count or the node that does not fit.
        """
        unlocked = {node for node in nodes if not node.lock_count}
        if unlocked != self._nodes.keys():
            raise CacheIntegrityError(f"{len(unlocked)} unlocked nodes, {len(self._nodes)} in the eviction order")
        num_pages = sum(node.num_pages for node in unlocked)
        if num_pages != self.num_pages:
            raise CacheIntegrityError(f"unlocked nodes hold {num_pages} pages, {self.num_pages} are counted evictable")
        seen: set[RadixNode] = set()
        for node in self._nodes:
            if not seen.issuperset(node.children.values()):
                raise CacheIntegrityError(f"{node} stands before a child of its own in the eviction order")
            seen.add(node)
