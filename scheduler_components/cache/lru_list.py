"""LruList: the order in which the nodes of one tier are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.errors import CacheIntegrityError

__all__ = ["LruList"]


def _device_locks(node: RadixNode) -> int:
    return node.lock_count


class LruList:
    """The nodes of one tier that may be evicted from it, least recently used first. Each tier has its own list.

    A path is touched from its deepest node up, so descendants always precede their ancestors and the oldest node is a
    leaf. ``lock`` and ``unlock`` count the device's locks. A lower tier counts its own, and removes nodes (``discard``)
    and adds them (``touch``).

    Attributes:
        num_pages: pages of all nodes in the list.
    """

    __slots__ = ("_nodes", "_uses", "num_pages")

    def __init__(self) -> None:
        self._nodes: OrderedDict[RadixNode, int] = OrderedDict()  # node -> number of its last use
        self._uses = 0
        self.num_pages = 0

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._nodes

    def touch(self, path_up: Iterable[RadixNode]) -> None:
        """Make the unlocked nodes of a path the most recently used. Add nodes that are not in the list.

        Args:
            path_up: from the deepest node up.
        """
        nodes = self._nodes
        self._uses += 1
        for node in path_up:
            if not node.lock_count:
                if node in nodes:
                    nodes.move_to_end(node)
                else:
                    self.num_pages += node.num_pages
                nodes[node] = self._uses

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Add the upper part of a node that was cut in two, as just used, if the lower part is in the list."""
        if lower in self._nodes:
            self._uses += 1
            self._nodes[upper] = self._uses  # its pages are already counted

    def were_used_together(self, upper: RadixNode, lower: RadixNode) -> bool:
        """Return True if the same use put a node and its child here, or if neither is here."""
        return self._nodes.get(upper) == self._nodes.get(lower)

    def joined(self, upper: RadixNode) -> None:
        """Remove a node whose run moves to its only child. Its pages stay counted, because the child is here, too."""
        if upper in self._nodes:
            del self._nodes[upper]

    def lock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one more holder on every node of a path."""
        for node in path_up:
            if not node.lock_count:
                del self._nodes[node]
                self.num_pages -= node.num_pages
            node.lock_count += 1

    def unlock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one holder less on every node of a path. Unlocked nodes become the most recently used."""
        self._uses += 1
        for node in path_up:
            node.lock_count -= 1
            if not node.lock_count:
                self._nodes[node] = self._uses
                self.num_pages += node.num_pages

    def pop_oldest(self) -> RadixNode:
        """Remove and return the least recently used node, which is a leaf."""
        node, _ = self._nodes.popitem(last=False)
        self.num_pages -= node.num_pages
        return node

    def put_oldest(self, node: RadixNode) -> None:
        """Add the remaining part of the node that ``pop_oldest`` returned, as the next one to evict."""
        self._uses += 1
        self._nodes[node] = self._uses
        self._nodes.move_to_end(node, last=False)
        self.num_pages += node.num_pages

    def discard(self, node: RadixNode) -> None:
        """Remove a node, if it is in the list."""
        if node in self._nodes:
            del self._nodes[node]
            self.num_pages -= node.num_pages

    def clear(self) -> None:
        """Remove every node. None may be locked."""
        self._nodes.clear()
        self.num_pages = 0

    def check(self, evictable: Iterable[RadixNode], locks_of: Callable[[RadixNode], int] = _device_locks) -> None:
        """Check the order, and the locks of its nodes.

        Args:
            evictable: the nodes that the tier could evict if no request held them.
            locks_of: returns the holders of a node on this tier; by default the device's.

        Raises:
            CacheIntegrityError: with the count or the node that is wrong.
        """
        on_tier = set(evictable)
        unlocked = {node for node in on_tier if not locks_of(node)}
        if unlocked != self._nodes.keys():
            raise CacheIntegrityError(f"{len(unlocked)} unlocked nodes, {len(self._nodes)} in the eviction order")
        num_pages = sum(node.num_pages for node in unlocked)
        if num_pages != self.num_pages:
            raise CacheIntegrityError(f"unlocked nodes hold {num_pages} pages, {self.num_pages} are counted evictable")
        seen: set[RadixNode] = set()
        for node in self._nodes:
            if not seen.issuperset(on_tier.intersection(node.children.values())):
                raise CacheIntegrityError(f"{node} precedes one of its children in the eviction order")
            seen.add(node)
        for node in on_tier:
            locked_below = sum(map(locks_of, node.children.values()))
            if locks_of(node) < locked_below:
                raise CacheIntegrityError(f"{node}: {locks_of(node)} locks, its children {locked_below}")
