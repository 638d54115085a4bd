"""Load: the queues, pool and rates that `LoadInquirer` reads."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Protocol

from scheduler_components.values import LoadSnapshot

__all__ = [
    "LoadSource",
    "PoolSource",
    "QueueSource",
    "QueuedRequest",
    "RateSource",
]


class QueuedRequest(Protocol):
    """A waiting request, as the load counts it: the scheduler's own class. Read by `LoadInquirer`."""

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill if none is cached: the prompt, and the output generated before a retraction."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """The part of them that a cached prefix is known to cover; 0 before the request was matched."""
        ...


class QueueSource(Protocol):
    """The request queues: the scheduler itself. Read by `LoadInquirer`."""

    @property
    def running(self) -> Sized:
        """Requests in the running batch."""
        ...

    @property
    def waiting(self) -> Sequence[QueuedRequest]:
        """Requests that wait for prefill: a list, or a `TokenCountedQueue` for O(1) counts."""
        ...

    @property
    def max_running_requests(self) -> int:
        """Request slots."""
        ...

    @property
    def num_chunked_tokens_left(self) -> int:
        """Tokens that a chunked prefill has still to compute; 0 without one."""
        ...


class PoolSource(Protocol):
    """The KV token pool: `RadixCache` or the scheduler's own. Read by `LoadInquirer`."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the pool, in tokens."""
        ...

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold: neither free nor evictable."""
        ...


class RateSource(Protocol):
    """Recent rates: `metrics.RateMeter`, or the scheduler itself. Read by `LoadInquirer`."""

    @property
    def gen_throughput(self) -> float:
        """Generated tokens per second."""
        ...

    @property
    def cache_hit_rate(self) -> float:
        """Cached / input tokens, 0 to 1."""
        ...


class LoadSource(Protocol):
    """The load of this replica: `LoadInquirer`.

    Read by `LoadPublisher`, `MetricsEmitter` and `SchedulerKvEventsPublisher`.
    """

    def get_loads(self) -> LoadSnapshot:
        """Return the current load."""
        ...
