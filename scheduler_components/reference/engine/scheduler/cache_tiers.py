"""The scheduler's prefix cache and the tiers behind it: what the scheduler asks of them, and a cache that has none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from scheduler_components import CachedTokens, TierStats
from scheduler_components.cache import PrefixNamespace, RadixCache
from scheduler_components.hicache import HiRadixCache

__all__ = [
    "CacheTiers",
    "DeviceOnlyTiers",
    "PrefixCache",
    "RequestPrefetcher",
    "TierState",
]

PrefixCache: TypeAlias = RadixCache | HiRadixCache
"""Both do the same for a request; a ``HiRadixCache`` keeps what the device evicts."""


class RequestPrefetcher(Protocol):
    """Brings the pages of waiting requests closer; ``HiRadixCache.prefetch_queue`` does."""

    def start(self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        """A request has come."""
        ...

    def is_done(self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace, *, is_next: bool) -> bool:
        """Say whether a waiting request need not wait for pages, and begin to bring them closer."""
        ...

    def record_admission(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> CachedTokens:
        """A request begins to run for the first time; return on which tiers its cached tokens were found."""
        ...

    def prefetched_spans(self) -> Iterable[tuple[str, tuple[int, int]]]:
        """Which tokens of which waiting requests are read from storage, as (rid, (first, end))."""
        ...

    def cancel(self, rid: str) -> None:
        """A request is gone, or runs again after a retraction."""
        ...


class TierState(Protocol):
    """What is on which tier and on its way between them, the same on every rank; a ``HiRadixCache`` is one."""

    @property
    def prefetch_queue(self) -> RequestPrefetcher:
        """Told of each request."""
        ...

    @property
    def num_operations(self) -> int:
        """Transfers under way."""
        ...

    @property
    def state_digest(self) -> int:
        """What is on which tier, as one unsigned 64-bit number."""
        ...

    def clear_storage_index(self) -> None:
        """Count nothing as stored any more; nothing may be under way."""
        ...

    def stats(self) -> TierStats | None:
        """Return the counters of this moment; None where there are no tiers."""
        ...


class CacheTiers(Protocol):
    """A prefix cache and what is behind it, stepped with the scheduler."""

    @property
    def cache(self) -> PrefixCache:
        """Gives and takes the pages of running requests."""
        ...

    @property
    def contents(self) -> TierState:
        """What is behind the cache."""
        ...

    def step(self) -> None:
        """Agree with the other ranks; once in every step of the scheduler."""
        ...

    def wait(self) -> None:
        """Let a moment pass, when there is nothing to compute."""
        ...

    def close(self) -> None:
        """Let go of threads and sockets; safe to call twice."""
        ...


class NullRequestPrefetcher:
    """All that is cached is on the device already."""

    def start(self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        pass

    def is_done(
        self,
        rid: str,  # noqa: ARG002 - the port's, as the next three
        token_ids: Sequence[int],  # noqa: ARG002
        namespace: PrefixNamespace,  # noqa: ARG002
        *,
        is_next: bool,  # noqa: ARG002
    ) -> bool:
        return True

    def record_admission(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> CachedTokens:  # noqa: ARG002
        return CachedTokens(device=cached_tokens)

    def prefetched_spans(self) -> Iterable[tuple[str, tuple[int, int]]]:
        return ()

    def cancel(self, rid: str) -> None:
        pass


class NullTierState:
    """The device is all there is."""

    prefetch_queue: RequestPrefetcher = NullRequestPrefetcher()
    num_operations = 0
    state_digest = 0

    def clear_storage_index(self) -> None:
        pass

    def stats(self) -> TierStats | None:
        return None


@dataclass(slots=True, kw_only=True)
class DeviceOnlyTiers:
    """``CacheTiers`` of a cache with nothing behind it."""

    cache: RadixCache

    @property
    def contents(self) -> TierState:
        return NullTierState()

    def step(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass
