"""The radix tree over three tiers: the tiers of each node, and the order in which nodes are evicted from the host.

The device tier is a ``RadixCache``, and ``TierTree`` is its ``LowerTiers``. This module moves no bytes and does no I/O.

Three rules hold, and ``TierTree.check`` verifies them:

- The parent of a node on the device is on the device. The same holds for the host and for storage. Therefore every
  prefix on a tier is usable.
- Every node is on the device or on the host. A node that leaves both tiers leaves the tree.
- A node is evicted from the host only if it is on the host only, and is then a leaf. The host copy of a device node
  stays, because it preserves the node when the device evicts it.

Every choice depends only on the order of calls. This module counts the free host pages itself, identically on all
ranks; it does not ask the host pool, whose state differs between ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from scheduler_components.cache import PrefixNamespace, RadixCache, RadixNode
from scheduler_components.cache.block_hash import DIGEST_BYTES, block_hashes_of
from scheduler_components.cache.lru_list import LruList
from scheduler_components.cache.radix_tree import RadixTree
from scheduler_components.cache.recorder import EventRecorder
from scheduler_components.errors import CacheIntegrityError
from scheduler_components.events import TIER_MEDIUM, Tier
from scheduler_components.ports import HostPages, PageHook

__all__ = ["HostTier", "TierMembership", "TierTree", "pages_per_node"]

# Odd, so that the multiplication is invertible; different per tier, so that a page on another tier changes the digest.
_FACTORS = {Tier.DEVICE: 0x9E3779B97F4A7C15, Tier.HOST: 0xC2B2AE3D27D4EB4F, Tier.STORAGE: 0x165667B19E3779F9}
_MASK = 2**64 - 1


class TierMembership:
    """The tiers of each node, summarized in a running digest and recorded as events.

    The digest is a sum over (page, tier). Updating it costs time in proportion to the pages that move, and it does not
    depend on page indices, which differ between ranks.

    Args:
        recorder: records the events of host and storage; the radix cache records those of the device.

    Attributes:
        host_pages: the host page indices of each node on the host, one per page.
        stored: the nodes of which storage holds every page, as far as is known.
        digest: equal on ranks that hold the same pages on the same tiers.
        num_pages: number of pages on each tier.
    """

    __slots__ = ("_recorder", "digest", "host_pages", "num_pages", "stored")

    def __init__(self, recorder: EventRecorder | None) -> None:
        self._recorder = recorder
        self.host_pages: dict[RadixNode, array[int]] = {}
        self.stored: set[RadixNode] = set()
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)

    def tiers_of(self, node: RadixNode) -> tuple[Tier, ...]:
        on = (Tier.DEVICE, bool(node.pages)), (Tier.HOST, node in self.host_pages), (Tier.STORAGE, node in self.stored)
        return tuple(tier for tier, is_on in on if is_on)

    def enter_device(self, node: RadixNode) -> None:
        """Record that the device holds the node."""
        self._count(node, Tier.DEVICE, 1)

    def leave_device(self, node: RadixNode) -> None:
        """Record that the device no longer holds the node."""
        self._count(node, Tier.DEVICE, -1)

    def place_on_host(self, node: RadixNode, pages: array[int]) -> None:
        """Record that the host holds the node in ``pages``."""
        self.host_pages[node] = pages
        self._count(node, Tier.HOST, 1)
        if self._recorder is not None:
            self._recorder.record_stored(node, TIER_MEDIUM[Tier.HOST])

    def remove_from_host(self, node: RadixNode) -> array[int]:
        """Record that the host no longer holds the node; return its host pages."""
        self._count(node, Tier.HOST, -1)
        if self._recorder is not None:
            self._recorder.record_removed(node, TIER_MEDIUM[Tier.HOST])
        return self.host_pages.pop(node)

    def place_in_storage(self, node: RadixNode) -> None:
        """Record that storage holds the node."""
        self.stored.add(node)
        self._count(node, Tier.STORAGE, 1)
        if self._recorder is not None:
            self._recorder.record_stored(node, TIER_MEDIUM[Tier.STORAGE])

    def clear_storage_index(self, node: RadixNode) -> None:
        """Count the node as not stored. No effect if it was not."""
        if node in self.stored:
            self.stored.remove(node)
            self._count(node, Tier.STORAGE, -1)
            if self._recorder is not None:
                self._recorder.record_removed(node, TIER_MEDIUM[Tier.STORAGE])

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Handle the split of a node into ``upper`` and ``lower``: both are on the tiers of the node."""
        pages = self.host_pages.get(lower)
        if pages is not None:
            self.host_pages[upper], self.host_pages[lower] = pages[: upper.num_pages], pages[upper.num_pages :]
        if lower in self.stored:
            self.stored.add(upper)

    def join(self, upper: RadixNode, lower: RadixNode) -> bool:
        """Merge ``upper`` into ``lower`` if both are on the same tiers; return whether it was done."""
        if self.tiers_of(upper) != self.tiers_of(lower):
            return False
        if upper in self.host_pages:
            pages = self.host_pages.pop(upper)
            pages.extend(self.host_pages[lower])
            self.host_pages[lower] = pages
        self.stored.discard(upper)
        return True

    def clear(self) -> None:
        """Forget all nodes. The radix cache records the event."""
        self.host_pages.clear()
        self.stored.clear()
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)

    def check(self, nodes: Iterable[RadixNode]) -> None:
        """Recompute page counts and digest from all nodes of the tree and compare them.

        Raises:
            CacheIntegrityError: a page count or the digest differs.
        """
        counted = TierMembership(self._recorder)
        for node in nodes:
            for tier in self.tiers_of(node):
                counted._count(node, tier, 1)
        for tier, count in counted.num_pages.items():
            if self.num_pages[tier] != count:
                raise CacheIntegrityError(f"{self.num_pages[tier]} pages on {tier.name}, but its nodes have {count}")
        if self.digest != counted.digest:
            raise CacheIntegrityError(f"the digest is {self.digest}, but that of the nodes is {counted.digest}")

    def _count(self, node: RadixNode, tier: Tier, sign: int) -> None:
        weight = sum(block_hashes_of(node.digests)) * _FACTORS[tier]
        self.digest = (self.digest + sign * weight) & _MASK
        self.num_pages[tier] += sign * node.num_pages


@dataclass(slots=True, kw_only=True)
class HostTier:
    """The pages and the eviction order of the host tier.

    Attributes:
        pages: the host pool of this rank.
        num_pages: the smallest number of host pages of any rank.
        num_pages_used: pages in the tree and in flight; the same number on all ranks.
        order: the evictable nodes: those that are on the host only and not locked.
        num_path_locks: calls of `lock` without their `unlock`.
    """

    pages: HostPages
    num_pages: int
    num_pages_used: int = field(default=0, init=False)
    order: LruList = field(default_factory=LruList, init=False)
    num_path_locks: int = field(default=0, init=False)
    _locks: dict[RadixNode, int] = field(default_factory=dict, init=False)  # only nodes that are locked

    @property
    def num_pages_free(self) -> int:
        """Pages that can be reserved without eviction."""
        return self.num_pages - self.num_pages_used

    def release(self, pages: array[int] | tuple[int, ...]) -> None:
        self.pages.release(pages)
        self.num_pages_used -= len(pages)

    def lock(self, path_up: list[RadixNode]) -> None:
        """Lock the host pages of a path once more."""
        self.num_path_locks += 1
        for node in path_up:
            self._locks[node] = self._locks.get(node, 0) + 1
            self.order.discard(node)

    def unlock(self, path_up: list[RadixNode]) -> None:
        """Release one lock of a path. Nodes that become evictable become the most recently used."""
        self.num_path_locks -= 1
        for node in path_up:
            self._locks[node] -= 1
            if not self._locks[node]:
                del self._locks[node]
                self.touch((node,))

    def forget(self, node: RadixNode) -> None:
        """Drop the locks of a node that was merged into another node with as many locks."""
        self._locks.pop(node, None)

    @property
    def locked(self) -> Set[RadixNode]:
        return self._locks.keys()

    def num_locks(self, node: RadixNode) -> int:
        """Return the number of locks on a node or its descendants."""
        return self._locks.get(node, 0)

    def touch(self, path_up: Iterable[RadixNode]) -> None:
        """Make the evictable nodes of a path the most recently used."""
        self.order.touch(node for node in path_up if not node.pages and node not in self._locks)

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Handle the split of a node: both parts have its locks or its position in the eviction order."""
        if lower in self._locks:
            self._locks[upper] = self._locks[lower]
        elif lower in self.order:
            self.order.split(upper, lower)
            self.touch((lower, upper))  # the whole run was used together


class TierTree:
    """The tree and the tiers of its nodes; the ``LowerTiers`` of the device's radix cache.

    Args:
        page_size: tokens per page.
        capacity_tokens: size of the device's pool.
        host: the host pool of this rank.
        num_host_pages: the smallest number of host pages of any rank.
        record: record events.
        page_hook: called with the device pages that were computed or loaded.

    Attributes:
        device: the radix cache of the device tier.
        host: the host tier.
        membership: the tiers of each node.
        loading_back: device nodes whose pages are still being copied; requests use them and their forward waits.
        writing: nodes that are being copied to the host.
        backing_up: nodes that are being copied to storage.
        num_dropped_pages: pages evicted from the device without a host copy.
    """

    __slots__ = (
        "_page_hook",
        "loading_back",
        "backing_up",
        "device",
        "host",
        "membership",
        "num_dropped_pages",
        "writing",
    )

    def __init__(
        self,
        *,
        page_size: int,
        capacity_tokens: int,
        host: HostPages,
        num_host_pages: int,
        record: bool,
        page_hook: PageHook | None = None,
    ) -> None:
        self._page_hook = page_hook
        self.host = HostTier(pages=host, num_pages=num_host_pages)
        self.device = RadixCache(page_size=page_size, capacity_tokens=capacity_tokens, record=record, lower=self)
        self.membership = TierMembership(self.device.recorder)
        self.loading_back: set[RadixNode] = set()
        self.writing: set[RadixNode] = set()
        self.backing_up: set[RadixNode] = set()
        self.num_dropped_pages = 0

    @property
    def tree(self) -> RadixTree:
        return self.device.tree

    # --- LowerTiers: called by the device's cache ---

    @property
    def num_pages(self) -> int:
        """Pages of the host. Storage has no fixed size."""
        return self.host.num_pages

    def media_of(self, node: RadixNode) -> tuple[str | None, ...]:
        """Return the tiers of a node by the medium names of events."""
        return tuple(TIER_MEDIUM[tier] for tier in self.membership.tiers_of(node))

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Handle the split of a node into ``upper`` and ``lower``: both have its tiers and transfers."""
        self.membership.split(upper, lower)
        self.host.split(upper, lower)
        for under_way in (self.loading_back, self.writing, self.backing_up):
            if lower in under_way:
                under_way.add(upper)

    def join(self, upper: RadixNode, lower: RadixNode) -> bool:
        """Merge ``upper`` into ``lower`` if both have the same tiers and locks and no transfer; return whether done.

        An operation begins and ends at nodes, and neither may disappear inside a longer run. If a host lock ends at
        ``upper``, ``upper`` has more locks than ``lower``.
        """
        for under_way in (self.loading_back, self.writing, self.backing_up):
            if upper in under_way or lower in under_way:
                return False
        return self.host.num_locks(upper) == self.host.num_locks(lower) and self._join_alike(upper, lower)

    def on_computed(self, node: RadixNode) -> None:
        """Record that a request has computed the pages of this node."""
        if self._page_hook is not None:
            self._page_hook.on_computed(bytes(node.digests), node.pages)
        self._enter_device(node)

    def on_evicted(self, node: RadixNode) -> bool:
        """Handle an eviction from the device; return True if the host keeps the node, False if it is dropped."""
        node.pages = array("I")
        self.membership.leave_device(node)
        if node in self.membership.host_pages:
            self.host.touch((node,))
            return True
        self.num_dropped_pages += node.num_pages
        self.membership.clear_storage_index(node)
        return False

    # --- paths ---

    def match_path(self, packed: bytes, seed: bytes) -> list[RadixNode]:
        """Return the nodes of the longest cached prefix on any tier; the last node is split to end with the prefix.

        The path becomes the most recently used on device and host.
        """
        path = self.device.split_path(self.tree.find(packed, seed))
        self.touch(path)
        return path

    def touch(self, path: list[RadixNode]) -> None:
        """Make a path the most recently used on device and host."""
        num_on_device = self.num_on_device(path)
        self.device.lru.touch(reversed(path[:num_on_device]))
        self.host.touch(reversed(path[num_on_device:]))

    @staticmethod
    def num_on_device(path: list[RadixNode]) -> int:
        """Return how many nodes from the start of a path are on the device."""
        return next((at for at, node in enumerate(path) if not node.pages), len(path))

    def run_ending_at(self, end: RadixNode, num_pages: int) -> list[RadixNode]:
        """Return the nodes of the last ``num_pages`` pages of the prefix that ends in ``end``, topmost first."""
        run: list[RadixNode] = []
        node = end
        while num_pages > 0:
            run.append(node)
            num_pages -= node.num_pages
            assert node.parent is not None, "an operation's pages reach above the root"
            node = node.parent
        assert num_pages == 0, "a node was split inside an operation's pages, at neither of its ends"
        return run[::-1]

    def split_run(self, run: list[RadixNode], num_pages: int) -> list[RadixNode]:
        """Return the nodes of the first ``num_pages`` pages of a run; split the last one. Call ``touch`` next."""
        kept: list[RadixNode] = []
        for node in run:
            if num_pages <= 0:
                break
            kept.append(node if node.num_pages <= num_pages else self.device.split(node, num_pages))
            num_pages -= kept[-1].num_pages
        return kept

    def last_digest(self, node: RadixNode, seed: bytes) -> bytes:
        """Return the digest to which the pages after ``node`` are chained."""
        return seed if node is self.tree.root else bytes(node.digests[-DIGEST_BYTES:])

    # --- tiers ---

    def is_on_host(self, node: RadixNode) -> bool:
        """Return whether a child of ``node`` may be on the host: the node is on the host, or is the root."""
        return node in self.membership.host_pages or node is self.tree.root

    def is_stored(self, node: RadixNode) -> bool:
        """Return whether a child of ``node`` may count as stored."""
        return node in self.membership.stored or node is self.tree.root

    def put_on_device(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Give loaded pages to a node that is on the host only. Call ``touch`` for its path afterwards.

        Raises:
            CacheIntegrityError: the page hook finds other content in the pages.
        """
        if self._page_hook is not None:
            self._page_hook.on_loaded_back(bytes(node.digests), pages)
        self.device.attach(node, pages)
        self._enter_device(node)

    def begin_load_back(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Give pages that are still being loaded to a node that is on the host only. Call ``touch`` for its path."""
        self.device.attach(node, pages)
        self.loading_back.add(node)
        self._enter_device(node)

    def end_load_back(self, node: RadixNode, *, is_ok: bool) -> None:
        """Record the end of a load; remove the node from the device if the load failed.

        Raises:
            CacheIntegrityError: the page hook finds other content in the pages, or the load failed and a request uses
                the node.
        """
        self.loading_back.remove(node)
        if is_ok:
            if self._page_hook is not None:
                self._page_hook.on_loaded_back(bytes(node.digests), node.pages)
            self.device.mark_joinable(node)
        else:
            self.device.detach(node)

    def evict_host(self, num_pages: int) -> bool:
        """Evict the least recently used nodes until ``num_pages`` host pages are free.

        Return False, without an eviction, if there are not enough evictable pages.
        """
        order = self.host.order
        lacking = num_pages - self.host.num_pages_free
        if lacking > order.num_pages:
            return False
        while lacking > 0:
            leaf = order.pop_oldest()
            if leaf.num_pages > lacking:
                order.put_oldest(self.device.split(leaf, leaf.num_pages - lacking))
            self.host.release(self.membership.remove_from_host(leaf))
            self.membership.clear_storage_index(leaf)
            self.tree.remove(leaf)
            lacking -= leaf.num_pages
        return True

    def insert_on_host(
        self, parent: RadixNode, packed: bytes, pages: array[int], namespace: PrefixNamespace
    ) -> RadixNode:
        """Attach pages read from storage below ``parent``. Call ``touch`` for the path afterwards."""
        leaf = self.tree.append(parent, packed, array("I"), namespace)
        self.membership.place_on_host(leaf, pages)
        return leaf

    # --- whole ---

    def clear(self, weight_version: str | None = None) -> None:
        """Remove every prefix. No transfer may be under way. ``weight_version`` is as for ``RadixCache.clear``.

        Raises:
            CacheIntegrityError: a request still locks a prefix; nothing has changed.
        """
        self.device.clear(weight_version)
        for pages in self.membership.host_pages.values():
            self.host.release(pages)
        self.host.order.clear()
        self.membership.clear()

    def check(self) -> None:
        """Run a full check of tree, pools, eviction orders and tiers.

        Raises:
            CacheIntegrityError: with the count that does not add up.
        """
        self.device.check_integrity()
        nodes, host_pages = list(self.tree.walk()), self.membership.host_pages
        self.host.pages.check_integrity([page for node in nodes for page in host_pages.get(node, ())])
        self.host.order.check((node for node in nodes if not node.pages), self.host.num_locks)
        for node in nodes:
            for violation in self._violations(node):
                raise CacheIntegrityError(f"{node} {violation}")
        self.membership.check(nodes)
        under_way = (self.loading_back, self.writing, self.backing_up)
        for nodes_kept in (host_pages, self.membership.stored, *under_way, self.host.locked):
            if not set(nodes).issuperset(nodes_kept):
                raise CacheIntegrityError("a tier contains a node that is not in the tree")

    def _violations(self, node: RadixNode) -> list[str]:
        parent, host_pages = node.parent, self.membership.host_pages.get(node)
        assert parent is not None
        violations = {
            "is on the device, its parent is not": node.pages and parent is not self.tree.root and not parent.pages,
            "is on the host, its parent is not": host_pages is not None and not self.is_on_host(parent),
            "is stored, its parent is not": node in self.membership.stored and not self.is_stored(parent),
            "is neither on the device nor on the host": not node.pages and host_pages is None,
            "has fewer host locks than its children": self.host.num_locks(node)
            < sum(map(self.host.num_locks, node.children.values())),
            "does not have one host page per page": host_pages is not None and len(host_pages) != node.num_pages,
        }
        return [violation for violation, is_violated in violations.items() if is_violated]

    def _join_alike(self, upper: RadixNode, lower: RadixNode) -> bool:
        are_alike = self.membership.join(upper, lower)
        if are_alike:
            self.host.forget(upper)
        return are_alike

    def _enter_device(self, node: RadixNode) -> None:
        self.host.order.discard(node)
        self.membership.enter_device(node)


def pages_per_node(run: list[RadixNode], pages: tuple[int, ...] | list[int]) -> list[tuple[RadixNode, list[int]]]:
    """Distribute an operation's pages over the nodes of its run."""
    shares, start = [], 0
    for node in run:
        shares.append((node, list(pages[start : start + node.num_pages])))
        start += node.num_pages
    return shares
