"""Transfers of pages between the tiers of one rank's tree.

``WriteTransfers`` copies pages to the host and to storage, ``LoadBackTransfers`` copies them back to the device, and
``PrefetchTransfers`` reads them from storage. Each begins operations, the same ones on every rank, and puts their
result into the tree once all ranks agree that they have ended. ``TierTransfers`` dispatches the decisions.

An operation is identified by its last node and its number of pages, because requests may split the nodes in between at
any time. The pages of an operation are locked until it settles.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from scheduler_components.cache import PrefixNamespace, RadixNode
from scheduler_components.cache.block_hash import page_digests
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.events import Tier
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.tiers import TierTree, pages_per_node
from scheduler_components.values import AllocationAction, HeldCount, PageHolding, TierStats
from scheduler_components.values.page_operations import (
    BackupOutcome,
    LoadBackOutcome,
    PrefetchDrained,
    PrefetchHit,
    PrefetchOutcome,
    StorageDetached,
    TierDecision,
    WriteOutcome,
)

__all__ = ["LoadBackTransfers", "WriteTransfers", "PrefetchTransfers", "TierTransfers"]


_BACKUP_SHARE = 4  # backups may lock a quarter of the host pages while storage is slow; further pages are skipped


@dataclass(slots=True, kw_only=True)
class LoadBack:
    """A load of pages from the host to the device.

    Attributes:
        end: the last node of the loaded run.
        num_pages: number of pages.
        device_end: the node that is locked on the device: the parent of the run, or ``end`` with ``by_layer``.
        device_pages: reserved pages that no node owns yet; empty with ``by_layer``.
        by_layer: requests already use the pages.
        is_settled, has_failed: as agreed by all ranks.
    """

    end: RadixNode
    num_pages: int
    device_end: RadixNode
    device_pages: list[int]
    by_layer: bool
    is_settled: bool = False
    has_failed: bool = False


@dataclass(slots=True, kw_only=True)
class LoadBackTransfers:
    """Loads from the host to the device.

    Attributes:
        tiers: the tree.
        controller: begins and settles the operations.
        policy: the shortest run to load.
        stats: counts the results.
        budget_pages: pages that may be loaded before the next agreement.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    budget_pages: int = field(default=0, init=False)
    _under_way: dict[int, LoadBack] = field(default_factory=dict, init=False)

    @property
    def is_idle(self) -> bool:
        """True if no load is under way, so no budget will be returned."""
        return not self._under_way

    @property
    def num_pages_reserved(self) -> int:
        """Device pages that loads have reserved."""
        return sum(len(load.device_pages) for load in self._under_way.values())

    def holdings(self) -> Iterator[PageHolding]:
        """Yield the device pages and locks of each load."""
        for number, load in self._under_way.items():
            yield PageHolding(f"load {number}", "transfer", load.device_pages, node=load.device_end)

    def host_locks(self) -> Iterator[tuple[str, RadixNode]]:
        """Yield each load with the end of the prefix that it locks on the host."""
        for number, load in self._under_way.items():
            yield f"load {number}", load.end

    def start(self, path: list[RadixNode], max_pages: int, *, by_layer: bool = False) -> LoadBack | None:
        """Begin to load the part of a path that is only on the host, within the agreed budget and the free pages.

        Return None if the run is too short, if no device pages can be allocated now, or if the parent of the run is
        itself being loaded and might fail.

        Args:
            path: a result of ``TierTree.match_path``.
            max_pages: the largest number of pages to load.
            by_layer: put the pages into the tree immediately, for a request that runs while they are copied.
        """
        tiers = self.tiers
        num_on_device = tiers.num_on_device(path)
        on_device, on_host = path[:num_on_device], path[num_on_device:]
        num_pages = min(sum(node.num_pages for node in on_host), max_pages, self.budget_pages)
        if num_pages < self.policy.load_threshold_pages:
            return None
        on_host = tiers.split_run(on_host, num_pages)
        tiers.touch(on_device + on_host)
        device_end = on_device[-1] if on_device else tiers.tree.root
        if device_end in tiers.loading_back:
            return None
        tiers.device.lock(device_end)
        tiers.host.lock(tiers.tree.path_to_root(on_host[-1]))
        try:
            device_pages = tiers.device.allocate(num_pages)
        except OutOfPagesError:
            tiers.host.unlock(tiers.tree.path_to_root(on_host[-1]))
            tiers.device.unlock(device_end)
            return None
        self.budget_pages -= num_pages
        host_pages = [page for node in on_host for page in tiers.membership.host_pages[node]]
        number = self.controller.load_back(host_pages, device_pages, by_layer=by_layer)
        end = on_host[-1]
        self._record("allocated", number, device_pages)
        if by_layer:
            self._record("cached", number, device_pages)
            for node, pages in pages_per_node(on_host, device_pages):
                tiers.begin_load_back(node, pages)
            tiers.touch(on_device + on_host)
            tiers.device.lock(end)
            tiers.device.unlock(device_end)
            device_end, device_pages = end, []
        self._under_way[number] = load = LoadBack(
            end=end, num_pages=num_pages, device_end=device_end, device_pages=device_pages, by_layer=by_layer
        )
        return load

    def apply_load_back(self, settled: LoadBackOutcome) -> None:
        """Give the loaded pages to their nodes, or free them if the load failed on any rank."""
        load = self._under_way.pop(settled.op)
        tiers, stats = self.tiers, self.stats
        load.is_settled, load.has_failed = True, not settled.is_ok
        stats.pages_loaded += load.num_pages * settled.is_ok
        stats.pages_not_loaded += load.num_pages * (not settled.is_ok)
        path_up = tiers.tree.path_to_root(load.end)
        run = tiers.run_ending_at(load.end, load.num_pages)
        if load.by_layer:
            tiers.device.unlock(load.device_end)
            for node in reversed(run):
                tiers.end_load_back(node, is_ok=settled.is_ok)
            if not settled.is_ok:
                self.controller.discard_load_back(settled.op)
        else:
            if settled.is_ok:
                self._put_on_device(run, load.device_pages)
            else:
                tiers.device.free(load.device_pages)
            self._record("cached" if settled.is_ok else "freed", settled.op, load.device_pages)
            tiers.device.unlock(load.device_end)
        tiers.host.unlock(path_up)
        tiers.touch(path_up[::-1])

    def _record(self, action: AllocationAction, number: int, device_pages: list[int]) -> None:
        log = self.controller.allocation_log
        log.record(action, "full", f"load {number}", "LoadBackTransfers", device_pages)

    def _put_on_device(self, run: list[RadixNode], device_pages: list[int]) -> None:
        for node, pages in pages_per_node(run, device_pages):
            if node.pages:  # a request has computed the node in the meantime
                self.tiers.device.free(pages)
            else:
                self.tiers.put_on_device(node, pages)


@dataclass(slots=True, kw_only=True)
class WriteTransfers:
    """Copies from the device to the host, and from the host to storage.

    Attributes:
        tiers: the tree.
        controller: begins and settles the operations.
        policy: when to write.
        stats: counts the results.
        num_pages_backing_up: host pages that are locked while they are written to storage.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    num_pages_backing_up: int = field(default=0, init=False)
    _writes: dict[int, tuple[RadixNode, int]] = field(default_factory=dict, init=False)
    _backups: dict[int, tuple[RadixNode, int]] = field(default_factory=dict, init=False)
    _has_inserted: bool = field(default=False, init=False)

    @property
    def num_pages_reserved(self) -> int:
        """Host pages that writes have reserved."""
        return sum(num_pages for _, num_pages in self._writes.values())

    def holdings(self) -> Iterator[PageHolding]:
        """Yield the device lock of each write to the host."""
        for number, (end, _) in self._writes.items():
            yield PageHolding(f"write {number}", "transfer", node=end)

    def host_locks(self) -> Iterator[tuple[str, RadixNode]]:
        """Yield each write to storage with the end of the prefix that it locks on the host."""
        for number, (end, _) in self._backups.items():
            yield f"backup {number}", end

    def on_insert(self, path: list[RadixNode]) -> None:
        """Apply the write policy to a path that a request has just cached."""
        if self.policy.write == "write_through":
            self.write_path(path)
        elif self.policy.write == "write_back":
            self._has_inserted = True
        else:
            self._write_hit_nodes(path)

    def on_hit(self, path: list[RadixNode]) -> None:
        """Count a request that found this path; copy the nodes that have reached ``write_threshold_hits``."""
        for node in path:
            node.num_hits += 1
        self._write_hit_nodes(path)

    def _write_hit_nodes(self, path: list[RadixNode]) -> None:
        # A request that finds a node also finds its ancestors, so the nodes with enough hits come first.
        self.write_path(takewhile(lambda node: node.num_hits >= self.policy.write_threshold_hits, path))

    def write_path(self, path: Iterable[RadixNode]) -> None:
        """Copy the nodes of a device path that are not on the host, parents first; back up those that are."""
        for node in path:
            if self.tiers.is_on_host(node):
                self._back_up(node)
            elif node not in self.tiers.writing and not self._begin_write(node):
                return

    @property
    def must_write_ahead(self) -> bool:
        """True if ``write_ahead`` would look for pages to copy."""
        return self._has_inserted and self.tiers.device.pool.num_free < self.policy.clean_ahead_pages

    def write_ahead(self) -> None:
        """With ``write_back``, copy the pages that will be evicted next, once free device pages run short.

        It acts only after an insertion, so that an idle scheduler does not repeat a failing copy.
        """
        tiers, wanted = self.tiers, self.policy.clean_ahead_pages
        if not self.must_write_ahead:
            return
        self._has_inserted = False
        oldest: list[RadixNode] = []
        for node in tiers.device.lru:
            if wanted <= 0:
                break
            wanted -= node.num_pages
            if not tiers.is_on_host(node):
                oldest.append(node)
        for node in oldest:
            self.write_path(reversed(tiers.tree.path_to_root(node)))

    def _begin_write(self, node: RadixNode) -> bool:
        tiers, parent = self.tiers, node.parent
        assert parent is not None
        if not (tiers.is_on_host(parent) or parent in tiers.writing) or not tiers.evict_host(node.num_pages):
            self.stats.pages_not_written += node.num_pages
            return False
        tiers.host.num_pages_used += node.num_pages
        tiers.device.lock(node)
        tiers.writing.add(node)
        self._writes[self.controller.write(node.pages)] = (node, node.num_pages)
        return True

    def apply_write(self, settled: WriteOutcome) -> None:
        """Put the written pages on the host tier, on all ranks or on none."""
        tiers, host_pages = self.tiers, settled.host_pages
        end, num_pages = self._writes.pop(settled.op)
        run = tiers.run_ending_at(end, num_pages)
        tiers.writing.difference_update(run)
        parent = run[0].parent
        assert parent is not None
        if host_pages and tiers.is_on_host(parent):
            for node, pages in pages_per_node(run, host_pages):
                tiers.membership.place_on_host(node, array("I", pages))
                self._back_up(node)
            self.stats.pages_written += num_pages
        else:
            # Either no rank or every rank has committed pages. In the second case every rank releases them.
            tiers.host.release(host_pages)
            tiers.host.num_pages_used -= num_pages - len(host_pages)
            self.stats.pages_not_written += num_pages
        tiers.device.unlock(end)
        for node in run:
            tiers.device.mark_joinable(node)

    def _back_up(self, node: RadixNode) -> None:
        """Write a host node to storage if its parent is stored or being stored."""
        tiers, parent = self.tiers, node.parent
        assert parent is not None
        if not self.controller.has_storage or tiers.is_stored(node) or node in tiers.backing_up:
            return
        if not (tiers.is_stored(parent) or parent in tiers.backing_up):
            return
        if self.num_pages_backing_up + node.num_pages > tiers.host.num_pages // _BACKUP_SHARE:
            self.stats.pages_not_backed_up += node.num_pages
            return
        tiers.host.lock(tiers.tree.path_to_root(node))
        tiers.backing_up.add(node)
        number = self.controller.write_to_storage(bytes(node.digests), tiers.membership.host_pages[node])
        self._backups[number] = (node, node.num_pages)
        self.num_pages_backing_up += node.num_pages

    def apply_backup(self, settled: BackupOutcome) -> None:
        """Mark pages as stored if every rank has stored its slice and their parent is stored."""
        tiers = self.tiers
        end, num_pages = self._backups.pop(settled.op)
        self.num_pages_backing_up -= num_pages
        run = tiers.run_ending_at(end, num_pages)
        parent = run[0].parent
        assert parent is not None
        is_stored = settled.is_ok and self.controller.has_storage and tiers.is_stored(parent)
        tiers.backing_up.difference_update(run)
        if is_stored:
            for node in run:
                tiers.membership.place_in_storage(node)
            self.stats.pages_backed_up += num_pages
        else:
            self.stats.pages_not_backed_up += num_pages
        tiers.host.unlock(tiers.tree.path_to_root(end))
        for node in run:
            tiers.device.mark_joinable(node)


@dataclass(slots=True, kw_only=True)
class Prefetch:
    """A prefetch of pages from storage to the host."""

    number: int
    packed: bytes
    namespace: PrefixNamespace
    first_page: int  # pages of the prefix that the tree held when the prefetch began
    anchor: RadixNode | None  # the last node of that prefix, locked on the host; None if it is not there
    num_reserved: int = 0
    num_read: int | None = None  # None: not settled


@dataclass(slots=True, kw_only=True)
class PrefetchTransfers:
    """Prefetches from storage to the host.

    Attributes:
        tiers: the tree.
        controller: begins and settles the operations.
        policy: the shortest prefix to prefetch.
        stats: counts the results.
        num_draining_pages: host pages of terminated prefetches to which a rank may still write.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    num_draining_pages: int = field(default=0, init=False)
    _under_way: dict[int, Prefetch] = field(default_factory=dict, init=False)

    @property
    def num_pages_reserved(self) -> int:
        """Host pages that prefetches have reserved."""
        return self.num_draining_pages + sum(prefetch.num_reserved for prefetch in self._under_way.values())

    def host_locks(self) -> Iterator[tuple[str, RadixNode]]:
        """Yield each prefetch with the end of the prefix that it locks on the host."""
        for number, prefetch in self._under_way.items():
            if prefetch.anchor is not None:
                yield f"prefetch {number}", prefetch.anchor

    def should_prefetch(self, packed: bytes, path: list[RadixNode]) -> bool:
        """Return whether the part of a prompt that is not in the tree is worth a prefetch.

        Args:
            packed: the tokens of the prompt.
            path: the part of it that the tree holds, a result of ``TierTree.match_path``.
        """
        num_pages = len(packed) // self.tiers.tree.page_bytes - sum(node.num_pages for node in path)
        return self.controller.has_storage and num_pages >= self.policy.prefetch_threshold_pages

    def start(self, packed: bytes, namespace: PrefixNamespace, path: list[RadixNode]) -> Prefetch:
        """Begin to read the pages that follow a path from storage."""
        tree, first_page = self.tiers.tree, sum(node.num_pages for node in path)
        end = path[-1] if path else tree.root
        prior = self.tiers.last_digest(end, namespace.seed())
        number = self.controller.prefetch(page_digests(packed[first_page * tree.page_bytes :], tree.page_size, prior))
        anchor = end if end in self.tiers.membership.host_pages else None
        if anchor is not None:
            self.tiers.host.lock(tree.path_to_root(anchor))
        prefetch = Prefetch(number=number, packed=packed, namespace=namespace, first_page=first_page, anchor=anchor)
        self._under_way[number] = prefetch
        self.stats.prefetches += 1
        return prefetch

    def terminate(self, prefetch: Prefetch) -> None:
        """End a prefetch immediately and put the pages that have landed on all ranks into the tree."""
        self.apply_prefetch(self.controller.terminate(prefetch.number))

    def reserve(self, hit: PrefetchHit) -> None:
        """Reserve host pages for a storage hit: at most half of those that the host can free.

        All ranks reserve the same number, because the page counts of ``HostTier`` are the same on all ranks.
        """
        host, prefetch = self.tiers.host, self._under_way[hit.op]
        num_pages = min(hit.num_pages, (host.num_pages_free + host.order.num_pages) // 2)
        if num_pages < self.policy.prefetch_threshold_pages or not self.tiers.evict_host(num_pages):
            num_pages = 0
        host.num_pages_used += num_pages
        prefetch.num_reserved = num_pages
        max_wait_s = self.policy.prefetch_max_wait_s(num_pages * self.tiers.tree.page_size)
        self.controller.prefetches.reserve(prefetch.number, num_pages, max_wait_s=max_wait_s)

    def apply_prefetch(self, settled: PrefetchOutcome) -> None:
        """Attach the pages that landed on all ranks to the tree, below the pages that it holds by now."""
        tiers, tree, host_pages = self.tiers, self.tiers.tree, settled.host_pages
        prefetch = self._under_way.pop(settled.op)
        tiers.host.num_pages_used -= prefetch.num_reserved - len(host_pages) - settled.num_draining_pages
        self.num_draining_pages += settled.num_draining_pages
        if prefetch.anchor is not None:
            tiers.host.unlock(tree.path_to_root(prefetch.anchor))
        stop = (prefetch.first_page + len(host_pages)) * tree.page_bytes
        descent = tree.find(prefetch.packed[:stop], prefetch.namespace.seed())
        path = tiers.device.split_path(descent)
        num_known = descent.num_pages - prefetch.first_page  # pages that a request has computed in the meantime
        parent = path[-1] if path else tree.root
        if num_known < 0 or not tiers.is_on_host(parent):
            num_known = len(host_pages)  # the tree has no parent for them on the host
        tiers.host.release(host_pages[:num_known])
        kept = host_pages[num_known:]
        if kept:
            packed = prefetch.packed[descent.num_pages * tree.page_bytes : stop]
            leaf = tiers.insert_on_host(parent, packed, array("I", kept), prefetch.namespace)
            if self.controller.has_storage and tiers.is_stored(parent):
                tiers.membership.place_in_storage(leaf)
            path.append(leaf)
        tiers.touch(path)
        prefetch.num_read = len(kept)
        self.stats.pages_prefetched += len(kept)
        self.stats.pages_revoked += prefetch.num_reserved - len(kept)
        self.stats.prefetches_revoked += not kept

    def apply_drained(self, drained: PrefetchDrained) -> None:
        """Count the drained pages of a terminated prefetch as free."""
        self.tiers.host.num_pages_used -= drained.num_pages
        self.num_draining_pages -= drained.num_pages


@dataclass(slots=True, kw_only=True)
class TierTransfers:
    """All transfers of one rank. Applies the decisions of the controller.

    Attributes:
        tiers: the tree.
        controller: settles the operations.
        writes, loads, reads: the transfers by direction.
        stats: counters of all transfers.
    """

    tiers: TierTree
    controller: HiCacheController
    writes: WriteTransfers
    loads: LoadBackTransfers
    reads: PrefetchTransfers
    stats: TierStats = field(default_factory=TierStats)

    @classmethod
    def over(cls, tiers: TierTree, controller: HiCacheController, policy: HiCachePolicy) -> TierTransfers:
        """Create the transfers over a tree."""
        stats = TierStats()
        return cls(
            tiers=tiers,
            controller=controller,
            writes=WriteTransfers(tiers=tiers, controller=controller, policy=policy, stats=stats),
            loads=LoadBackTransfers(tiers=tiers, controller=controller, policy=policy, stats=stats),
            reads=PrefetchTransfers(tiers=tiers, controller=controller, policy=policy, stats=stats),
            stats=stats,
        )

    def apply(self, decisions: list[TierDecision]) -> None:
        """Apply decisions to the tree, in order; then write ahead if the policy says so."""
        for decision in decisions:
            match decision:
                case WriteOutcome():
                    self.writes.apply_write(decision)
                case BackupOutcome():
                    self.writes.apply_backup(decision)
                case LoadBackOutcome():
                    self.loads.apply_load_back(decision)
                case PrefetchHit():
                    self.reads.reserve(decision)
                case PrefetchOutcome():
                    self.reads.apply_prefetch(decision)
                case PrefetchDrained():
                    self.reads.apply_drained(decision)
                case StorageDetached():
                    self.clear_storage_index()
        self.loads.budget_pages = self.controller.load_back_budget_pages
        self.writes.write_ahead()

    def check(self) -> None:
        """Check that the host pages in the tree and in flight add up to the used pages.

        Raises:
            CacheIntegrityError: they do not; the error contains the numbers.
        """
        in_tree = self.tiers.membership.num_pages[Tier.HOST]
        in_flight = self.writes.num_pages_reserved + self.reads.num_pages_reserved
        host = self.tiers.host
        if in_tree + in_flight != host.num_pages_used or host.num_pages_used > host.num_pages:
            raise CacheIntegrityError(
                f"{in_tree} host pages in the tree + {in_flight} in flight, but {host.num_pages_used} of "
                f"{host.num_pages} are counted as used"
            )

    def count_held(self) -> HeldCount:
        """Return how many device pages loads have reserved outside the tree."""
        return HeldCount(in_transfer=self.loads.num_pages_reserved)

    def holdings(self) -> Iterator[PageHolding]:
        """Yield the device pages and locks of each copy."""
        yield from self.loads.holdings()
        yield from self.writes.holdings()

    def host_locks(self) -> Iterator[tuple[str, RadixNode]]:
        """Yield each operation with the end of the prefix that it locks on the host."""
        yield from self.loads.host_locks()
        yield from self.writes.host_locks()
        yield from self.reads.host_locks()

    def clear_storage_index(self) -> None:
        """Count no page as stored."""
        for node in reversed(
            list(self.tiers.tree.walk())
        ):  # children first, so that the parent of a stored node stays stored
            self.tiers.membership.clear_storage_index(node)
