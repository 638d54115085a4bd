"""HostEvictionOrder: which node leaves the host next. The device's order is the radix cache's own ``EvictionOrder``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.errors import CacheIntegrityError

__all__ = ["HostEvictionOrder"]


class HostEvictionOrder:
    """The nodes that are on the host alone and that no operation holds, oldest use first.

    As in ``EvictionOrder`` a path is touched from its deepest node up, so the oldest node is a leaf, and time is the
    order of calls. A node that the device holds too is not here: its host copy is what saves it when the device
    evicts it.
    """

    __slots__ = ("_nodes", "num_pages")

    def __init__(self) -> None:
        self._nodes: OrderedDict[RadixNode, None] = OrderedDict()
        self.num_pages = 0

    def touch(self, path_up: Iterable[RadixNode]) -> None:
        """Make the nodes of a path that belong here the most recently used; take in those that now do."""
        for node in path_up:
            if node.pages or node.host_lock_count:
                continue
            if node not in self._nodes:
                self._nodes[node] = None
                self.num_pages += node.num_pages
            self._nodes.move_to_end(node)

    def discard(self, node: RadixNode) -> bool:
        """Take a node out, before it is split, locked, loaded or removed; False when it was not here."""
        if node not in self._nodes:
            return False
        del self._nodes[node]
        self.num_pages -= node.num_pages
        return True

    def oldest(self) -> RadixNode:
        """Return the least recently used node, a leaf, and leave it here."""
        return next(iter(self._nodes))

    def put_oldest(self, node: RadixNode) -> None:
        """Make a node the next to go: what is left of the oldest one."""
        self._nodes[node] = None
        self._nodes.move_to_end(node, last=False)
        self.num_pages += node.num_pages

    def lock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one more holder of the host pages of a path."""
        for node in path_up:
            self.discard(node)
            node.host_lock_count += 1

    def unlock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one holder less; what nobody holds any more becomes the most recently used."""
        for node in path_up:
            node.host_lock_count -= 1
            self.touch((node,))

    def clear(self) -> None:
        """Forget every node."""
        self._nodes.clear()
        self.num_pages = 0

    def check(self, nodes: Iterable[RadixNode]) -> None:
        """Check the order against all nodes of the tree.

        Raises:
            CacheIntegrityError: with the count or the node that does not fit.
        """
        expected = {node for node in nodes if not node.pages and not node.host_lock_count}
        if expected != self._nodes.keys():
            raise CacheIntegrityError(f"{len(expected)} nodes on the host alone, {len(self._nodes)} in its order")
        num_pages = sum(node.num_pages for node in expected)
        if num_pages != self.num_pages:
            raise CacheIntegrityError(f"they hold {num_pages} pages, {self.num_pages} are counted")
        seen: set[RadixNode] = set()
        for node in self._nodes:
            if not seen.issuperset(node.children.values()):
                raise CacheIntegrityError(f"{node} stands before a child of its own in the host's order")
            seen.add(node)
