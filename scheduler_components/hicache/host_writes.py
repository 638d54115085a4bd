"""HostWrites: pages on their way from the device to the host, and from the host to storage."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.operations import BackupSettled, WriteSettled
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.hicache.tier_tree import TierTree, shares_of

__all__ = ["HostWrites"]

_BACKUP_SHARE = 4  # a slow storage may lock one page in so many of the host; what is beyond that is not backed up


@dataclass(slots=True, kw_only=True)
class HostWrites:
    """Copies that make eviction harmless. What is being copied is locked until it settles.

    An operation is remembered as the node that ends it and its number of pages: requests may split the nodes in
    between at any time.

    Attributes:
        tiers: the tree.
        controller: makes the operations and settles them.
        policy: when to write.
        stats: counts what comes of it.
        num_pages_backing_up: host pages that are locked until storage has them.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    num_pages_backing_up: int = field(default=0, init=False)
    _writes: dict[int, tuple[RadixNode, int]] = field(default_factory=dict, init=False)
    _backups: dict[int, tuple[RadixNode, int]] = field(default_factory=dict, init=False)
    _has_news: bool = field(default=False, init=False)

    @property
    def num_pages_reserved(self) -> int:
        """Host pages of writes under way."""
        return sum(num_pages for _, num_pages in self._writes.values())

    def after_insert(self, path: list[RadixNode]) -> None:
        """With ``write_through``: copy a path that a request has just cached. With ``write_back``: look ahead soon."""
        if self.policy.write == "write_through":
            self.write_path(path)
        else:
            self._has_news = True

    def write_path(self, path: Iterable[RadixNode]) -> None:
        """Copy what of a path on the device is not on the host, parents first; back up what is on the host."""
        for node in path:
            if node.host_pages:
                self._back_up(node)
            elif not node.is_writing and not self._begin_write(node):
                return

    def clean_ahead(self) -> None:
        """With ``write_back``: copy the device pages that will be evicted next, once pages run short.

        Only after an insertion: a copy that fails is not tried again and again while nothing happens.
        """
        tiers, wanted = self.tiers, self.policy.clean_ahead_pages
        if not self._has_news or tiers.device.num_free >= wanted:
            return
        self._has_news = False
        oldest: list[RadixNode] = []
        for node in tiers.device_order:
            if wanted <= 0:
                break
            wanted -= node.num_pages
            if not node.host_pages:
                oldest.append(node)
        for node in oldest:
            self.write_path(reversed(tiers.tree.path_of(node)))

    def _begin_write(self, node: RadixNode) -> bool:
        tiers, parent = self.tiers, node.parent
        assert parent is not None
        if not (tiers.is_on_host(parent) or parent.is_writing) or not tiers.make_host_room(node.num_pages):
            self.stats.pages_not_written += node.num_pages
            return False
        tiers.num_host_pages_used += node.num_pages
        tiers.device_order.lock(tiers.tree.path_of(node))
        node.is_writing = True
        self._writes[self.controller.write(node.pages)] = (node, node.num_pages)
        return True

    def settle_write(self, settled: WriteSettled) -> None:
        """Put written pages in the tree, on all ranks or on none."""
        tiers, host_pages = self.tiers, settled.host_pages
        end, num_pages = self._writes.pop(settled.op)
        run = tiers.run_up_from(end, num_pages)
        for node in run:
            node.is_writing = False
        parent = run[0].parent
        assert parent is not None
        if host_pages and tiers.is_on_host(parent):
            for node, pages in shares_of(run, host_pages):
                tiers.membership.place_on_host(node, array("I", pages))
                self._back_up(node)
            self.stats.pages_written += num_pages
        else:
            # Either no rank has committed pages, or all have; then they go back on all.
            tiers.release_host(host_pages)
            tiers.num_host_pages_used -= num_pages - len(host_pages)
            self.stats.pages_not_written += num_pages
        tiers.device_order.unlock(tiers.tree.path_of(end))

    def _back_up(self, node: RadixNode) -> None:
        """Write a node on the host to storage, unless its parent is not there and not on the way."""
        tiers, parent = self.tiers, node.parent
        assert parent is not None
        if not self.controller.agreed.has_storage or node.is_stored or node.is_backing_up:
            return
        if not (tiers.is_stored(parent) or parent.is_backing_up):
            return
        if self.num_pages_backing_up + node.num_pages > tiers.num_host_pages // _BACKUP_SHARE:
            self.stats.pages_not_backed_up += node.num_pages
            return
        tiers.host_order.lock(tiers.tree.path_of(node))
        node.is_backing_up = True
        number = self.controller.back_up(bytes(node.digests), node.host_pages)
        self._backups[number] = (node, node.num_pages)
        self.num_pages_backing_up += node.num_pages

    def settle_backup(self, settled: BackupSettled) -> None:
        """Count pages as stored where every rank's part of them is, and what they hang on is too."""
        tiers = self.tiers
        end, num_pages = self._backups.pop(settled.op)
        self.num_pages_backing_up -= num_pages
        run = tiers.run_up_from(end, num_pages)
        parent = run[0].parent
        assert parent is not None
        is_stored = settled.is_good and self.controller.agreed.has_storage and tiers.is_stored(parent)
        for node in run:
            node.is_backing_up = False
            if is_stored:
                tiers.membership.place_in_storage(node)
        if is_stored:
            self.stats.pages_backed_up += num_pages
        else:
            self.stats.pages_not_backed_up += num_pages
        tiers.host_order.unlock(tiers.tree.path_of(end))
