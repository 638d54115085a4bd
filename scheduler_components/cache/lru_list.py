"""The order in which the nodes of one tier are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.errors import CacheIntegrityError

__all__ = ["LruList"]


def _device_locks(node: RadixNode) -> int:
    return node.lock_count


class LruList:
    """The nodes of one tier that may be evicted from it, least recently used first. Each tier has one of its own.

    A path is touched from its deepest node up, so descendants always stand before their ancestors and the oldest node
    is a leaf. ``lock`` and ``unlock`` count the device's locks; a lower tier counts its own, and takes nodes out
    (``discard``) and in (``touch``).
    """

    __slots__ = ("_nodes", "_uses", "num_pages")

    def __init__(self) -> None:
        self._nodes: OrderedDict[RadixNode, int] = OrderedDict()  # node -> the use that put it where it stands
        self._uses = 0
        self.num_pages = 0  # pages of all nodes in the order

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._nodes

    def touch(self, path_up: Iterable[RadixNode]) -> None:
        """Make the unlocked nodes of a path the most recently used; nodes that are new here come in.

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
        """A node was cut in two and is now ``lower``. If it was here, so is the upper part, as just used."""
        if lower in self._nodes:
            self._uses += 1
            self._nodes[upper] = self._uses  # its pages are counted already

    def were_used_together(self, upper: RadixNode, lower: RadixNode) -> bool:
        """Say whether no other node stands between a node and its child: one use put both here, or neither is here."""
        return self._nodes.get(upper) == self._nodes.get(lower)

    def joined(self, upper: RadixNode) -> None:
        """A node's run is about to go to its only child, of which the same is true here: its pages stay counted."""
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
        """Count one holder less on every node of a path. What nobody holds any more becomes the most recently used."""
        self._uses += 1
        for node in path_up:
            node.lock_count -= 1
            if not node.lock_count:
                self._nodes[node] = self._uses
                self.num_pages += node.num_pages

    def pop_oldest(self) -> RadixNode:
        """Remove and return the least recently used node: a leaf."""
        node, _ = self._nodes.popitem(last=False)
        self.num_pages -= node.num_pages
        return node

    def put_oldest(self, node: RadixNode) -> None:
        """Take in what is left of the node that ``pop_oldest`` returned, as the next one to go."""
        self._uses += 1
        self._nodes[node] = self._uses
        self._nodes.move_to_end(node, last=False)
        self.num_pages += node.num_pages

    def discard(self, node: RadixNode) -> None:
        """Take a node out of the order, if it is there."""
        if node in self._nodes:
            del self._nodes[node]
            self.num_pages -= node.num_pages

    def clear(self) -> None:
        """Forget every node; none may be locked."""
        self._nodes.clear()
        self.num_pages = 0

    def check(self, evictable: Iterable[RadixNode], locks_of: Callable[[RadixNode], int] = _device_locks) -> None:
        """Check the order, and the locks of its nodes.

        Args:
            evictable: the nodes that the tier could evict if nobody held them.
            locks_of: holders of a node on this tier; the device's by default.

        Raises:
            CacheIntegrityError: with the count or the node that does not fit.
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
                raise CacheIntegrityError(f"{node} stands before a child of its own in the eviction order")
            seen.add(node)
        for node in on_tier:
            locked_below = sum(map(locks_of, node.children.values()))
            if locks_of(node) < locked_below:
                raise CacheIntegrityError(f"{node}: {locks_of(node)} locks, its children {locked_below}")
