"""The tiers of a page, and who is on which: every transition comes through here, to be digested and told."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import IntEnum

from scheduler_components.cache import (
    DIGEST_BYTES,
    Descent,
    EventRecorder,
    EvictionOrder,
    NullEventRecorder,
    PagePool,
    PrefixNamespace,
    RadixNode,
    RadixTree,
    block_hashes_of,
)
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.ports import HostPages

__all__ = [
    "MEDIUM_OF",
    "Tier",
    "TierMembership",
    "media_of",
    "tiers_of",
    "HostEvictionOrder",
    "TierTree",
    "shares_of",
]


class Tier(IntEnum):
    """Where a page lies; nearest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


MEDIUM_OF: dict[Tier, str | None] = {Tier.DEVICE: None, Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
"""The medium of each tier's events; None is the device, as every consumer reads it."""

# Odd, so that multiplying by one loses nothing: the same pages on another tier give another digest.
_FACTORS = {Tier.DEVICE: 0x9E3779B97F4A7C15, Tier.HOST: 0xC2B2AE3D27D4EB4F, Tier.STORAGE: 0x165667B19E3779F9}
_MASK = 2**64 - 1


def tiers_of(node: RadixNode) -> tuple[Tier, ...]:
    """Return the tiers that a node of the tree is on."""
    on = (Tier.DEVICE, bool(node.pages)), (Tier.HOST, bool(node.host_pages)), (Tier.STORAGE, node.is_stored)
    return tuple(tier for tier, is_on in on if is_on)


def media_of(node: RadixNode) -> tuple[str | None, ...]:
    """Return the media that a node of the tree is on, as its events name them."""
    return tuple(MEDIUM_OF[tier] for tier in tiers_of(node))


class TierMembership:
    """Which pages are on which tier, as one running digest and as events.

    The digest is a sum over (page, tier), so it costs what a transition moves and not what the cache holds, and it
    does not depend on page indices, which are each rank's own.

    Args:
        recorder: takes the events.
    """

    __slots__ = ("_recorder", "digest", "num_pages")

    def __init__(self, recorder: EventRecorder | NullEventRecorder) -> None:
        self._recorder = recorder
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)

    def place_on_device(self, node: RadixNode, pages: array[int]) -> None:
        """The device holds the node's pages now."""
        node.pages = pages
        self._enter(node, Tier.DEVICE)

    def place_on_host(self, node: RadixNode, pages: array[int]) -> None:
        """The host holds the node's pages now."""
        node.host_pages = pages
        self._enter(node, Tier.HOST)

    def place_in_storage(self, node: RadixNode) -> None:
        """Storage holds the node's pages now."""
        node.is_stored = True
        self._enter(node, Tier.STORAGE)

    def take_from_device(self, node: RadixNode) -> array[int]:
        """The device no longer holds the node; returns the pages that it was on."""
        pages, node.pages = node.pages, array("I")
        self._leave(node, Tier.DEVICE)
        return pages

    def take_from_host(self, node: RadixNode) -> array[int]:
        """The host no longer holds the node; returns the pages that it was on."""
        pages, node.host_pages = node.host_pages, array("I")
        self._leave(node, Tier.HOST)
        return pages

    def forget_storage(self, node: RadixNode) -> None:
        """Whether storage holds the node is no longer known; nothing when it never was."""
        if node.is_stored:
            node.is_stored = False
            self._leave(node, Tier.STORAGE)

    def clear(self) -> None:
        """Every page has left every tier."""
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)
        self._recorder.cleared()

    def _enter(self, node: RadixNode, tier: Tier) -> None:
        self.digest = (self.digest + _weight(node, tier)) & _MASK
        self.num_pages[tier] += node.num_pages
        self._recorder.stored(node, MEDIUM_OF[tier])

    def _leave(self, node: RadixNode, tier: Tier) -> None:
        self.digest = (self.digest - _weight(node, tier)) & _MASK
        self.num_pages[tier] -= node.num_pages
        self._recorder.removed(node, MEDIUM_OF[tier])


def _weight(node: RadixNode, tier: Tier) -> int:
    return sum(block_hashes_of(node.digests)) * _FACTORS[tier]


# HostEvictionOrder: which node leaves the host next. The device's order is the radix cache's own ``EvictionOrder``.


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


# TierTree: the radix tree with device, host and storage tiers on its nodes. It moves no bytes and waits for nobody.
#
# Three rules keep it simple, and ``check`` checks them:
#
# - What is on the device is closed upwards: the parent of a node on the device is there too. So is what is on the
# host,
#   and what is in storage. A prefix on a tier is usable as far as it goes.
# - Every node is on the device or on the host; one that leaves both leaves the tree.
# - A node is evicted from the host only when it is on the host alone, and so a leaf.
#
# Every choice follows from the order of calls. Room on the host is counted here, in a ledger that is the same on all
# ranks, and not asked of the host's pool, which is each rank's own.


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
