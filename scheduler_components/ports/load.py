"""Load: the queues, pools and rates that it is read from, and the sinks that take it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Protocol

from scheduler_components.values import LoadSections, LoadSnapshot

__all__ = [
    "QueuedRequest",
    "QueueSource",
    "PoolSource",
    "RateSource",
    "NullRateSource",
    "LoadSectionsSource",
    "NullLoadSectionsSource",
    "LoadSource",
    "NullLoadSource",
    "LoadSink",
]


class QueuedRequest(Protocol):
    """A waiting request, as the counting of load sees it: the scheduler's own class. Read by ``LoadInquirer``."""

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill when nothing is cached: prompt plus what was generated before a retraction."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """The part of them that a cached prefix is known to cover; 0 when not yet matched."""
        ...


class QueueSource(Protocol):
    """The request queues: the scheduler itself. Read by ``LoadInquirer``."""

    @property
    def running(self) -> Sized:
        """Requests in the running batch."""
        ...

    @property
    def waiting(self) -> Sequence[QueuedRequest]:
        """Requests that wait for prefill: a list, or a ``TokenCountedQueue`` for O(1) counts."""
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
    """The KV token pool: ``RadixCache`` or the scheduler's own. Read by ``LoadInquirer``."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        ...

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold: neither free nor evictable."""
        ...


class RateSource(Protocol):
    """Recent rates: ``metrics.RateMeter``, or the scheduler itself. Read by ``LoadInquirer``."""

    @property
    def gen_throughput(self) -> float:
        """Generated tokens per second."""
        ...

    @property
    def cache_hit_rate(self) -> float:
        """Cached / input tokens, 0 to 1."""
        ...


class NullRateSource:
    """The rates of a scheduler that keeps none."""

    gen_throughput = 0.0
    cache_hit_rate = 0.0


class LoadSectionsSource(Protocol):
    """An engine with special queues, LoRA slots, drafts or disaggregation. Read by ``LoadInquirer``."""

    def load_sections(self) -> LoadSections:
        """Return the parts of a load snapshot that not every engine has; None for those that this one has not."""
        ...


class NullLoadSectionsSource:
    """The parts of an engine that has none of them."""

    def load_sections(self) -> LoadSections:
        return _NONE_OF_THE_PARTS


_NONE_OF_THE_PARTS = LoadSections()


class LoadSource(Protocol):
    """Says how loaded this replica is: ``LoadInquirer``.

    Read by ``LoadPublisher``, ``MetricsEmitter`` and ``SchedulerKvEventsPublisher``.
    """

    def get_loads(self) -> LoadSnapshot:
        """Return the load of this moment."""
        ...


class NullLoadSource:
    """The load of a scheduler that does not say it."""

    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot()


class LoadSink(Protocol):
    """Where load reports go. Called by ``LoadPublisher``.

    To dispatchers on the network: ``ZmqLoadSink``; to processes of this machine: ``ShmLoadSink``.
    """

    @property
    def wants_load(self) -> bool:
        """False where nobody receives: the load is not even read then."""
        ...

    def send(self, load: LoadSnapshot) -> None:
        """Hand on one report, which replaces all before it. Never blocks; what it raises is counted."""
        ...

    def close(self) -> None:
        """Let go of sockets and memory; safe to call twice."""
        ...
