"""The scheduler's prefix cache together with the tiers below the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from scheduler_components.agreement.step_agreement import AgreementPart
from scheduler_components.cache import PrefixNamespace, RadixCache
from scheduler_components.checks.pool_stats_observer import AuditedPool
from scheduler_components.hicache import HiRadixCache
from scheduler_components.hicache.prefetch_queue import NullPrefetchQueue, PrefetchQueue
from scheduler_components.values import TierStats

__all__ = ["CacheTiers", "DeviceOnlyTiers", "PrefixCache"]

PrefixCache: TypeAlias = RadixCache | HiRadixCache
"""Both offer the same methods to a request. A ``HiRadixCache`` also keeps pages that the device evicts."""


class CacheTiers(Protocol):
    """A prefix cache and its tiers: ``HiCacheTiers`` or ``DeviceOnlyTiers``.

    It has twelve members because it combines the cache, the state of its tiers and their I/O. Two implementations exist
    because ``HiCacheTiers`` needs numpy, which an engine without a host tier does not install.
    """

    @property
    def cache(self) -> PrefixCache:
        """The cache that holds the pages of running requests."""
        ...

    @property
    def prefetch_queue(self) -> PrefetchQueue | NullPrefetchQueue:
        """Fetches the pages of waiting requests."""
        ...

    @property
    def num_operations(self) -> int:
        """Transfers under way; the same number on all ranks."""
        ...

    @property
    def state_digest(self) -> int:
        """Which page is on which tier, as an unsigned 64-bit digest; equal on all ranks."""
        ...

    @property
    def lower_pools(self) -> Sequence[AuditedPool]:
        """The pools below the device, for checks."""
        ...

    @property
    def num_pages_in_transfer(self) -> int:
        """Device pages that copies hold; the same number on all ranks."""
        ...

    def write_to_host(self, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        """Begin to copy the cached pages of a prefix to the host."""
        ...

    def stats(self) -> TierStats | None:
        """Return the present counters; None without tiers."""
        ...

    def clear_storage_index(self) -> None:
        """Count no page as stored. No transfer may be under way."""
        ...

    @property
    def agreement_parts(self) -> Sequence[AgreementPart]:
        """What takes part in the agreement of each step: the transfers, if there are tiers."""
        ...

    def wait(self) -> None:
        """Wait briefly for a transfer when there is nothing to compute."""
        ...

    def close(self) -> None:
        """Close threads and sockets. Safe to call twice."""
        ...


@dataclass(slots=True, kw_only=True)
class DeviceOnlyTiers:
    """The ``CacheTiers`` of a cache without host and storage tiers."""

    cache: RadixCache
    prefetch_queue: ClassVar[NullPrefetchQueue] = NullPrefetchQueue()
    num_operations: ClassVar[int] = 0
    num_pages_in_transfer: ClassVar[int] = 0
    state_digest: ClassVar[int] = 0
    lower_pools: ClassVar[Sequence[AuditedPool]] = ()
    agreement_parts: ClassVar[Sequence[AgreementPart]] = ()

    def write_to_host(self, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        pass

    def stats(self) -> None:
        return None

    def clear_storage_index(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass
