"""Host and storage tiers of a replica in virtual time: the real HiCache parts over a ``VirtualPageMover``.

``HiRadixCache`` and ``HiCacheStepper`` decide, as in an engine. Operations end between steps, and the next step polls
their ends. A replica without a batch steps again when the next operation ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import attrs

from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_components._internal.virtual_clock import MAX_SPAN_S, NEVER_NS, VirtualClock, nanoseconds
from scheduler_components.agreement import ParallelGroups
from scheduler_components.cache import PagePool, RadixCache
from scheduler_components.errors import ConfigError
from scheduler_components.hicache import HiCachePolicy, HiCacheStepper, HiRadixCache, MemoryPageStore
from scheduler_components.values import TierStats
from scheduler_engine.simulation.virtual_page_mover import SimulatedStorage, TransferLink, VirtualPageMover

_MAX_TIER_TOKENS = 2**34  # 2 PB at 131 KB per token

_MAX_PAGES = 2**24
"""Pages of a pool. Each costs about ten bytes of memory, whatever it would hold."""

_MAX_PAGES_OF_ALL = 2**28
"""Pages of all pools of all replicas: 2.7 GB."""

_bandwidth = number_validator("is not a bandwidth", at_least=1e-6, at_most=1e9)


def _bandwidth_or_zero(owner: object, attribute: attrs.Attribute[float], value: float) -> None:
    if value != 0:
        _bandwidth(owner, attribute, value)


_latency = number_validator("is not a latency", or_zero=True, at_most=MAX_SPAN_S)


def check_num_pages(name: str, num_tokens: int, page_size: int) -> None:
    """Check that the pages of a pool fit into memory.

    Raises:
        ConfigError: there are too many; the error names the setting.
    """
    if num_tokens // page_size > _MAX_PAGES:
        problem = f"has more than {_MAX_PAGES:,} pages of {page_size:,} tokens"
        raise ConfigError(name, num_tokens, problem, "give a smaller pool or larger pages")


def check_total_pages(num_replicas: int, tokens_per_replica: int, page_size: int) -> None:
    """Check that the pages of the pools of all replicas fit into memory together.

    Raises:
        ConfigError: there are too many; the error names the number of replicas.
    """
    num_pages = num_replicas * (tokens_per_replica // page_size)
    if num_pages > _MAX_PAGES_OF_ALL:
        problem = f"have {num_pages:,} pages together, more than {_MAX_PAGES_OF_ALL:,}"
        raise ConfigError("num_replicas", num_replicas, problem, "give fewer replicas, smaller pools or larger pages")


@attrs.frozen(kw_only=True)
class TierConfig:
    """Sizes and speeds of the tiers below the device.

    It has eleven fields because two tiers have a size, bandwidths and a latency each. The defaults are round numbers
    for the model of ``CostModel``: PCIe 4 with 16 lanes to the host, and storage behind a network of 100 Gbit/s.

    Attributes:
        host_tokens: capacity of the host tier of each replica.
        write_gb_per_s, load_gb_per_s: bandwidth from device to host, and back, in 10^9 bytes per second.
        host_latency_s: of each copy.
        storage_tokens: capacity of the storage that all replicas share; 0 for no storage.
        storage_write_gb_per_s, storage_read_gb_per_s: bandwidth between each replica and storage.
        storage_total_gb_per_s: bandwidth of the storage for the reads and writes of all replicas together; 0 for no
            bound but that of each replica.
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
    storage_total_gb_per_s: float = attrs.field(default=0.0, validator=_bandwidth_or_zero)
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


def make_storage(config: TierConfig | None, page_size: int) -> SimulatedStorage | None:
    """Make the storage that replicas share, or return None if there is none."""
    if config is None or not config.storage_tokens:
        return None
    gb_per_s = config.storage_total_gb_per_s
    return SimulatedStorage(
        pages=MemoryPageStore(config.storage_tokens // page_size),
        ns_per_page=page_size * config.token_bytes / gb_per_s if gb_per_s else 0.0,
    )


class CountedHostPages:
    """``HostPages`` without memory: the page numbers of a host tier.

    Args:
        num_pages: pages of the tier.
    """

    __slots__ = ("pool",)

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)

    def reserve(self, num_pages: int) -> list[int]:
        return self.pool.allocate(num_pages).tolist()

    def commit(self, pages: Sequence[int]) -> None:
        self.pool.move_to_cache(pages)

    def abort(self, pages: Sequence[int]) -> None:
        self.pool.free(pages)

    def release(self, pages: Sequence[int]) -> None:
        self.pool.free_cached(pages)

    def check_integrity(self, committed: Sequence[int]) -> None:
        self.pool.check(committed)


def _make_mover(
    config: TierConfig, page_size: int, clock: VirtualClock, storage: SimulatedStorage | None
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
    """

    cache: HiRadixCache
    mover: VirtualPageMover
    stepper: HiCacheStepper

    @classmethod
    def open(
        cls,
        config: TierConfig,
        *,
        page_size: int,
        kv_tokens: int,
        clock: VirtualClock,
        storage: SimulatedStorage | None,
        record: bool,
    ) -> SimulatedTiers:
        """Make empty tiers.

        Args:
            config: sizes and speeds.
            page_size, kv_tokens: of the device.
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
        return cls(cache=cache, mover=mover, stepper=stepper)

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

    def begin_step(self) -> None:
        """Apply what has ended, and begin what follows from it."""
        self.stepper.step()

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

    def end_of_forward_ns(self, duration_ns: int) -> int:
        return self.clock.now_ns + duration_ns

    def begin_step(self) -> None:
        pass

    def submit(self) -> None:
        pass

    def stats(self) -> None:
        return None
