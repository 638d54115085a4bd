"""HiRadixCache: a radix cache whose pages outlive the device: evicted to the host, kept in storage, brought back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_components.cache import (
    PLAIN_NAMESPACE,
    PrefixMatch,
    PrefixNamespace,
    RadixNode,
    block_hashes_of,
    pack_tokens,
)
from scheduler_components.errors import CacheIntegrityError, ConfigError, TierDivergenceError
from scheduler_components.events import KVCacheEvent
from scheduler_components.hicache.agreement import Outcome, Proposal, SyncDomain
from scheduler_components.hicache.controller import HiCacheController, HiCachePolicy, PrefetchLanes
from scheduler_components.hicache.tiers import Tier, TierTree, tiers_of
from scheduler_components.hicache.transfers import Preparations, TierTransfers
from scheduler_components.page_operations import Instruction, IoEvent
from scheduler_components.ports import NO_PAGE_HOOK, HostPages, PageHook, PageMover
from scheduler_components.values import TierStats

__all__ = [
    "HiRadixCache",
    "TierStepper",
]

_SPREAD = 0x9E3779B97F4A7C15  # odd, so that counts that differ give digests that differ


class HiRadixCache:
    """What ``RadixCache`` is to a scheduler, over three tiers. A ``KvEventSource`` and a ``PoolSource``. Pure.

    To requests only what is on the device is a match; ``preparations`` brings the rest there. Ranks that make the same
    calls and settle the same outcomes hold the same pages on every tier, whatever their I/O does. Once a step:
    ``handle`` each I/O event, bring ``proposal``, ``settle`` the outcome, carry out ``take_instructions``;
    ``TierStepper`` does so.

    Args:
        page_size: tokens a page.
        capacity_tokens: size of the device's KV pool; rounded down to whole pages.
        host: this rank's host pages.
        num_host_pages: pages that every rank of the replica has on its host.
        policy: when to write, when to stop prefetching.
        record: keep events for ``take_events``; give ``ParallelState.owns_kv_stream``.
        page_hook: is told which device pages were computed and loaded.

    Attributes:
        preparations: ask it, before a request runs, to bring pages closer.

    Raises:
        ConfigError: a size is below one page.
    """

    __slots__ = ("_controller", "_tiers", "_transfers", "_page_hook", "capacity_tokens", "page_size", "preparations")

    def __init__(
        self,
        *,
        page_size: int,
        capacity_tokens: int,
        host: HostPages,
        num_host_pages: int,
        policy: HiCachePolicy | None = None,
        record: bool = False,
        page_hook: PageHook = NO_PAGE_HOOK,
    ) -> None:
        if page_size < 1:
            raise ConfigError("page_size", page_size, "is not a size", "give an integer of at least 1")
        if capacity_tokens < page_size:
            hint = f"give at least page_size={page_size}"
            raise ConfigError("capacity_tokens", capacity_tokens, "does not hold one page", hint)
        if num_host_pages < 1:
            raise ConfigError("num_host_pages", num_host_pages, "is no host tier", "give at least 1, or use RadixCache")
        policy = policy if policy is not None else HiCachePolicy()
        self.page_size = page_size
        self.capacity_tokens = capacity_tokens // page_size * page_size
        self._page_hook = page_hook
        self._tiers = TierTree(
            page_size=page_size,
            num_device_pages=capacity_tokens // page_size,
            host=host,
            num_host_pages=num_host_pages,
            record=record,
        )
        self._controller = HiCacheController(host=host, prefetches=PrefetchLanes(policy=policy, host=host))
        self._transfers = TierTransfers.over(self._tiers, self._controller, policy, page_hook)
        self.preparations = Preparations(transfers=self._transfers, policy=policy)

    # --- what RadixCache has ---

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated without evicting."""
        return self._tiers.device.num_free * self.page_size

    @property
    def evictable_tokens(self) -> int:
        """Tokens on the device that neither a request nor an operation has locked."""
        return self._tiers.device_order.num_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Device tokens that requests and operations hold: neither free nor evictable."""
        return self._tiers.num_device_pages_held * self.page_size

    @property
    def num_event_collapses(self) -> int:
        """How often nobody took the events for so long that the backlog was replaced by the present content."""
        return self._tiers.recorder.num_collapses

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        """Find the longest prefix on the device; mark it, and what follows on the host, as the most recently used.

        Raises:
            ConfigError: a token id does not fit u32, or the namespace cannot be encoded.
        """
        tiers = self._tiers
        path = tiers.path_to(pack_tokens(token_ids), (namespace or PLAIN_NAMESPACE).seed())
        return self._match(path[: tiers.num_on_device(path)])

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> PrefixMatch:
        """Cache a computed prefix and take over its pages; as ``RadixCache.insert``.

        Where the host has a page that the device has not, the caller's page becomes the device's.

        Raises:
            ConfigError: ``pages`` is not one a whole page, a token id does not fit u32, or the namespace cannot be
                encoded.
            CacheIntegrityError: a page that the tree would take over or free is not held by a request.
                After any error nothing has changed.
        """
        namespace = namespace or PLAIN_NAMESPACE
        packed = pack_tokens(token_ids)
        if len(pages) != len(token_ids) // self.page_size:
            hint = f"give {len(token_ids) // self.page_size} for {len(token_ids)} tokens"
            raise ConfigError("pages", len(pages), f"is not one page for each {self.page_size} tokens", hint)
        tiers = self._tiers
        descent = tiers.tree.find(packed, namespace.seed())
        cached = [page for node in descent.path for page in node.pages][: descent.num_pages]
        duplicates = [page for page, own in zip(pages, cached, strict=False) if page != own]
        tiers.device.expect_held([*duplicates, *pages[len(cached) :]])

        path = tiers.cut_at(descent)
        tiers.device.free(duplicates)
        place = len(cached)
        for node in path[tiers.num_on_device(path) :]:
            self._place(node, pages[place : place + node.num_pages])
            place += node.num_pages
        if place < len(pages):
            page_bytes = tiers.tree.page_bytes
            tail, fresh = packed[place * page_bytes : len(pages) * page_bytes], array("I", pages[place:])
            leaf = tiers.append_on_device(path[-1] if path else tiers.tree.root, tail, fresh, namespace)
            self._page_hook.computed(bytes(leaf.digests), fresh)
            path.append(leaf)
        tiers.touch(path)
        self._transfers.writes.after_insert(path)
        return self._match(path)

    def lock(self, node: RadixNode) -> None:
        """Keep the prefix that ends in ``node`` on the device, once more; CacheIntegrityError where it is not there."""
        path = self._tiers.tree.path_of(node)
        if path and not node.pages:
            raise CacheIntegrityError(f"{node} is not on the device: evicted before it was locked?")
        self._tiers.device_order.lock(path)

    def unlock(self, node: RadixNode) -> None:
        """Give back one ``lock`` of ``node``.

        Raises:
            CacheIntegrityError: the node is not locked; nothing has changed.
        """
        path = self._tiers.tree.path_of(node)
        if path and not node.lock_count:
            raise CacheIntegrityError(f"{node} is not locked: unlocked twice?")
        self._tiers.device_order.unlock(path)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out device pages to a request, evicting the least recently used ones as needed.

        Raises:
            ConfigError: ``num_pages`` is negative.
            OutOfPagesError: free and evictable pages together are fewer; nothing was evicted.
        """
        return self._tiers.allocate(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        """Take back pages that ``allocate`` gave and ``insert`` did not take over.

        Raises:
            CacheIntegrityError: a page is free already, is cached, or is named twice; nothing has changed.
        """
        self._tiers.device.free(pages)

    def evict(self, num_pages: int) -> int:
        """Free the least recently used unlocked device pages; returns how many. The host keeps what it has."""
        return self._tiers.evict_from_device(num_pages)

    def clear(self) -> None:
        """Forget every prefix, on device and host. Storage keeps its pages: keys name their content.

        Raises:
            CacheIntegrityError: a request still locks a prefix, or pages are on their way; nothing has changed.
        """
        locked = self._tiers.device.num_cached - self._tiers.device_order.num_pages
        if locked or self.num_operations:
            raise CacheIntegrityError(f"{locked} cached pages are locked, {self.num_operations} operations under way")
        self._tiers.clear()

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events of all tiers since the last call, in order, and forget them."""
        return self._tiers.recorder.take()

    def block_hashes(self, tier: Tier = Tier.DEVICE) -> Iterator[int]:
        """The hash of every page on one tier, parents before children. Walks the tree: for checks, not for steps."""
        for node in self._tiers.nodes():
            if tier in tiers_of(node):
                yield from block_hashes_of(node.digests)

    def check_integrity(self) -> None:
        """Check tree, pools, orders, tiers and ledger against each other. Walks everything.

        Raises:
            CacheIntegrityError: with the arithmetic that failed.
        """
        self._tiers.check()
        self._transfers.check()

    # --- the step ---

    @property
    def num_operations(self) -> int:
        """Operations that have not settled; the same on every rank."""
        return self._controller.num_operations

    @property
    def state_digest(self) -> int:
        """What is on which tier, what is free, what is under way, as one unsigned 64-bit number; equal on all ranks."""
        tiers = self._tiers
        digest = tiers.membership.digest
        for count in (tiers.device.num_free, tiers.num_host_pages_used, self.num_operations):
            digest = (digest * _SPREAD + count) % 2**64
        return digest

    def handle(self, event: IoEvent) -> None:
        """Take in what this rank's I/O tells."""
        self._controller.handle(event)

    def proposal(self, step: int, *, has_storage: bool, load_room_pages: int, now_s: float) -> Proposal:
        """Return what this rank brings to the step's one agreement: the same slots at every step.

        Args:
            step: the same number on all ranks.
            has_storage: this rank has a storage backend attached.
            load_room_pages: pages that this rank can begin to copy to the device.
            now_s: this rank's monotonic clock.
        """
        proposal = Proposal("hicache step", step=step)
        proposal.equal("state", self.state_digest - 2**63)
        self._controller.fill(proposal, has_storage=has_storage, load_room_pages=load_room_pages, now_s=now_s)
        return proposal

    def settle(self, step: int, outcome: Outcome, *, now_s: float) -> None:
        """Carry out what all ranks agreed.

        Raises:
            TierDivergenceError: they do not hold the same pages; nothing is carried out.
        """
        if not outcome.verdicts["state"]:
            raise TierDivergenceError(step, self.state_digest)
        self._transfers.carry_out(self._controller.settle(outcome), now_s)

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be moved, in order."""
        return self._controller.take_instructions()

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

    def _place(self, node: RadixNode, pages: Sequence[int]) -> None:
        self._page_hook.computed(bytes(node.digests), pages)
        self._tiers.put_on_device(node, array("I", pages))

    def _match(self, path: list[RadixNode]) -> PrefixMatch:
        pages = tuple(page for node in path for page in node.pages)
        return PrefixMatch(len(pages) * self.page_size, pages, path[-1] if path else self._tiers.tree.root)


# TierStepper: a hierarchical cache's part of a scheduler's step: one agreement, and what follows from it.


@dataclass(slots=True, kw_only=True)
class TierStepper:
    """Lets a cache, this rank's I/O and the other ranks meet once a step. All on the scheduler's thread.

    Attributes:
        cache: decides.
        domain: agrees; used by nobody else.
        mover: moves pages.
        clock: monotonic seconds of this rank; only ever compared with itself.
        num_steps: steps so far.
    """

    cache: HiRadixCache
    domain: SyncDomain
    mover: PageMover
    clock: Callable[[], float] = time.monotonic
    num_steps: int = field(default=0, init=False)

    def step(self) -> None:
        """Bring this rank's facts, agree, carry out. Every rank calls it in each of its steps, without a condition.

        Raises:
            SyncTimeoutError, SyncDivergenceError: the ranks did not come together.
            TierDivergenceError: they hold different pages.
            CacheIntegrityError: the kit is to blame.
        """
        self.num_steps += 1
        cache, mover, now_s = self.cache, self.mover, self.clock()
        for event in mover.poll():
            cache.handle(event)
        proposal = cache.proposal(
            self.num_steps, has_storage=mover.has_storage, load_room_pages=mover.load_room_pages, now_s=now_s
        )
        cache.settle(self.num_steps, self.domain.agree(proposal), now_s=now_s)
        mover.submit(cache.take_instructions())

    def close(self) -> None:
        """End this rank's I/O, then its part in agreements. Safe to call twice."""
        self.mover.close()
        self.domain.close()
