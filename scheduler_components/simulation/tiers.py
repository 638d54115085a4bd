"""Host and storage tiers of a replica in virtual time: the real HiCache parts over a ``VirtualPageMover``.

``HiRadixCache`` and ``HiCacheStepper`` decide, as in an engine. Operations end between steps, and the next step polls
their ends. A replica without a batch steps again when the next operation ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import attrs

from scheduler_components.agreement import ParallelGroups
from scheduler_components.batcher import NullPrefetcher
from scheduler_components.cache import PagePool, RadixCache
from scheduler_components.errors import ConfigError
from scheduler_components.hicache import HiCachePolicy, HiCacheStepper, HiRadixCache, MemoryPageStore
from scheduler_components.request_queues import RequestQueues
from scheduler_components.simulation.request import SimulatedRequest
from scheduler_components.simulation.virtual_clock import MAX_SPAN_S, NEVER_NS, VirtualClock, nanoseconds
from scheduler_components.simulation.virtual_page_mover import TransferLink, VirtualPageMover
from scheduler_components.validators import integer_validator, number_validator
from scheduler_components.values import TierStats

__all__ = ["CountedHostPages", "DeviceOnly", "SimulatedTiers", "TierConfig", "check_num_pages", "make_storage"]

_MAX_TIER_TOKENS = 2**34  # 2 PB at 131 KB per token

_MAX_PAGES = 2**24
"""Pages of a pool. Each costs about ten bytes of memory, whatever it would hold."""

_bandwidth = number_validator("is not a bandwidth", at_least=1e-6, at_most=1e9)
_latency = number_validator("is not a latency", or_zero=True, at_most=MAX_SPAN_S)


def check_num_pages(name: str, num_tokens: int, page_size: int) -> None:
    """Check that the pages of a pool fit into memory.

    Raises:
        ConfigError: there are too many; the error names the setting.
    """
    if num_tokens // page_size > _MAX_PAGES:
        problem = f"has more than {_MAX_PAGES:,} pages of {page_size:,} tokens"
        raise ConfigError(name, num_tokens, problem, "give a smaller pool or larger pages")


@attrs.frozen(kw_only=True)
class TierConfig:
    """Sizes and speeds of the tiers below the device.

    It has ten fields because two tiers have a size, two bandwidths and a latency each. The defaults are round numbers
    for the model of ``CostModel``: PCIe 4 with 16 lanes to the host, and storage behind a network of 100 Gbit/s.

    Attributes:
        host_tokens: capacity of the host tier of each replica.
        write_gb_per_s, load_gb_per_s: bandwidth from device to host, and back, in 10^9 bytes per second.
        host_latency_s: of each copy.
        storage_tokens: capacity of the storage that all replicas share; 0 for no storage.
        storage_write_gb_per_s, storage_read_gb_per_s: bandwidth between each replica and storage.
        storage_latency_s: of each query, of each read of 32 pages, and of each write.
        token_bytes: KV bytes per token.
        policy: when to write, prefetch and load pages.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    host_tokens: int = attrs.field(default=1_048_576, validator=integer_validator(at_most=_MAX_TIER_TOKENS))
    write_gb_per_s: float = attrs.field(default=25.0, validator=_bandwidth)
    load_gb_per_s: float = attrs.field(default=25.0, validator=_bandwidth)
    host_latency_s: float = attrs.field(default=20e-6, validator=_latency)
    storage_tokens: int = attrs.field(default=0, validator=integer_validator(at_least=0, at_most=_MAX_TIER_TOKENS))
    storage_write_gb_per_s: float = attrs.field(default=12.5, validator=_bandwidth)
    storage_read_gb_per_s: float = attrs.field(default=12.5, validator=_bandwidth)
    storage_latency_s: float = attrs.field(default=1e-3, validator=_latency)
    token_bytes: int = attrs.field(default=131_072, validator=integer_validator(at_most=2**30))
    policy: HiCachePolicy = attrs.field(factory=HiCachePolicy)

    def check_page_size(self, page_size: int) -> None:
        """Check that each tier holds a page, and that the pages of the host tier fit into memory.

        Raises:
            ConfigError: one does not, or they do not; the error names it.
        """
        for name, num_tokens in (("host_tokens", self.host_tokens), ("storage_tokens", self.storage_tokens)):
            if 0 < num_tokens < page_size:
                raise ConfigError(name, num_tokens, "does not hold one page", f"give at least page_size={page_size}")
        check_num_pages("host_tokens", self.host_tokens, page_size)

    def settings(self) -> dict[str, int | float | str | bool]:
        """Return the values by name, for a report."""
        own = attrs.asdict(self, recurse=False, filter=lambda field, _: field.name != "policy")
        policy = self.policy
        return {**own, "hicache_write": policy.write, "hicache_prefetch": policy.prefetch, "hicache_load": policy.load}


def make_storage(config: TierConfig | None, page_size: int) -> MemoryPageStore | None:
    """Make the storage that replicas share, or return None if there is none. It counts each page as one byte."""
    if config is None or not config.storage_tokens:
        return None
    return MemoryPageStore(config.storage_tokens // page_size)


class CountedHostPages:
    """``HostPages`` without memory: the page numbers of a host tier.

    Args:
        num_pages: pages of the tier.
    """

    __slots__ = ("_pool",)

    def __init__(self, num_pages: int) -> None:
        self._pool = PagePool(num_pages)

    def reserve(self, num_pages: int) -> list[int]:
        return self._pool.allocate(num_pages).tolist()

    def commit(self, pages: Sequence[int]) -> None:
        self._pool.move_to_cache(pages)

    def abort(self, pages: Sequence[int]) -> None:
        self._pool.free(pages)

    def release(self, pages: Sequence[int]) -> None:
        self._pool.free_cached(pages)

    def check_integrity(self, committed: Sequence[int]) -> None:
        self._pool.check(committed)


@dataclass(slots=True, kw_only=True)
class _TierPrefetcher:
    """The ``Prefetcher`` of a simulated replica: fetches the prefixes of waiting requests from its tiers."""

    cache: HiRadixCache
    queues: RequestQueues[SimulatedRequest]

    @property
    def num_look_ahead(self) -> int:
        return self.cache.prefetch_queue.num_look_ahead

    @property
    def num_pending_pages(self) -> int:
        return self.cache.num_pages_in_transfer

    def start(self, request: SimulatedRequest) -> None:
        """Begin to prefetch the prefix of a new request."""
        self.cache.prefetch_queue.start(request.rid, request.token_ids[:-1])

    def is_ready(self, request: SimulatedRequest, *, is_next: bool) -> bool:
        return self.cache.prefetch_queue.is_done(request.rid, request.token_ids[:-1], is_next=is_next)

    def on_admitted(self, request: SimulatedRequest) -> None:
        if request.num_retractions:
            self.cache.prefetch_queue.cancel(request.rid)
            return
        cached = self.cache.prefetch_queue.record_admission(
            request.rid, prompt_tokens=request.num_prompt_tokens, cached_tokens=request.num_cached_tokens
        )
        if request.admitted_ns < 0:
            request.cached_prompt = cached

    def on_preempted(self, request: SimulatedRequest) -> None:
        self.cache.write_to_host(request.token_ids)

    def update_prefetched_spans(self) -> None:
        """Recount waiting requests whose tokens a prefetch has found, so that load reports do not count these."""
        for rid, span in self.cache.prefetch_queue.prefetched_spans():
            request = self.queues.find(rid)
            if request is not None and request in self.queues.waiting:
                self.queues.waiting.recount(request, span)


def _make_mover(
    config: TierConfig, page_size: int, clock: VirtualClock, storage: MemoryPageStore | None
) -> VirtualPageMover:
    def link(gb_per_s: float, latency_s: float) -> TransferLink:
        page_bytes = page_size * config.token_bytes
        return TransferLink(ns_per_page=page_bytes / gb_per_s, latency_ns=nanoseconds(latency_s))

    return VirtualPageMover(
        clock=clock,
        storage=storage,
        to_host=link(config.write_gb_per_s, config.host_latency_s),
        to_device=link(config.load_gb_per_s, config.host_latency_s),
        to_storage=link(config.storage_write_gb_per_s, config.storage_latency_s),
        from_storage=link(config.storage_read_gb_per_s, config.storage_latency_s),
    )


@dataclass(slots=True, kw_only=True)
class SimulatedTiers:
    """The host tier of a replica, its way to storage, and the cache over both.

    Attributes:
        cache: the prefix cache.
        mover: the transfers.
        stepper: agrees about the transfers; the replica is its only rank.
        prefetcher: fetches the pages of waiting requests.
    """

    cache: HiRadixCache
    mover: VirtualPageMover
    stepper: HiCacheStepper
    prefetcher: _TierPrefetcher

    @classmethod
    def open(
        cls,
        config: TierConfig,
        *,
        page_size: int,
        kv_tokens: int,
        queues: RequestQueues[SimulatedRequest],
        clock: VirtualClock,
        storage: MemoryPageStore | None,
        record: bool,
    ) -> SimulatedTiers:
        """Make empty tiers.

        Args:
            config: sizes and speeds.
            page_size, kv_tokens: of the device.
            queues: the waiting requests.
            clock: the time of the replica.
            storage: shared with other replicas.
            record: keep KV events.
        """
        num_pages = config.host_tokens // page_size
        mover = _make_mover(config, page_size, clock, storage)
        cache = HiRadixCache(
            page_size=page_size,
            capacity_tokens=kv_tokens,
            host=CountedHostPages(num_pages),
            num_host_pages=num_pages,
            policy=config.policy,
            record=record,
        )
        stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover, clock=clock)
        stepper.step()  # agrees that there is storage, or the first request would not ask it
        return cls(cache=cache, mover=mover, stepper=stepper, prefetcher=_TierPrefetcher(cache=cache, queues=queues))

    @property
    def num_operations(self) -> int:
        """Transfers that have not settled."""
        return self.cache.num_operations

    @property
    def state_digest(self) -> int:
        """Which page is on which tier."""
        return self.cache.state_digest

    @property
    def num_calls(self) -> int:
        """As in ``VirtualPageMover``."""
        return self.mover.num_calls

    @property
    def next_end_ns(self) -> int:
        """When the next operation ends; ``NEVER_NS`` without one."""
        return self.mover.next_end_ns

    @property
    def must_write_ahead(self) -> bool:
        """True if the next step begins copies although no operation has ended."""
        return self.cache.must_write_ahead

    def end_of_forward_ns(self, duration_ns: int) -> int:
        """Return when a forward that begins now ends."""
        return self.mover.end_of_forward_ns(duration_ns)

    def receive(self, request: SimulatedRequest) -> None:
        """Begin to prefetch the prefix of a new request."""
        self.prefetcher.start(request)

    def begin_step(self) -> None:
        """Apply what has ended, and begin what follows from it."""
        self.stepper.step()
        self.prefetcher.update_prefetched_spans()

    def submit(self) -> None:
        """Begin the transfers that were decided since the last call."""
        self.stepper.submit()

    def stats(self) -> TierStats:
        """Return a copy of the counters."""
        return self.cache.stats()


@dataclass(slots=True, kw_only=True)
class DeviceOnly:
    """The tiers of a replica that has only its device.

    Attributes:
        cache: the prefix cache.
        clock: the time of the replica.
    """

    cache: RadixCache
    clock: VirtualClock
    num_operations: ClassVar[int] = 0
    state_digest: ClassVar[int] = 0
    num_calls: ClassVar[int] = 0
    next_end_ns: ClassVar[int] = NEVER_NS
    must_write_ahead: ClassVar[bool] = False
    prefetcher: ClassVar[NullPrefetcher] = NullPrefetcher()

    def end_of_forward_ns(self, duration_ns: int) -> int:
        return self.clock.now_ns + duration_ns

    def receive(self, request: object) -> None:
        pass

    def begin_step(self) -> None:
        pass

    def submit(self) -> None:
        pass

    def stats(self) -> None:
        return None
