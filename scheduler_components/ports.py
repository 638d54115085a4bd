"""The ports of the kit: the small interfaces between a scheduler and its components. Read this page first.

Sources are read, sinks are written; each has at most five members, and a component asks for the smallest that
will do. Sources are read late: a scheduler that rebinds ``self.running`` needs no lambda. Any object that has the
members fits; nothing here is ever inherited from. What results and outputs ask of requests: ``request_ports``;
what a hierarchical cache asks of a rank's memory and I/O: ``tier_ports``.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Protocol, TypeAlias

from scheduler_components.kv_events.events import EventBatch, KVCacheEvent
from scheduler_components.load.snapshot import (
    DisaggregationLoad,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)
from scheduler_components.metrics.stats import KvMetrics, PublisherStats, SchedulerStats, SchedulerTotals

if TYPE_CHECKING:  # the hierarchical cache builds on this page, and is not loaded with it
    from scheduler_components.hicache.sync_call import SyncCall

__all__ = [
    "KvEventSink",
    "KvEventSource",
    "KvMetricsSink",
    "LoadPartsSource",
    "LoadSink",
    "LoadSource",
    "MetricsSink",
    "PageBytes",
    "PageStore",
    "PoolSource",
    "PublisherStatsSource",
    "QueueSource",
    "QueuedRequest",
    "RateSource",
    "SyncGroup",
    "TotalsSource",
    "WorkSource",
]

PageBytes: TypeAlias = bytes | bytearray | memoryview
"""The content of one page, as contiguous bytes."""


class KvEventSource(Protocol):
    """A cache that records what happens to its blocks."""

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the events since the last call, in order, and forget them."""
        ...


class KvEventSink(Protocol):
    """Where batches of events go. The null publisher is one; so is the ZMQ publisher."""

    def publish(self, events: EventBatch) -> None:
        """Accept one batch, in order; never blocks on the network."""
        ...

    def idle(self) -> None:
        """Encode and send what is pending; called where the scheduler waits for its device."""
        ...

    def stats(self) -> PublisherStats:
        """Counters since the sink was opened; all zero for a sink that keeps none."""
        ...

    def shutdown(self) -> None:
        """Send what is pending within a deadline and let go of sockets and threads; safe to call twice."""
        ...


class PublisherStatsSource(Protocol):
    """A publisher that counts what it does."""

    def stats(self) -> PublisherStats: ...


class KvMetricsSink(Protocol):
    """Where KvMetrics go: the serving process, usually."""

    def send(self, metrics: KvMetrics) -> None:
        """Hand on one report; drops it, counted, when nobody takes it. Never blocks, never raises."""
        ...

    def close(self) -> None: ...


class QueuedRequest(Protocol):
    """What load counting must know of a waiting request."""

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill when nothing is cached: prompt plus what was generated before a retraction."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """The part of them that a cached prefix is known to cover; 0 when not yet matched."""
        ...


class QueueSource(Protocol):
    """The request queues of a scheduler."""

    @property
    def running(self) -> Sized:
        """Requests in the running batch."""
        ...

    @property
    def waiting(self) -> Sequence[QueuedRequest]:
        """Requests that wait for prefill: a list, or a ``TokenCountedQueue`` for O(1) counts."""
        ...

    @property
    def max_running_requests(self) -> int: ...

    @property
    def num_chunked_tokens_left(self) -> int:
        """Tokens that the prefill now cut in chunks has still to compute; 0 without one."""
        ...


class PoolSource(Protocol):
    """The KV token pool."""

    @property
    def page_size(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold: neither free nor evictable."""
        ...


class RateSource(Protocol):
    """Recent rates of a scheduler, kept by ``metrics.rolling.RateMeter`` or by the scheduler itself."""

    @property
    def gen_throughput(self) -> float:
        """Generated tokens a second."""
        ...

    @property
    def cache_hit_rate(self) -> float:
        """Cached / input tokens, 0 to 1."""
        ...


class LoadPartsSource(Protocol):
    """Optional parts of a load snapshot; each None where the engine has no such thing."""

    def queue_load(self) -> QueueLoad | None: ...

    def disaggregation_load(self) -> DisaggregationLoad | None: ...

    def lora_load(self) -> LoraLoad | None: ...

    def speculative_load(self) -> SpeculativeLoad | None: ...

    def memory_load(self) -> MemoryLoad | None: ...


class LoadSource(Protocol):
    """Whoever can say how loaded this replica is. ``LoadInquirer`` is one."""

    def get_loads(self) -> LoadSnapshot: ...


class WorkSource(Protocol):
    """What a scheduler has taken in and worked off since it started; ``load.work_totals.WorkTotals`` is one."""

    @property
    def dispatched_watermarks(self) -> tuple[tuple[str, int], ...]:
        """(dispatcher, highest ticket taken in) pairs."""
        ...

    @property
    def total_prefill_uncached_tokens(self) -> int: ...

    @property
    def total_prefill_busy_us(self) -> int: ...


class LoadSink(Protocol):
    """Where load reports go: dispatchers on the network, or processes of this machine."""

    def send(self, load: LoadSnapshot) -> None:
        """Hand on one report, which makes all before it worthless. Never blocks."""
        ...

    def close(self) -> None:
        """Let go of sockets and memory; safe to call twice."""
        ...


class TotalsSource(Protocol):
    """A scheduler that keeps running totals."""

    def totals(self) -> SchedulerTotals: ...


class MetricsSink(Protocol):
    """Where a step's statistics go. Must be cheap: it is called on the scheduler's thread."""

    def record(self, stats: SchedulerStats) -> None: ...


class SyncGroup(Protocol):
    """Ranks that agree with each other. Every member makes the same calls, in the same order, always."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, this rank included."""
        ...

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        """Return the element-wise minimum of all members' int64 vectors, which have one length.

        Raises:
            SyncTimeoutError: a member did not come in time.
            SyncDivergenceError: all came, with different calls.
        """
        ...

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        """Return all members' int64 vectors, which have one length, one after the other in rank order.

        Raises:
            SyncTimeoutError: a member did not come in time.
            SyncDivergenceError: all came, with different calls.
        """
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...


class PageStore(Protocol):
    """The storage tier: pages under keys. Used by one thread at a time.

    A key names its content, so a page never changes: a store that holds the key already may keep what it has. Every
    method may raise ``StorageError``; ``hicache.storage.CheckedPageStore`` turns that into misses and counters.
    """

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Return how many of ``keys`` are held, counted from the first to the first one that is not."""
        ...

    def batch_get(self, keys: Sequence[str]) -> Sequence[PageBytes | None]:
        """Return one page per key, None where it is not held."""
        ...

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> Sequence[bool]:
        """Store pages of at least one byte; return for each whether its key is held now."""
        ...

    def delete(self, keys: Sequence[str]) -> int:
        """Remove what can be removed of ``keys`` now; return how many were."""
        ...

    def close(self) -> None:
        """Let go of files, sockets and memory; what is stored stays where the store outlives the process."""
        ...
