"""HiRadixCache: a radix cache that also keeps pages on the host and in storage and loads them back.

``HiCacheStepper`` steps it: an agreement of all ranks, then the transfers that follow from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import attrs

from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.cache import PrefixMatch, PrefixNamespace, RadixCache, RadixNode
from scheduler_components.cache.block_hash import block_hash_array, block_hashes_of, pack_tokens
from scheduler_components.errors import CacheIntegrityError, ConfigError, TierDivergenceError
from scheduler_components.events import TIER_MEDIUM, KVCacheEvent, MediumGroup, Tier, medium_group
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.host_tier_pool import HostTierPool
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.prefetch import ActivePrefetches
from scheduler_components.hicache.prefetch_queue import PrefetchQueue
from scheduler_components.hicache.tiers import TierTree
from scheduler_components.hicache.transfers import TierTransfers
from scheduler_components.ports import (
    AllocationSink,
    DecisionSink,
    HostPages,
    PageHolders,
    PageHook,
    PageMover,
)
from scheduler_components.values import TierStats
from scheduler_components.values.page_operations import Instruction, IoEvent

if TYPE_CHECKING:  # the host pool needs numpy, which a rank without tiers does not load
    from scheduler_components.hicache.memory import HostPool

__all__ = ["HiRadixCache", "HiCacheStepper"]

_DIGEST_FACTOR = 0x9E3779B97F4A7C15  # odd, so that different counts give different digests
_STATE_SLOT = Slots(("equal", "state"))


class HiRadixCache:
    """A prefix cache over three tiers, with the interface of ``RadixCache``. Pure.

    It is a ``KvEventSource``, a ``PoolSource``, a ``HeldBlocksSource``, and for control requests a ``FlushableCache``
    whose owner publishes the events of a clear immediately.

    A request matches only pages on the device; ``prefetch_queue`` moves other pages there. Ranks that make the same
    calls and apply the same agreed values hold the same pages on every tier, independent of their I/O. Once per step,
    ``HiCacheStepper`` passes each I/O event to ``handle``, fills the proposal of the step, passes the agreed values to
    ``apply`` and submits ``pop_instructions``.

    Args:
        page_size: tokens per page.
        capacity_tokens: size of the device's KV pool; rounded down to whole pages.
        host: the host pool of this rank.
        num_host_pages: the smallest number of host pages of any rank.
        policy: when to write, prefetch and load pages.
        record: record events for ``take_events``; pass ``ParallelState.owns_kv_stream``.
        page_hook: called with the device pages that were computed or loaded.

    Attributes:
        prefetch_queue: fetches the pages of waiting requests.

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
        page_hook: PageHook | None = None,
    ) -> None:
        if num_host_pages < 1:
            raise ConfigError(
                "num_host_pages", num_host_pages, "is too small for a host tier", "give at least 1, or use RadixCache"
            )
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

    # --- the interface of RadixCache, for the device tier ---

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
        """Tokens that can be allocated without eviction."""
        return self._device.free_tokens

    @property
    def evictable_tokens(self) -> int:
        """Device tokens in the cache that no request and no operation has locked."""
        return self._device.evictable_tokens

    @property
    def used_tokens(self) -> int:
        """Device tokens that requests and operations hold: neither free nor evictable."""
        return self._device.used_tokens

    @property
    def num_event_collapses(self) -> int:
        """How often the event backlog grew so long that the present content replaced it."""
        return self._device.num_event_collapses

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        """Return the longest prefix on the device. It and its continuation on the host become the most recently used.

        Raises:
            ConfigError: a token id does not fit u32, or the namespace cannot be encoded.
        """
        path = self._tiers.match_path(pack_tokens(token_ids), (namespace or self._device.namespace).seed())
        return self._device.match_from_path(path[: self._tiers.num_on_device(path)])

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> PrefixMatch:
        """Cache a computed prefix and take ownership of its pages, as ``RadixCache.insert`` does, with its errors.

        If a page is on the host only, the caller's page becomes its device page.
        """
        path = self._device.insert_path(token_ids, pages, namespace or self._device.namespace)
        self._transfers.writes.on_insert(path)
        return self._device.match_from_path(path)

    def lock(self, node: RadixNode) -> None:
        """Lock the prefix that ends in ``node`` on the device; CacheIntegrityError if it is not on the device."""
        self._device.lock(node)

    def unlock(self, node: RadixNode) -> None:
        """Release one lock of ``node``; CacheIntegrityError, without a change, if it is not locked."""
        self._device.unlock(node)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate device pages for a request, as ``RadixCache.allocate`` does, with its errors."""
        return self._device.allocate(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        """Free pages from ``allocate`` that were not inserted, as ``RadixCache.free`` does."""
        self._device.free(pages)

    def write_to_host(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> None:
        """Begin to copy the device pages of a prefix to the host, whatever the write policy says.

        For a request that was preempted and will run again. Pages for which the host has no room are not copied.
        """
        path = self._tiers.match_path(pack_tokens(token_ids), (namespace or self._device.namespace).seed())
        self._transfers.writes.write_path(path[: self._tiers.num_on_device(path)])

    @property
    def num_pages_in_transfer(self) -> int:
        """Device pages that copies between device and host hold; the same number on all ranks."""
        return self._transfers.writes.num_pages_reserved + self._transfers.loads.num_pages_reserved

    @property
    def must_write_ahead(self) -> bool:
        """True if the next ``apply`` begins copies without any I/O event, because free pages run short."""
        return self._transfers.writes.must_write_ahead

    def evict(self, num_pages: int) -> int:
        """Evict the least recently used unlocked device pages; return how many. Host copies stay."""
        return self._device.evict(num_pages)

    def clear(self, weight_version: str | None = None) -> None:
        """Remove every prefix from device and host. Storage keeps its pages, because keys identify their content.

        Args:
            weight_version: version of the weights that compute all later pages, as for ``RadixCache.clear``.

        Raises:
            CacheIntegrityError: a request still locks a prefix, or a transfer is under way; nothing has changed.
        """
        if self.num_operations:
            raise CacheIntegrityError(f"{self.num_operations} operations are under way; step until none is, then clear")
        self._tiers.clear(weight_version)

    def clear_storage_index(self) -> None:
        """Count no page as stored. Call it on every rank in the same step after the store was cleared.

        Cached pages are written to storage again when a request next inserts them.

        Raises:
            CacheIntegrityError: a transfer is under way; nothing has changed.
        """
        if self.num_operations:
            raise CacheIntegrityError(
                f"{self.num_operations} operations are under way; step until none is, then clear the index"
            )
        self._transfers.clear_storage_index()

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events of all tiers since the last call, in order."""
        return self._device.take_events()

    def block_hashes(self, tier: Tier = Tier.DEVICE) -> Iterator[int]:
        """Yield the hash of every page on one tier, parents before children. It walks the whole tree."""
        for node in self._tiers.tree.walk():
            if tier in self._tiers.membership.tiers_of(node):
                yield from block_hashes_of(node.digests)

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Return the hashes of all pages by tier, as ``HeldBlocksSource`` requires. It walks the tree once."""
        digests: dict[Tier, list[bytearray]] = {tier: [] for tier in Tier}
        for node in self._tiers.tree.walk():
            for tier in self._tiers.membership.tiers_of(node):
                digests[tier].append(node.digests)
        return {medium_group(TIER_MEDIUM[tier]): block_hash_array(b"".join(runs)) for tier, runs in digests.items()}

    def check_integrity(self) -> None:
        """Run a full check of tree, pools, eviction orders, tiers and page counts.

        Raises:
            CacheIntegrityError: with the count that does not add up.
        """
        self._tiers.check()
        self._transfers.check()

    @property
    def device(self) -> RadixCache:
        """The device tier, for checks. Changing it directly breaks the other tiers."""
        return self._device

    @property
    def transfers(self) -> PageHolders:
        """The pages and locks that copies hold on the device, for checks."""
        return self._transfers

    def host_pool(self, pages: HostPool) -> HostTierPool:
        """Return the host tier for checks.

        Args:
            pages: the host pool that this cache was created with.
        """
        return HostTierPool(pages=pages, tiers=self._tiers, transfers=self._transfers)

    def record_allocations(self, log: AllocationSink) -> None:
        """Record from now on which operation takes and returns which pages of host and device."""
        self._controller.allocation_log = self._controller.prefetches.allocation_log = log

    def record_decisions(self, log: DecisionSink) -> None:
        """Note from now on what is evicted from the device, and which operations begin and end with which result."""
        self._device.decisions = self._controller.decisions = log

    # --- the step ---

    @property
    def settings(self) -> dict[str, object]:
        """Sizes and policy by field. They must be the same on every rank."""
        sizes: dict[str, object] = {
            "page_size": self.page_size,
            "capacity_tokens": self.capacity_tokens,
            "num_host_pages": self._tiers.host.num_pages,
        }
        return sizes | attrs.asdict(self.prefetch_queue.policy)

    @property
    def num_operations(self) -> int:
        """Operations that have not settled; the same number on all ranks."""
        return self._controller.num_operations

    @property
    def state_digest(self) -> int:
        """An unsigned 64-bit digest of the pages per tier, the free pages and the operations; equal on all ranks."""
        tiers = self._tiers
        digest = tiers.membership.digest
        for count in (tiers.device.pool.num_free, tiers.host.num_pages_used, self.num_operations):
            digest = (digest * _DIGEST_FACTOR + count) % 2**64
        return digest

    def handle(self, event: IoEvent) -> None:
        """Record an I/O event of this rank."""
        self._controller.handle(event)

    def proposal(
        self, step: int, *, has_storage: bool, load_back_budget_pages: int, now_s: float | None = None
    ) -> Proposal:
        """Return this rank's proposal for an agreement about this cache only, with the same slots at every step.

        Args:
            step: the same number on all ranks.
            has_storage, load_back_budget_pages: as for ``fill``.
            now_s: monotonic seconds of the leading rank; None on the other ranks.
        """
        proposal = Proposal("hicache step", step=step)
        proposal.clock(now_s)
        self.fill(proposal, has_storage=has_storage, load_back_budget_pages=load_back_budget_pages)
        return proposal

    def fill(self, proposal: Proposal, *, has_storage: bool, load_back_budget_pages: int) -> None:
        """Add this rank's state to the step's proposal: the same slots at every step.

        Args:
            proposal: has the slot of the clock.
            has_storage: this rank has a storage backend attached.
            load_back_budget_pages: pages that this rank can begin to copy to the device.
        """
        proposal.fill(_STATE_SLOT, (self.state_digest - 2**63,))
        self._controller.fill(proposal, has_storage=has_storage, load_back_budget_pages=load_back_budget_pages)

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Apply the agreed values of a step.

        Raises:
            TierDivergenceError: the ranks do not hold the same pages; nothing is applied.
        """
        if not agreed.flags["state"]:
            raise TierDivergenceError(step, self.state_digest)
        self._transfers.apply(self._controller.apply(agreed))

    def pop_instructions(self) -> list[Instruction]:
        """Return the instructions for the mover, in order."""
        return self._controller.pop_instructions()

    def stats(self) -> TierStats:
        """Return a copy of the counters."""
        stats = copy(self._transfers.stats)
        stats.pages_dropped = self._tiers.num_dropped_pages
        return stats

    def num_pages_on(self, tier: Tier) -> int:
        return self._tiers.membership.num_pages[tier]

    def __repr__(self) -> str:
        held = ", ".join(f"{count} {tier.name.lower()}" for tier, count in self._tiers.membership.num_pages.items())
        return f"<HiRadixCache page_size={self.page_size}, pages: {held}; {self.num_operations} operations under way>"


@dataclass(slots=True, kw_only=True)
class HiCacheStepper:
    """Connects a cache with this rank's mover and the other ranks, on the scheduler's thread.

    It is an ``AgreementPart``: a scheduler with a ``StepAgreement`` lists it among the parts. Without one, ``step``
    agrees about the cache alone.

    Attributes:
        cache: decides.
        groups: the ranks that agree. Other components may share them if they call them on the same thread, in one order
            on all ranks.
        mover: moves pages.
        settings: further settings that must be the same on every rank, by field, for example of the store.
        clock: monotonic seconds of this rank, for ``step``.
        leads: whether this rank's clock counts in ``step``. If several ranks lead, the smallest of their clocks counts.
        num_steps: steps so far.
    """

    cache: HiRadixCache
    groups: ParallelGroups
    mover: PageMover
    settings: Mapping[str, object] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    leads: bool = True
    num_steps: int = field(default=0, init=False)

    def step(self) -> None:
        """Agree with the other ranks and begin the transfers that follow. Every rank calls it in every step.

        Raises:
            SettingsDivergenceError: the ranks have different settings; the error lists fields and ranks.
            SyncTimeoutError, SyncDivergenceError: a rank did not join, or joined with another proposal.
            TierDivergenceError: the ranks hold different pages.
            CacheIntegrityError: a bug in this library.
        """
        agreement = StepAgreement(groups=self.groups, parts=(self,), clock=self.clock, leads=self.leads)
        agreement.step(self.num_steps + 1)

    def fill(self, proposal: Proposal) -> None:
        """Add this rank's state to the step's proposal. The first call also compares the settings of all ranks.

        Raises:
            SettingsDivergenceError: the ranks have different settings; the error lists fields and ranks.
        """
        cache, mover = self.cache, self.mover
        if not self.num_steps:
            self.groups.check_equal("hicache settings", {**cache.settings, **self.settings}, step=0)
        self.num_steps += 1
        for event in mover.poll():
            cache.handle(event)
        cache.fill(proposal, has_storage=mover.has_storage, load_back_budget_pages=mover.load_back_budget_pages)

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Apply the agreed values and begin the transfers that follow.

        Raises:
            TierDivergenceError: the ranks hold different pages.
            CacheIntegrityError: a bug in this library.
        """
        self.cache.apply(step, agreed)
        self.submit()

    def submit(self) -> None:
        """Submit the operations begun since the last step, for a forward that waits for them. It needs no agreement."""
        self.mover.submit(self.cache.pop_instructions())

    def close(self) -> None:
        """Close the mover, then the groups. Safe to call twice."""
        self.mover.close()
        self.groups.close()
