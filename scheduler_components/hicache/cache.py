"""HiRadixCache: a radix cache whose pages outlive the device: evicted to the host, kept in storage, brought back.

``HiCacheStepper`` takes it through a scheduler's step: one agreement of all ranks, and what follows from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import attrs

from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixMatch, PrefixNamespace, RadixCache, RadixNode
from scheduler_components.cache.block_hash import block_hash_array, block_hashes_of, pack_tokens
from scheduler_components.errors import CacheIntegrityError, ConfigError, TierDivergenceError
from scheduler_components.events import TIER_MEDIUM, KVCacheEvent, MediumGroup, Tier, medium_group
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.prefetch import ActivePrefetches
from scheduler_components.hicache.prefetch_queue import PrefetchQueue
from scheduler_components.hicache.tiers import TierTree
from scheduler_components.hicache.transfers import TierTransfers
from scheduler_components.page_operations import Instruction, IoEvent
from scheduler_components.ports import HostPages, NullPageHook, PageHolders, PageHook, PageMover
from scheduler_components.values import TierStats

__all__ = ["HiRadixCache", "HiCacheStepper"]

_SPREAD = 0x9E3779B97F4A7C15  # odd, so that counts that differ give digests that differ
_STATE_SLOT = Slots(("equal", "state"))


class HiRadixCache:
    """What ``RadixCache`` is to a scheduler, over three tiers. Pure.

    A ``KvEventSource``, ``PoolSource`` and ``HeldBlocksSource``.

    To requests only what is on the device is a match; ``prefetch_queue`` brings the rest there. Ranks that make the
    same
    calls and settle the same agreed values hold the same pages on every tier, whatever their I/O does. Once per step:
    ``handle`` each I/O event, bring ``proposal``, ``settle`` what was agreed, carry out ``pop_instructions``;
    ``HiCacheStepper`` does so.

    Args:
        page_size: tokens per page.
        capacity_tokens: size of the device's KV pool; rounded down to whole pages.
        host: this rank's host pages.
        num_host_pages: pages that every rank of the replica has on its host.
        policy: when to write, when to stop prefetching.
        record: keep events for ``take_events``; give ``ParallelState.owns_kv_stream``.
        page_hook: learns which device pages were computed and loaded.

    Attributes:
        prefetch_queue: ask it, before a request runs, to bring pages closer.

    Raises:
        ConfigError: a size is below one page.
    """

    __slots__ = ("_controller", "_device", "_tiers", "_transfers", "prefetch_queue")

    def __init__(
        self,
        *,
        page_size: int,
        capacity_tokens: int,
        host: HostPages,
        num_host_pages: int,
        policy: HiCachePolicy | None = None,
        record: bool = False,
        page_hook: PageHook = NullPageHook(),
    ) -> None:
        if num_host_pages < 1:
            raise ConfigError("num_host_pages", num_host_pages, "is no host tier", "give at least 1, or use RadixCache")
        policy = policy if policy is not None else HiCachePolicy()
        self._tiers = TierTree(
            page_size=page_size,
            capacity_tokens=capacity_tokens,
            host=host,
            num_host_pages=num_host_pages,
            record=record,
            page_hook=page_hook,
        )
        self._device = self._tiers.device
        self._controller = HiCacheController(host=host, prefetches=ActivePrefetches(policy=policy, host=host))
        self._transfers = TierTransfers.over(self._tiers, self._controller, policy)
        self.prefetch_queue = PrefetchQueue(transfers=self._transfers, policy=policy)

    # --- what RadixCache has, of the device ---

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._device.page_size

    @property
    def capacity_tokens(self) -> int:
        """Size of the device's KV pool, in whole pages."""
        return self._device.capacity_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated without evicting."""
        return self._device.free_tokens

    @property
    def evictable_tokens(self) -> int:
        """Tokens on the device that neither a request nor an operation has locked."""
        return self._device.evictable_tokens

    @property
    def used_tokens(self) -> int:
        """Device tokens that requests and operations hold: neither free nor evictable."""
        return self._device.used_tokens

    @property
    def num_event_collapses(self) -> int:
        """How often nobody took the events for so long that the backlog was replaced by the present content."""
        return self._device.num_event_collapses

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        """Find the longest prefix on the device. Mark it, and what follows on the host, as the most recently used.

        Raises:
            ConfigError: a token id does not fit u32, or the namespace cannot be encoded.
        """
        path = self._tiers.match_path(pack_tokens(token_ids), (namespace or DEFAULT_NAMESPACE).seed())
        return self._device.match_from_path(path[: self._tiers.num_on_device(path)])

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> PrefixMatch:
        """Cache a computed prefix and take over its pages: as ``RadixCache.insert``, with its errors.

        Where the host has a page that the device has not, the caller's page becomes the device's.
        """
        path = self._device.insert_path(token_ids, pages, namespace or DEFAULT_NAMESPACE)
        self._transfers.writes.on_insert(path)
        return self._device.match_from_path(path)

    def lock(self, node: RadixNode) -> None:
        """Keep the prefix that ends in ``node`` on the device, once more; CacheIntegrityError where it is not there."""
        self._device.lock(node)

    def unlock(self, node: RadixNode) -> None:
        """Give back one ``lock`` of ``node``; CacheIntegrityError, and nothing has changed, where it is not locked."""
        self._device.unlock(node)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out device pages to a request: as ``RadixCache.allocate``, with its errors."""
        return self._device.allocate(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        """Take back pages that ``allocate`` gave and ``insert`` did not take over: as ``RadixCache.free``."""
        self._device.free(pages)

    def evict(self, num_pages: int) -> int:
        """Free the least recently used unlocked device pages; returns how many. The host keeps what it has."""
        return self._device.evict(num_pages)

    def clear(self) -> None:
        """Forget every prefix, on device and host. Storage keeps its pages: keys name their content.

        Raises:
            CacheIntegrityError: a request still locks a prefix, or pages are on their way; nothing has changed.
        """
        if self.num_operations:
            raise CacheIntegrityError(f"{self.num_operations} operations are under way: step on, then clear")
        self._tiers.clear()

    def clear_storage_index(self) -> None:
        """Count nothing as stored any more: call it on every rank in the same step, once the store was cleared.

        What is cached is written to storage again when a request next inserts it.

        Raises:
            CacheIntegrityError: pages are on their way; nothing has changed.
        """
        if self.num_operations:
            raise CacheIntegrityError(f"{self.num_operations} operations are under way: step on, then forget")
        self._transfers.clear_storage_index()

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events of all tiers since the last call, in order, and forget them."""
        return self._device.take_events()

    def block_hashes(self, tier: Tier = Tier.DEVICE) -> Iterator[int]:
        """The hash of every page on one tier, parents before children. Walks the tree: for checks, not for steps."""
        for node in self._tiers.tree.walk():
            if tier in self._tiers.membership.tiers_of(node):
                yield from block_hashes_of(node.digests)

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Every page of the tree on every tier, as ``HeldBlocksSource`` asks. Walks the tree once."""
        digests: dict[Tier, list[bytearray]] = {tier: [] for tier in Tier}
        for node in self._tiers.tree.walk():
            for tier in self._tiers.membership.tiers_of(node):
                digests[tier].append(node.digests)
        return {medium_group(TIER_MEDIUM[tier]): block_hash_array(b"".join(runs)) for tier, runs in digests.items()}

    def check_integrity(self) -> None:
        """Check tree, pools, orders, tiers and ledger against each other. Walks everything.

        Raises:
            CacheIntegrityError: with the arithmetic that failed.
        """
        self._tiers.check()
        self._transfers.check()

    @property
    def device(self) -> RadixCache:
        """The device tier, for checks: whoever changes it by itself breaks the tiers."""
        return self._device

    @property
    def transfers(self) -> PageHolders:
        """What copies under way hold and lock on the device, for checks."""
        return self._transfers

    # --- the step ---

    @property
    def settings(self) -> dict[str, object]:
        """What must be the same on every rank, by field: sizes and policy."""
        sizes: dict[str, object] = {
            "page_size": self.page_size,
            "capacity_tokens": self.capacity_tokens,
            "num_host_pages": self._tiers.host.num_pages,
        }
        return sizes | attrs.asdict(self.prefetch_queue.policy)

    @property
    def num_operations(self) -> int:
        """Operations that have not settled; the same on every rank."""
        return self._controller.num_operations

    @property
    def state_digest(self) -> int:
        """What is on which tier, what is free, what is under way, as one unsigned 64-bit number; equal on all ranks."""
        tiers = self._tiers
        digest = tiers.membership.digest
        for count in (tiers.device.pool.num_free, tiers.host.num_pages_used, self.num_operations):
            digest = (digest * _SPREAD + count) % 2**64
        return digest

    def handle(self, event: IoEvent) -> None:
        """Take in what this rank's I/O reports."""
        self._controller.handle(event)

    def proposal(self, step: int, *, has_storage: bool, load_back_budget_pages: int, now_s: float) -> Proposal:
        """Return what this rank brings to the step's one agreement: the same slots at every step.

        Args:
            step: the same number on all ranks.
            has_storage: this rank has a storage backend attached.
            load_back_budget_pages: pages that this rank can begin to copy to the device.
            now_s: this rank's monotonic clock.
        """
        proposal = Proposal("hicache step", step=step)
        proposal.fill(_STATE_SLOT, (self.state_digest - 2**63,))
        self._controller.fill(
            proposal, has_storage=has_storage, load_back_budget_pages=load_back_budget_pages, now_s=now_s
        )
        return proposal

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Carry out what all ranks agreed.

        Raises:
            TierDivergenceError: they do not hold the same pages; nothing is carried out.
        """
        if not agreed.flags["state"]:
            raise TierDivergenceError(step, self.state_digest)
        self._transfers.apply(self._controller.apply(agreed))

    def pop_instructions(self) -> list[Instruction]:
        """Return what is to be moved, in order."""
        return self._controller.pop_instructions()

    def stats(self) -> TierStats:
        """Return the counters of this moment."""
        stats = self._transfers.stats.copy()
        stats.pages_dropped = self._tiers.num_dropped_pages
        return stats

    def num_pages_on(self, tier: Tier) -> int:
        """Pages of the tree that are on ``tier``."""
        return self._tiers.membership.num_pages[tier]

    def __repr__(self) -> str:
        held = ", ".join(f"{count} {tier.name.lower()}" for tier, count in self._tiers.membership.num_pages.items())
        return f"<HiRadixCache page_size={self.page_size}, pages: {held}; {self.num_operations} operations under way>"


@dataclass(slots=True, kw_only=True)
class HiCacheStepper:
    """Lets a cache, this rank's I/O and the other ranks meet once per step. All on the scheduler's thread.

    Attributes:
        cache: decides.
        groups: agrees. Who shares it asks on the same thread, in one order on all ranks.
        mover: moves pages.
        settings: what else than the cache's settings must be the same on every rank, by field; of a store, say.
        clock: monotonic seconds of this rank; only ever compared with itself.
        num_steps: steps so far.
    """

    cache: HiRadixCache
    groups: ParallelGroups
    mover: PageMover
    settings: Mapping[str, object] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    num_steps: int = field(default=0, init=False)

    def step(self) -> None:
        """Bring this rank's facts, agree, carry out. Every rank calls it in each of its steps, without a condition.

        The first step also compares the settings of all ranks.

        Raises:
            SettingsDivergenceError: ranks have different settings; the error names fields and ranks.
            SyncTimeoutError, SyncDivergenceError: the ranks did not come together.
            TierDivergenceError: they hold different pages.
            CacheIntegrityError: the kit is to blame.
        """
        cache, mover = self.cache, self.mover
        if not self.num_steps:
            self.groups.check_equal("hicache settings", {**cache.settings, **self.settings}, step=0)
        self.num_steps += 1
        for event in mover.poll():
            cache.handle(event)
        proposal = cache.proposal(
            self.num_steps,
            has_storage=mover.has_storage,
            load_back_budget_pages=mover.load_back_budget_pages,
            now_s=self.clock(),
        )
        cache.apply(self.num_steps, self.groups.reduce(proposal))
        self.submit()

    def submit(self) -> None:
        """Begin what was decided since the last step, before a forward that waits for it; without an agreement."""
        self.mover.submit(self.cache.pop_instructions())

    def close(self) -> None:
        """End this rank's I/O, then its part in agreements. Safe to call twice."""
        self.mover.close()
        self.groups.close()
