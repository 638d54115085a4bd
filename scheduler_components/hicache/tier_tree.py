"""TierTree: the radix tree with device, host and storage tiers on its nodes. It moves no bytes and waits for nobody.

Three rules keep it simple, and ``check`` checks them:

- What is on the device is closed upwards: the parent of a node on the device is there too. So is what is on the host,
  and what is in storage. A prefix on a tier is usable as far as it goes.
- Every node is on the device or on the host; one that leaves both leaves the tree.
- A node is evicted from the host only when it is on the host alone, and so a leaf.

Every choice follows from the order of calls. Room on the host is counted here, in a ledger that is the same on all
ranks, and not asked of the host's pool, which is each rank's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.cache.eviction_order import EvictionOrder
from scheduler_components.cache.namespace import PrefixNamespace
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.cache.radix_tree import Descent, RadixNode, RadixTree
from scheduler_components.cache.recorder import EventRecorder, NullEventRecorder
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.hicache.tier_orders import HostEvictionOrder
from scheduler_components.hicache.tiers import TierMembership, media_of
from scheduler_components.tier_ports import HostPages

__all__ = ["TierTree", "shares_of"]


class TierTree:
    """The tree, its pools, and the order in which pages leave each tier.

    Args:
        page_size: tokens a page.
        num_device_pages: of the device's pool.
        host: the host's pages.
        num_host_pages: pages that every rank's host has: the least of all ranks'.
        record: keep events.
    """

    __slots__ = (
        "device",
        "device_order",
        "host",
        "host_order",
        "membership",
        "num_dropped_pages",
        "num_host_pages",
        "num_host_pages_used",
        "recorder",
        "tree",
    )

    def __init__(
        self, *, page_size: int, num_device_pages: int, host: HostPages, num_host_pages: int, record: bool
    ) -> None:
        self.tree = RadixTree(page_size, hashed=True)  # storage keys and the digest are made from hashes
        self.device = PagePool(num_device_pages)
        self.device_order = EvictionOrder()
        self.host = host
        self.host_order = HostEvictionOrder()
        self.num_host_pages = num_host_pages
        self.num_host_pages_used = 0
        self.num_dropped_pages = 0
        # Two turnovers of both pools: beyond that, telling the present content is shorter than the backlog.
        self.recorder: EventRecorder | NullEventRecorder = (
            EventRecorder(self.tree, 2 * (num_device_pages + num_host_pages), media_of)
            if record
            else NullEventRecorder()
        )
        self.membership = TierMembership(self.recorder)

    # --- paths ---

    def path_to(self, packed: bytes, seed: bytes) -> list[RadixNode]:
        """Return the nodes that hold the cached prefix of packed tokens, on any tier, cut to end where it does.

        The path becomes the most recently used on both tiers.
        """
        path = self.cut_at(self.tree.find(packed, seed))
        self.touch(path)
        return path

    def cut_at(self, descent: Descent) -> list[RadixNode]:
        """Return the path of a descent, its last node ending where the match does; ``touch`` it next."""
        path = descent.path
        if path and descent.cut < path[-1].num_pages:
            path[-1] = self._split(path[-1], descent.cut)
        return path

    def touch(self, path: list[RadixNode]) -> None:
        """Make a path the most recently used on the tiers that it is on."""
        num_on_device = self.num_on_device(path)
        self.device_order.touch(reversed(path[:num_on_device]))
        self.host_order.touch(reversed(path[num_on_device:]))

    @staticmethod
    def num_on_device(path: list[RadixNode]) -> int:
        """Return how many nodes of a path, from the root on, are on the device."""
        return next((at for at, node in enumerate(path) if not node.pages), len(path))

    def run_up_from(self, end: RadixNode, num_pages: int) -> list[RadixNode]:
        """Return the nodes that hold the last ``num_pages`` pages of the prefix that ends in ``end``, topmost first.

        An operation keeps its end and its length, for other requests may split the nodes in between.
        """
        run: list[RadixNode] = []
        node = end
        while num_pages > 0:
            run.append(node)
            num_pages -= node.num_pages
            assert node.parent is not None, "an operation's pages reach above the root"
            node = node.parent
        assert num_pages == 0, "a node was split off an operation's pages at neither of its ends"
        return run[::-1]

    def cut_run(self, run: list[RadixNode], num_pages: int) -> list[RadixNode]:
        """Return the nodes that hold the first ``num_pages`` pages of consecutive nodes, one cut; ``touch`` next."""
        kept: list[RadixNode] = []
        for node in run:
            if num_pages <= 0:
                break
            kept.append(node if node.num_pages <= num_pages else self._split(node, num_pages))
            num_pages -= kept[-1].num_pages
        return kept

    def is_on_host(self, node: RadixNode) -> bool:
        """True where a child of ``node`` may be on the host: the node itself is, or it is the root."""
        return node is self.tree.root or bool(node.host_pages)

    def is_stored(self, node: RadixNode) -> bool:
        """True where a child of ``node`` may count as stored."""
        return node is self.tree.root or node.is_stored

    # --- device ---

    @property
    def num_device_pages_held(self) -> int:
        """Device pages that requests and operations hold: neither free nor evictable."""
        return self.device.num_pages - self.device.num_free - self.device_order.num_pages

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out device pages, evicting the least recently used ones as needed.

        Raises:
            OutOfPagesError: free and evictable pages together are fewer; nothing was evicted.
        """
        lacking = num_pages - self.device.num_free
        if lacking > self.device_order.num_pages:
            raise OutOfPagesError(num_pages, self.device.num_free + self.device_order.num_pages)
        self.evict_from_device(lacking)
        return self.device.allocate(num_pages)

    def evict_from_device(self, num_pages: int) -> int:
        """Free the least recently used unlocked device pages; returns how many.

        What is on the host too stays there; what is not is dropped.
        """
        goal = min(num_pages, self.device_order.num_pages)
        freed = 0
        while freed < goal:
            leaf = self.device_order.pop_oldest()
            if leaf.num_pages > goal - freed:
                self.device_order.put_oldest(self._split(leaf, leaf.num_pages - (goal - freed)))
            self.device.from_cache(self.membership.take_from_device(leaf))
            if leaf.host_pages:
                self.host_order.touch((leaf,))
            else:
                self.num_dropped_pages += leaf.num_pages
                self._remove(leaf)
            freed += leaf.num_pages
        return freed

    def put_on_device(self, node: RadixNode, pages: array[int]) -> None:
        """Give pages that a request or an operation holds to a node that is on the host alone; ``touch`` it next."""
        self.device.to_cache(pages)
        self.host_order.discard(node)
        self.membership.place_on_device(node, pages)
        self.device_order.add(node)

    def append_on_device(
        self, parent: RadixNode, packed: bytes, pages: array[int], namespace: PrefixNamespace
    ) -> RadixNode:
        """Hang a computed run below ``parent``; ``touch`` its path next."""
        self.device.to_cache(pages)
        leaf = self.tree.append(parent, packed, array("I"), namespace)
        self.membership.place_on_device(leaf, pages)
        self.device_order.add(leaf)
        return leaf

    # --- host ---

    def make_host_room(self, num_pages: int) -> bool:
        """Evict from the host what was used least recently until ``num_pages`` are free; False if that cannot be.

        Evicts nothing then.
        """
        lacking = num_pages - (self.num_host_pages - self.num_host_pages_used)
        if lacking > self.host_order.num_pages:
            return False
        while lacking > 0:
            leaf = self.host_order.oldest()
            if leaf.num_pages > lacking:
                upper = self._split(leaf, leaf.num_pages - lacking)
                self.host_order.discard(upper)
                self.host_order.put_oldest(upper)
            self.host_order.discard(leaf)
            self.release_host(self.membership.take_from_host(leaf))
            self._remove(leaf)
            lacking -= leaf.num_pages
        return True

    def release_host(self, pages: array[int] | tuple[int, ...]) -> None:
        """Give committed host pages back."""
        self.host.release(pages)
        self.num_host_pages_used -= len(pages)

    def append_on_host(
        self, parent: RadixNode, packed: bytes, pages: array[int], namespace: PrefixNamespace
    ) -> RadixNode:
        """Hang a run that came from storage below ``parent``; ``touch`` its path next."""
        leaf = self.tree.append(parent, packed, array("I"), namespace)
        self.membership.place_on_host(leaf, pages)
        self.host_order.touch((leaf,))
        return leaf

    # --- whole ---

    def clear(self) -> None:
        """Forget every prefix; nothing may be locked or under way."""
        for node in self.tree.walk():
            self.device.from_cache(node.pages)
            self.release_host(node.host_pages)
        self.tree.clear()
        self.device_order.clear()
        self.host_order.clear()
        self.membership.clear()

    def nodes(self) -> Iterator[RadixNode]:
        """Every node, parents before children."""
        return self.tree.walk()

    def check(self) -> None:
        """Check tree, pools, orders and tiers against each other. Walks everything.

        Raises:
            CacheIntegrityError: with the arithmetic that failed.
        """
        self.tree.check()
        nodes = list(self.tree.walk())
        self.device.check([page for node in nodes for page in node.pages])
        self.host.check_integrity([page for node in nodes for page in node.host_pages])
        self.host_order.check(nodes)
        evictable = {node for node in nodes if node.pages and not node.lock_count}
        num_pages = sum(node.num_pages for node in evictable)
        if evictable != set(self.device_order) or num_pages != self.device_order.num_pages:
            raise CacheIntegrityError(
                f"{len(evictable)} unlocked nodes on the device with {num_pages} pages, "
                f"{len(set(self.device_order))} with {self.device_order.num_pages} in its order"
            )
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if node.pages and parent is not self.tree.root and not parent.pages:
                raise CacheIntegrityError(f"{node} is on the device, its parent is not")
            if node.host_pages and not self.is_on_host(parent):
                raise CacheIntegrityError(f"{node} is on the host, its parent is not")
            if node.is_stored and not self.is_stored(parent):
                raise CacheIntegrityError(f"{node} is stored, its parent is not")

    def last_digest(self, node: RadixNode, seed: bytes) -> bytes:
        """Return the digest that the pages after ``node`` chain from."""
        return seed if node is self.tree.root else bytes(node.digests[-DIGEST_BYTES:])

    def _split(self, node: RadixNode, cut: int) -> RadixNode:
        """Cut a node after ``cut`` pages; returns the upper part. Both parts are in the host's order if it was."""
        was_in_host_order = self.host_order.discard(node)
        upper = self.tree.split(node, cut)
        if was_in_host_order:
            self.host_order.touch((node, upper))
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        self.membership.forget_storage(leaf)
        self.tree.remove(leaf)


def shares_of(run: list[RadixNode], pages: tuple[int, ...] | list[int]) -> list[tuple[RadixNode, list[int]]]:
    """Give each node of a run its part of an operation's pages."""
    shares, start = [], 0
    for node in run:
        shares.append((node, list(pages[start : start + node.num_pages])))
        start += node.num_pages
    return shares
