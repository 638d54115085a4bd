"""StorageReads: pages on their way from storage to the host, and into the tree."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from scheduler_components.cache.block_hash import page_digests
from scheduler_components.cache.namespace import PrefixNamespace
from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.operations import PrefetchHit, PrefetchSettled
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.hicache.tier_tree import TierTree

__all__ = ["Prefetch", "StorageReads"]


@dataclass(slots=True, kw_only=True)
class Prefetch:
    """Pages on their way from storage to the host."""

    number: int
    packed: bytes
    namespace: PrefixNamespace
    first_page: int  # pages of the prefix that the tree held at the start
    anchor: RadixNode | None  # their end, locked on the host; None where it is not there
    num_reserved: int = 0
    num_landed: int | None = None  # None: not settled


@dataclass(slots=True, kw_only=True)
class StorageReads:
    """Prefetches for requests that wait.

    Attributes:
        tiers: the tree.
        controller: makes the operations and settles them.
        policy: what is worth a prefetch.
        stats: counts what comes of it.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    _under_way: dict[int, Prefetch] = field(default_factory=dict, init=False)

    @property
    def num_pages_reserved(self) -> int:
        """Host pages of prefetches under way."""
        return sum(prefetch.num_reserved for prefetch in self._under_way.values())

    def is_worth_it(self, packed: bytes, path: list[RadixNode]) -> bool:
        """Say whether storage may have enough of what follows a path.

        Args:
            packed: the tokens of the prompt.
            path: what of it the tree holds, as ``TierTree.path_to`` gives it.
        """
        num_pages = len(packed) // self.tiers.tree.page_bytes - sum(node.num_pages for node in path)
        return self.controller.agreed.has_storage and num_pages >= self.policy.prefetch_threshold_pages

    def begin(self, packed: bytes, namespace: PrefixNamespace, path: list[RadixNode]) -> Prefetch:
        """Read from storage what follows a path."""
        tree, first_page = self.tiers.tree, sum(node.num_pages for node in path)
        end = path[-1] if path else tree.root
        prior = self.tiers.last_digest(end, namespace.seed())
        number = self.controller.prefetch(page_digests(packed[first_page * tree.page_bytes :], tree.page_size, prior))
        anchor = end if end.host_pages else None
        if anchor is not None:
            self.tiers.host_order.lock(tree.path_of(anchor))
        prefetch = Prefetch(number=number, packed=packed, namespace=namespace, first_page=first_page, anchor=anchor)
        self._under_way[number] = prefetch
        self.stats.prefetches += 1
        return prefetch

    def stop(self, prefetch: Prefetch) -> None:
        """Read no further than what has landed."""
        self.controller.prefetches.stop(prefetch.number)

    def cancel(self, prefetch: Prefetch) -> None:
        """Nobody wants the pages any more."""
        self.controller.prefetches.cancel(prefetch.number)

    def reserve(self, hit: PrefetchHit, now_s: float) -> None:
        """Take room for what storage holds: at most half of what the host can free, so that prefetches never fill it.

        A share of what is there would be no rule if it depended on the rank; the ledger does not.
        """
        tiers, prefetch = self.tiers, self._under_way[hit.op]
        free = tiers.num_host_pages - tiers.num_host_pages_used
        num_pages = min(hit.num_pages, (free + tiers.host_order.num_pages) // 2)
        if num_pages < self.policy.prefetch_threshold_pages or not tiers.make_host_room(num_pages):
            num_pages = 0
        tiers.num_host_pages_used += num_pages
        prefetch.num_reserved = num_pages
        self.controller.prefetches.reserve(prefetch.number, num_pages, now_s)

    def settle(self, settled: PrefetchSettled) -> None:
        """Put what landed on every rank in the tree, below what is there by now."""
        tiers, tree, host_pages = self.tiers, self.tiers.tree, settled.host_pages
        prefetch = self._under_way.pop(settled.op)
        tiers.num_host_pages_used -= prefetch.num_reserved - len(host_pages)
        if prefetch.anchor is not None:
            tiers.host_order.unlock(tree.path_of(prefetch.anchor))
        stop = (prefetch.first_page + len(host_pages)) * tree.page_bytes
        descent = tree.find(prefetch.packed[:stop], prefetch.namespace.seed())
        path = tiers.cut_at(descent)
        num_known = descent.num_pages - prefetch.first_page  # pages that a request has computed in the meantime
        parent = path[-1] if path else tree.root
        if num_known < 0 or not tiers.is_on_host(parent):
            num_known = len(host_pages)  # nowhere to hang them
        tiers.release_host(host_pages[:num_known])
        kept = host_pages[num_known:]
        if kept:
            packed = prefetch.packed[descent.num_pages * tree.page_bytes : stop]
            leaf = tiers.append_on_host(parent, packed, array("I", kept), prefetch.namespace)
            if self.controller.agreed.has_storage and tiers.is_stored(parent):
                tiers.membership.place_in_storage(leaf)
            path.append(leaf)
        tiers.touch(path)
        prefetch.num_landed = len(kept)
        self.stats.pages_prefetched += len(kept)
        self.stats.pages_revoked += prefetch.num_reserved - len(kept)
        self.stats.prefetches_revoked += not kept
