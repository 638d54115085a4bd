"""The radix tree over three tiers: which node is on which, and in which order nodes leave the host.

The device is a ``RadixCache``; ``TierTree`` is its ``LowerTiers``. It moves no bytes and waits for nobody.

Three rules keep it simple, and ``TierTree.check`` tests them:

- What is on the device is closed upwards: the parent of a node on the device is there too. So is what is on the host,
  and what is in storage. A prefix on a tier is usable as far as it goes.
- Every node is on the device or on the host. A node that leaves both leaves the tree.
- A node is evicted from the host only when it is on the host alone, and is then a leaf. A host copy of a node on the
  device stays: it is what saves the node when the device evicts it.

Every choice follows from the order of calls. Room on the host is counted here, in a ledger that is the same on all
ranks. It is not asked of the host's pool, which is each rank's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from scheduler_components.cache import PrefixNamespace, RadixCache, RadixNode
from scheduler_components.cache.block_hash import DIGEST_BYTES, block_hashes_of
from scheduler_components.cache.lru_list import LruList
from scheduler_components.cache.radix_tree import RadixTree
from scheduler_components.cache.recorder import EventRecorder, NullEventRecorder
from scheduler_components.errors import CacheIntegrityError
from scheduler_components.events import TIER_MEDIUM, Tier
from scheduler_components.ports import HostPages, PageHook

__all__ = ["HostTier", "TierMembership", "TierTree", "pages_per_node"]

# Odd, so that multiplying by one loses nothing: the same pages on another tier give another digest.
_FACTORS = {Tier.DEVICE: 0x9E3779B97F4A7C15, Tier.HOST: 0xC2B2AE3D27D4EB4F, Tier.STORAGE: 0x165667B19E3779F9}
_MASK = 2**64 - 1


class TierMembership:
    """Which node is on which tier, as one running digest and as events.

    The digest is a sum over (page, tier). So it costs what a transition moves and not what the cache holds, and it
    does not depend on page indices, which are each rank's own.

    Args:
        recorder: takes the events of host and storage; those of the device are the radix cache's.

    Attributes:
        host_pages: host page indices of each node on the host, one per page.
        stored: nodes of which storage is known to hold every page.
        digest: equal on ranks that hold the same pages on the same tiers.
        num_pages: on each tier.
    """

    __slots__ = ("_recorder", "digest", "host_pages", "num_pages", "stored")

    def __init__(self, recorder: EventRecorder | NullEventRecorder) -> None:
        self._recorder = recorder
        self.host_pages: dict[RadixNode, array[int]] = {}
        self.stored: set[RadixNode] = set()
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)

    def tiers_of(self, node: RadixNode) -> tuple[Tier, ...]:
        """Return the tiers that a node of the tree is on."""
        on = (Tier.DEVICE, bool(node.pages)), (Tier.HOST, node in self.host_pages), (Tier.STORAGE, node in self.stored)
        return tuple(tier for tier, is_on in on if is_on)

    def enter_device(self, node: RadixNode) -> None:
        """The device holds the node's pages now."""
        self._count(node, Tier.DEVICE, 1)

    def leave_device(self, node: RadixNode) -> None:
        """The device no longer holds the node's pages."""
        self._count(node, Tier.DEVICE, -1)

    def place_on_host(self, node: RadixNode, pages: array[int]) -> None:
        """The host holds the node's pages now."""
        self.host_pages[node] = pages
        self._count(node, Tier.HOST, 1)
        self._recorder.record_stored(node, TIER_MEDIUM[Tier.HOST])

    def remove_from_host(self, node: RadixNode) -> array[int]:
        """The host no longer holds the node; returns the pages that it was on."""
        self._count(node, Tier.HOST, -1)
        self._recorder.record_removed(node, TIER_MEDIUM[Tier.HOST])
        return self.host_pages.pop(node)

    def place_in_storage(self, node: RadixNode) -> None:
        """Storage holds the node's pages now."""
        self.stored.add(node)
        self._count(node, Tier.STORAGE, 1)
        self._recorder.record_stored(node, TIER_MEDIUM[Tier.STORAGE])

    def clear_storage_index(self, node: RadixNode) -> None:
        """Whether storage holds the node is no longer known. Without effect when it never was."""
        if node in self.stored:
            self.stored.remove(node)
            self._count(node, Tier.STORAGE, -1)
            self._recorder.record_removed(node, TIER_MEDIUM[Tier.STORAGE])

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """A node was cut in two and is now ``lower``: both parts are where it was."""
        pages = self.host_pages.get(lower)
        if pages is not None:
            self.host_pages[upper], self.host_pages[lower] = pages[: upper.num_pages], pages[upper.num_pages :]
        if lower in self.stored:
            self.stored.add(upper)

    def join(self, upper: RadixNode, lower: RadixNode) -> bool:
        """``lower`` is to take in the run of ``upper``: do so if both are on the same tiers."""
        if self.tiers_of(upper) != self.tiers_of(lower):
            return False
        if upper in self.host_pages:
            pages = self.host_pages.pop(upper)
            pages.extend(self.host_pages[lower])
            self.host_pages[lower] = pages
        self.stored.discard(upper)
        return True

    def clear(self) -> None:
        """Every page has left every tier; the device's cache records it."""
        self.host_pages.clear()
        self.stored.clear()
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)

    def check(self, nodes: Iterable[RadixNode]) -> None:
        """Count all nodes of the tree anew.

        Raises:
            CacheIntegrityError: pages per tier or the digest are not those of the nodes.
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
    """The host's room.

    Attributes:
        pages: this rank's.
        num_pages: that every rank's host has: the least of all ranks'.
        num_pages_used: the ledger: in the tree and in flight.
        order: of the nodes that are on the host alone and that nobody holds there.
    """

    pages: HostPages
    num_pages: int
    num_pages_used: int = field(default=0, init=False)
    order: LruList = field(default_factory=LruList, init=False)
    _locks: dict[RadixNode, int] = field(default_factory=dict, init=False)  # only nodes that are locked

    @property
    def num_pages_free(self) -> int:
        """Pages that can be taken without evicting."""
        return self.num_pages - self.num_pages_used

    def release(self, pages: array[int] | tuple[int, ...]) -> None:
        """Give committed pages back."""
        self.pages.release(pages)
        self.num_pages_used -= len(pages)

    def lock(self, path_up: list[RadixNode]) -> None:
        """Count one more holder of the host pages of a path."""
        for node in path_up:
            self._locks[node] = self._locks.get(node, 0) + 1
            self.order.discard(node)

    def unlock(self, path_up: list[RadixNode]) -> None:
        """Count one holder less; what nobody holds any more and only the host has becomes the most recently used."""
        for node in path_up:
            self._locks[node] -= 1
            if not self._locks[node]:
                del self._locks[node]
                self.touch((node,))

    def forget(self, node: RadixNode) -> None:
        """A node on the device has left the tree for a run that has as many holders."""
        self._locks.pop(node, None)

    @property
    def locked(self) -> Set[RadixNode]:
        """The nodes that have holders."""
        return self._locks.keys()

    def num_locks(self, node: RadixNode) -> int:
        """Return how many holders keep the host pages of a node, or of a node below it."""
        return self._locks.get(node, 0)

    def touch(self, path_up: Iterable[RadixNode]) -> None:
        """Make the nodes of a path that are on the host alone, and that nobody holds, the most recently used."""
        self.order.touch(node for node in path_up if not node.pages and node not in self._locks)

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """A node was cut in two and is now ``lower``: both parts have its locks, or its place in the order."""
        if lower in self._locks:
            self._locks[upper] = self._locks[lower]
        elif lower in self.order:
            self.order.split(upper, lower)
            self.touch((lower, upper))  # the whole run was one use: its rest stays as recent as the part


class TierTree:
    """The tree, and which of its nodes are where. The ``LowerTiers`` of the device's cache.

    Args:
        page_size: tokens per page.
        capacity_tokens: of the device's pool.
        host: this rank's host pages.
        num_host_pages: pages that every rank's host has: the least of all ranks'.
        record: keep events.
        page_hook: learns which device pages were computed and loaded.

    Attributes:
        device: the radix cache of what is on the device.
        host: the host's room.
        membership: which node is on which tier.
        loading_back: nodes on the device whose pages are being copied there: requests run, and their forward waits.
        writing: nodes of which a copy to the host is under way.
        backing_up: nodes of which a copy to storage is under way.
        num_dropped_pages: evicted from the device, and not on the host.
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
        page_hook: PageHook,
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
        """The one tree of all tiers."""
        return self.device.tree

    # --- LowerTiers: called by the device's cache ---

    @property
    def num_pages(self) -> int:
        """Pages below the device: the host's, for storage keeps its own count."""
        return self.host.num_pages

    def media_of(self, node: RadixNode) -> tuple[str | None, ...]:
        """Return the media that a node of the tree is on, as its events name them."""
        return tuple(TIER_MEDIUM[tier] for tier in self.membership.tiers_of(node))

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """A node was cut in two and is now ``lower``: both parts are where it was, and under way if it was."""
        self.membership.split(upper, lower)
        self.host.split(upper, lower)
        for under_way in (self.loading_back, self.writing, self.backing_up):
            if lower in under_way:
                under_way.add(upper)

    def join(self, upper: RadixNode, lower: RadixNode) -> bool:
        """``lower`` is to take in the run of ``upper``: do so if both are where the other is, and nothing is under way.

        An operation ends at a node, and begins at another; neither may vanish inside a longer run. Where a holder of
        host pages ends at ``upper``, it has more of them than ``lower``.
        """
        for under_way in (self.loading_back, self.writing, self.backing_up):
            if upper in under_way or lower in under_way:
                return False
        return self.host.num_locks(upper) == self.host.num_locks(lower) and self._join_alike(upper, lower)

    def on_computed(self, node: RadixNode) -> None:
        """The device has pages of this node now that a request computed."""
        self._page_hook.on_computed(bytes(node.digests), node.pages)
        self._enter_device(node)

    def on_evicted(self, node: RadixNode) -> bool:
        """The device has given up this node: the host keeps it if it can, otherwise it is dropped."""
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
        """Return the nodes that hold the cached prefix of packed tokens, on any tier, cut to end where it does.

        The path becomes the most recently used on both tiers.
        """
        path = self.device.split_path(self.tree.find(packed, seed))
        self.touch(path)
        return path

    def touch(self, path: list[RadixNode]) -> None:
        """Make a path the most recently used on the tiers that it is on."""
        num_on_device = self.num_on_device(path)
        self.device.lru.touch(reversed(path[:num_on_device]))
        self.host.touch(reversed(path[num_on_device:]))

    @staticmethod
    def num_on_device(path: list[RadixNode]) -> int:
        """Return how many nodes of a path, from the root on, are on the device."""
        return next((at for at, node in enumerate(path) if not node.pages), len(path))

    def run_ending_at(self, end: RadixNode, num_pages: int) -> list[RadixNode]:
        """Return the nodes that hold the last ``num_pages`` pages of the prefix that ends in ``end``, topmost first.

        An operation keeps its end and its length, because other requests may split the nodes in between.
        """
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
        """Return the nodes that hold the first ``num_pages`` pages of consecutive nodes, one cut; touch them next."""
        kept: list[RadixNode] = []
        for node in run:
            if num_pages <= 0:
                break
            kept.append(node if node.num_pages <= num_pages else self.device.split(node, num_pages))
            num_pages -= kept[-1].num_pages
        return kept

    def last_digest(self, node: RadixNode, seed: bytes) -> bytes:
        """Return the digest that the pages after ``node`` chain from."""
        return seed if node is self.tree.root else bytes(node.digests[-DIGEST_BYTES:])

    # --- tiers ---

    def is_on_host(self, node: RadixNode) -> bool:
        """True where a child of ``node`` may be on the host: the node itself is, or it is the root."""
        return node in self.membership.host_pages or node is self.tree.root

    def is_stored(self, node: RadixNode) -> bool:
        """True where a child of ``node`` may count as stored."""
        return node in self.membership.stored or node is self.tree.root

    def put_on_device(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Give pages that a transfer loaded to a node that is on the host alone; touch its path next.

        Raises:
            CacheIntegrityError: the page hook finds other content in them.
        """
        self._page_hook.on_loaded_back(bytes(node.digests), pages)
        self.device.attach(node, pages)
        self._enter_device(node)

    def begin_load_back(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Give pages to a node that is on the host alone, whose content a copy brings; touch its path next."""
        self.device.attach(node, pages)
        self.loading_back.add(node)
        self._enter_device(node)

    def end_load_back(self, node: RadixNode, *, is_ok: bool) -> None:
        """The pages of an loading_back node hold its content now, or never will: then the device loses it.

        Raises:
            CacheIntegrityError: the page hook finds other content in them; or they never will, and a request runs.
        """
        self.loading_back.remove(node)
        if is_ok:
            self._page_hook.on_loaded_back(bytes(node.digests), node.pages)
            self.device.mark_joinable(node)
        else:
            self.device.detach(node)

    def evict_host(self, num_pages: int) -> bool:
        """Evict from the host what was used least recently until ``num_pages`` are free; False if that cannot be.

        Evicts nothing then.
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
        """Hang a run that came from storage below ``parent``; touch its path next."""
        leaf = self.tree.append(parent, packed, array("I"), namespace)
        self.membership.place_on_host(leaf, pages)
        return leaf

    # --- whole ---

    def clear(self) -> None:
        """Forget every prefix; nothing may be under way.

        Raises:
            CacheIntegrityError: a request still locks a prefix; nothing has changed.
        """
        self.device.clear()
        for pages in self.membership.host_pages.values():
            self.host.release(pages)
        self.host.order.clear()
        self.membership.clear()

    def check(self) -> None:
        """Check tree, pools, orders and tiers against each other. Walks everything.

        Raises:
            CacheIntegrityError: with the arithmetic that failed.
        """
        self.device.check_integrity()
        nodes, host_pages = list(self.tree.walk()), self.membership.host_pages
        self.host.pages.check_integrity([page for node in nodes for page in host_pages.get(node, ())])
        self.host.order.check((node for node in nodes if not node.pages), self.host.num_locks)
        for node in nodes:
            for problem in self._problems(node):
                raise CacheIntegrityError(f"{node} {problem}")
        self.membership.check(nodes)
        under_way = (self.loading_back, self.writing, self.backing_up)
        for kept in (host_pages, self.membership.stored, *under_way, self.host.locked):
            if not set(nodes).issuperset(kept):
                raise CacheIntegrityError("a tier keeps a node that is not in the tree")

    def _problems(self, node: RadixNode) -> list[str]:
        parent, host_pages = node.parent, self.membership.host_pages.get(node)
        assert parent is not None
        problems = {
            "is on the device, its parent is not": node.pages and parent is not self.tree.root and not parent.pages,
            "is on the host, its parent is not": host_pages is not None and not self.is_on_host(parent),
            "is stored, its parent is not": node in self.membership.stored and not self.is_stored(parent),
            "is neither on the device nor on the host": not node.pages and host_pages is None,
            "has fewer host locks than its children": self.host.num_locks(node)
            < sum(map(self.host.num_locks, node.children.values())),
            "has not one host page per page": host_pages is not None and len(host_pages) != node.num_pages,
        }
        return [problem for problem, is_so in problems.items() if is_so]

    def _join_alike(self, upper: RadixNode, lower: RadixNode) -> bool:
        are_alike = self.membership.join(upper, lower)
        if are_alike:
            self.host.forget(upper)
        return are_alike

    def _enter_device(self, node: RadixNode) -> None:
        self.host.order.discard(node)
        self.membership.enter_device(node)


def pages_per_node(run: list[RadixNode], pages: tuple[int, ...] | list[int]) -> list[tuple[RadixNode, list[int]]]:
    """Give each node of a run its part of an operation's pages."""
    shares, start = [], 0
    for node in run:
        shares.append((node, list(pages[start : start + node.num_pages])))
        start += node.num_pages
    return shares
