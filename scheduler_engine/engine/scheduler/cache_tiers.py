"""The scheduler's prefix cache together with the tiers below the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from scheduler_components.agreement.step_agreement import AgreementPart
from scheduler_components.cache import RadixCache
from scheduler_components.checks.pool_stats_observer import AuditedPool
from scheduler_components.hicache import HiRadixCache
from scheduler_components.values import TierStats

PrefixCache: TypeAlias = RadixCache | HiRadixCache
"""Both offer the same methods to a request. A ``HiRadixCache`` also keeps pages that the device evicts."""


class CacheTiers(Protocol):
    """A prefix cache and its tiers: ``HiCacheTiers`` or ``DeviceOnlyTiers``.

    It has nine members because it combines the cache, the state of its tiers and their I/O. Two implementations exist
    because ``HiCacheTiers`` needs numpy, which an engine without a host tier does not install.
    """

    @property
    def cache(self) -> PrefixCache:
        """The cache that holds the pages of running requests."""
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
    num_operations: ClassVar[int] = 0
    state_digest: ClassVar[int] = 0
    lower_pools: ClassVar[Sequence[AuditedPool]] = ()
    agreement_parts: ClassVar[Sequence[AgreementPart]] = ()

    def stats(self) -> None:
        return None

    def clear_storage_index(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass
