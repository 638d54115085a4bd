"""Pages on their way between tiers, from the tree's side.

``WriteTransfers`` copies to the host and to storage, ``LoadBackTransfers`` copies back to the device,
``PrefetchTransfers`` prefetches
from storage. Each begins operations, the same ones on every rank, and puts their result in the tree when all ranks
agree that they have ended. ``TierTransfers`` gives each decision to whom it concerns; ``PrefetchQueue`` is what a
scheduler asks for a request that waits.

An operation is remembered as the node that ends it and its number of pages, because requests may split the nodes in
between at any time. What an operation copies is locked until it settles.
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
from scheduler_components.page_operations import (
    BackupOutcome,
    Decision,
    LoadBackOutcome,
    PrefetchDrained,
    PrefetchHit,
    PrefetchOutcome,
    StorageDetached,
    WriteOutcome,
)
from scheduler_components.values import HeldCount, PageHolding, TierStats

__all__ = ["LoadBackTransfers", "WriteTransfers", "PrefetchTransfers", "TierTransfers"]


_BACKUP_SHARE = 4  # a slow storage may lock one host page in four; what is beyond that is not backed up


@dataclass(slots=True, kw_only=True)
class LoadBack:
    """Pages on their way from the host to the device.

    Attributes:
        end: the node that ends them.
        num_pages: how many.
        device_end: the node that is locked on the device: the one that they follow, or ``end`` with ``by_layer``.
        device_pages: those that no node has yet; none with ``by_layer``.
        by_layer: requests read them already.
        is_settled, has_failed: as all ranks agreed.
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
    """Loads of prefixes that requests wait for.

    Attributes:
        tiers: the tree.
        controller: makes the operations and settles them.
        policy: what is worth a load.
        stats: counts what comes of it.
        budget_pages: pages that may be loaded until the next agreement.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    budget_pages: int = field(default=0, init=False)
    _under_way: dict[int, LoadBack] = field(default_factory=dict, init=False)

    @property
    def is_idle(self) -> bool:
        """No load is under way, so none will give room back."""
        return not self._under_way

    @property
    def num_pages_reserved(self) -> int:
        """Device pages of loads under way."""
        return sum(len(load.device_pages) for load in self._under_way.values())

    def holdings(self) -> Iterator[PageHolding]:
        """What each load under way holds on the device."""
        for number, load in self._under_way.items():
            yield PageHolding(f"load {number}", "transfer", load.device_pages, node=load.device_end)

    def start(self, path: list[RadixNode], max_pages: int, *, by_layer: bool = False) -> LoadBack | None:
        """Load what follows on the host where a path leaves the device, as far as the agreed room and the pool allow.

        None when that is not worth it, when the device pages are not to be had now, or when what they follow is itself
        loading_back and might not come.

        Args:
            path: as ``TierTree.match_path`` gives it.
            max_pages: most pages to load.
            by_layer: put them in the tree at once, for a request that runs while they come.
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
        if by_layer:
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
        """Put loaded pages on the device, or free them, on all ranks alike."""
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
            tiers.device.unlock(load.device_end)
        tiers.host.unlock(path_up)
        tiers.touch(path_up[::-1])

    def _put_on_device(self, run: list[RadixNode], device_pages: list[int]) -> None:
        for node, pages in pages_per_node(run, device_pages):
            if node.pages:  # a request has computed it in the meantime
                self.tiers.device.free(pages)
            else:
                self.tiers.put_on_device(node, pages)


@dataclass(slots=True, kw_only=True)
class WriteTransfers:
    """Copies that make eviction harmless: from the device to the host, and from the host to storage.

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

    def holdings(self) -> Iterator[PageHolding]:
        """What each write to the host that is under way has locked on the device."""
        for number, (end, _) in self._writes.items():
            yield PageHolding(f"write {number}", "transfer", node=end)

    def on_insert(self, path: list[RadixNode]) -> None:
        """With ``write_through``: copy a path that a request has just cached. With ``write_back``: look ahead soon."""
        if self.policy.write == "write_through":
            self.write_path(path)
        elif self.policy.write == "write_back":
            self._has_news = True
        else:
            self._write_what_was_found(path)

    def on_hit(self, path: list[RadixNode]) -> None:
        """Count one more request that found a path in the tree; copy what has been found often enough by now."""
        for node in path:
            node.num_hits += 1
        self._write_what_was_found(path)

    def _write_what_was_found(self, path: list[RadixNode]) -> None:
        # Who finds a node finds what is above it, so those that were found often enough come first.
        self.write_path(takewhile(lambda node: node.num_hits >= self.policy.write_threshold_hits, path))

    def write_path(self, path: Iterable[RadixNode]) -> None:
        """Copy what of a path on the device is not on the host, parents first; back up what is on the host."""
        for node in path:
            if self.tiers.is_on_host(node):
                self._back_up(node)
            elif node not in self.tiers.writing and not self._begin_write(node):
                return

    def write_ahead(self) -> None:
        """With ``write_back``: copy the device pages that will be evicted next, once pages run short.

        Only after an insertion: a copy that fails is not tried again and again while nothing happens.
        """
        tiers, wanted = self.tiers, self.policy.clean_ahead_pages
        if not self._has_news or tiers.device.pool.num_free >= wanted:
            return
        self._has_news = False
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
        """Put written pages in the tree, on all ranks or on none."""
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
            # Either no rank has committed pages, or all have; then they go back on all.
            tiers.host.release(host_pages)
            tiers.host.num_pages_used -= num_pages - len(host_pages)
            self.stats.pages_not_written += num_pages
        tiers.device.unlock(end)
        for node in run:
            tiers.device.mark_joinable(node)

    def _back_up(self, node: RadixNode) -> None:
        """Write a node on the host to storage, unless its parent is not there and not on the way."""
        tiers, parent = self.tiers, node.parent
        assert parent is not None
        if not self.controller.agreed.has_storage or tiers.is_stored(node) or node in tiers.backing_up:
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
        """Count pages as stored where every rank's part of them is, and what they hang on is too."""
        tiers = self.tiers
        end, num_pages = self._backups.pop(settled.op)
        self.num_pages_backing_up -= num_pages
        run = tiers.run_ending_at(end, num_pages)
        parent = run[0].parent
        assert parent is not None
        is_stored = settled.is_ok and self.controller.agreed.has_storage and tiers.is_stored(parent)
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
    """Pages on their way from storage to the host."""

    number: int
    packed: bytes
    namespace: PrefixNamespace
    first_page: int  # pages of the prefix that the tree held at the start
    anchor: RadixNode | None  # their end, locked on the host; None where it is not there
    num_reserved: int = 0
    num_read: int | None = None  # None: not settled


@dataclass(slots=True, kw_only=True)
class PrefetchTransfers:
    """Prefetches from storage to the host, for requests that wait.

    Attributes:
        tiers: the tree.
        controller: makes the operations and settles them.
        policy: what is worth a prefetch.
        stats: counts what comes of it.
        num_draining_pages: host pages of prefetches that were given up and that some rank may still write to.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    num_draining_pages: int = field(default=0, init=False)
    _under_way: dict[int, Prefetch] = field(default_factory=dict, init=False)

    @property
    def num_pages_reserved(self) -> int:
        """Host pages of prefetches under way."""
        return self.num_draining_pages + sum(prefetch.num_reserved for prefetch in self._under_way.values())

    def should_prefetch(self, packed: bytes, path: list[RadixNode]) -> bool:
        """Say whether storage may have enough of what follows a path.

        Args:
            packed: the tokens of the prompt.
            path: what of it the tree holds, as ``TierTree.match_path`` gives it.
        """
        num_pages = len(packed) // self.tiers.tree.page_bytes - sum(node.num_pages for node in path)
        return self.controller.agreed.has_storage and num_pages >= self.policy.prefetch_threshold_pages

    def start(self, packed: bytes, namespace: PrefixNamespace, path: list[RadixNode]) -> Prefetch:
        """Read from storage what follows a path."""
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
        """Wait no longer: what has landed on every rank is put in the tree, here and now."""
        self.apply_prefetch(self.controller.terminate(prefetch.number))

    def reserve(self, hit: PrefetchHit) -> None:
        """Take room for what storage holds: at most half of what the host can free, so that prefetches never fill it.

        The ledger is the same on every rank, so all ranks take the same number.
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
        """Put what landed on every rank in the tree, below what is there by now."""
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
            num_known = len(host_pages)  # nowhere to hang them
        tiers.host.release(host_pages[:num_known])
        kept = host_pages[num_known:]
        if kept:
            packed = prefetch.packed[descent.num_pages * tree.page_bytes : stop]
            leaf = tiers.insert_on_host(parent, packed, array("I", kept), prefetch.namespace)
            if self.controller.agreed.has_storage and tiers.is_stored(parent):
                tiers.membership.place_in_storage(leaf)
            path.append(leaf)
        tiers.touch(path)
        prefetch.num_read = len(kept)
        self.stats.pages_prefetched += len(kept)
        self.stats.pages_revoked += prefetch.num_reserved - len(kept)
        self.stats.prefetches_revoked += not kept

    def apply_drained(self, drained: PrefetchDrained) -> None:
        """Count the pages of a prefetch that was given up as free."""
        self.tiers.host.num_pages_used -= drained.num_pages
        self.num_draining_pages -= drained.num_pages


@dataclass(slots=True, kw_only=True)
class TierTransfers:
    """All ways between the tiers of one rank's tree. Carries out what all ranks agreed.

    Attributes:
        tiers: the tree.
        controller: settles the operations.
        writes, loads, reads: the ways.
        stats: what came of it all.
    """

    tiers: TierTree
    controller: HiCacheController
    writes: WriteTransfers
    loads: LoadBackTransfers
    reads: PrefetchTransfers
    stats: TierStats = field(default_factory=TierStats)

    @classmethod
    def over(cls, tiers: TierTree, controller: HiCacheController, policy: HiCachePolicy) -> TierTransfers:
        """Put the ways together."""
        stats = TierStats()
        return cls(
            tiers=tiers,
            controller=controller,
            writes=WriteTransfers(tiers=tiers, controller=controller, policy=policy, stats=stats),
            loads=LoadBackTransfers(tiers=tiers, controller=controller, policy=policy, stats=stats),
            reads=PrefetchTransfers(tiers=tiers, controller=controller, policy=policy, stats=stats),
            stats=stats,
        )

    def apply(self, decisions: list[Decision]) -> None:
        """Do to the tree what all ranks have decided, in order; then what follows from it by policy."""
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
        self.loads.budget_pages = self.controller.agreed.load_back_budget_pages
        self.writes.write_ahead()

    def check(self) -> None:
        """Check the ledger of host pages: tree + in flight = used.

        Raises:
            CacheIntegrityError: with the numbers.
        """
        in_tree = self.tiers.membership.num_pages[Tier.HOST]
        in_flight = self.writes.num_pages_reserved + self.reads.num_pages_reserved
        host = self.tiers.host
        if in_tree + in_flight != host.num_pages_used or host.num_pages_used > host.num_pages:
            raise CacheIntegrityError(
                f"{in_tree} host pages in the tree + {in_flight} in flight, but the ledger says that "
                f"{host.num_pages_used} of {host.num_pages} are used"
            )

    def count_held(self) -> HeldCount:
        """Device pages outside the tree: those that loads fill."""
        return HeldCount(in_transfer=self.loads.num_pages_reserved)

    def holdings(self) -> Iterator[PageHolding]:
        """What each copy under way holds and locks on the device."""
        yield from self.loads.holdings()
        yield from self.writes.holdings()

    def clear_storage_index(self) -> None:
        """What storage holds is no longer known."""
        for node in reversed(list(self.tiers.tree.walk())):  # children first, so that stored stays closed upwards
            self.tiers.membership.clear_storage_index(node)
