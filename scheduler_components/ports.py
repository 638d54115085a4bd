"""The ports of the kit: the small interfaces between a scheduler and its components. Read this page first.

Sources are read, sinks are written; each has at most five members, and a component asks for the smallest that
will do. Sources are read late: a scheduler that rebinds ``self.running`` needs no lambda. Any object that has the
members fits; nothing here is ever inherited from. What results and outputs ask of requests: ``request_ports``;
what a hierarchical cache asks of a rank's memory and I/O: ``tier_ports``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, MutableSequence, Sequence, Sized
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from scheduler_components.events import EventBatch, KVCacheEvent
from scheduler_components.page_operations import Instruction, IoEvent
from scheduler_components.values import (
    DisaggregationLoad,
    KvMetrics,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    OutputBatch,
    OutputStats,
    PublisherStats,
    QueueLoad,
    SchedulerStats,
    SchedulerTotals,
    SpeculativeLoad,
    TokenOutput,
)

if TYPE_CHECKING:
    from scheduler_components.values import FinishReason, SyncCall

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
    "EventPublisher",
    "NullEventPublisher",
    "BookedRequest",
    "KvResidence",
    "OutputSink",
    "OutputStatsSource",
    "OutputStream",
    "RequestRegister",
    "ResultObserver",
    "StopRules",
    "StreamedRequest",
    "HostPages",
    "PageMover",
    "PageHook",
    "NullMetricsSink",
    "NO_PAGE_HOOK",
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


# The publisher's interface, and the publisher of ranks that own no stream.


class EventPublisher(ABC):
    """Base class kept for publishers written for SGLang's module; the kit itself asks for the ``KvEventSink`` port.

    Args:
        attn_dp_rank: the stream's index, stamped on batches that carry no rank.
    """

    def __init__(self, attn_dp_rank: int = 0) -> None:
        self._attn_dp_rank = attn_dp_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Accept one batch, in order."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is pending and let go of every resource."""

    def idle(self) -> None:  # noqa: B027 - an optional hook: a publisher that never defers has nothing to do
        """Encode and send what is pending; called where the scheduler waits for its device."""

    def stats(self) -> PublisherStats:
        """Counters since the publisher was opened; all zero for a publisher that keeps none."""
        return PublisherStats()


class NullEventPublisher(EventPublisher):
    """Publishes nothing: the sink of a rank that owns no stream, so that no caller ever asks ``if enabled``."""

    def publish(self, events: EventBatch) -> None:
        """Forget the batch."""

    def shutdown(self) -> None:
        """Nothing is held."""


# Ports around requests: what the parts that book results and stream outputs ask of a scheduler's own.
#
# They stand beside ``ports``, which is about caches, load and metrics. A request is one object to all of them; each
# part sees the few members that it needs.


class StopRules(Protocol):
    """When a request ends."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop_token_ids(self) -> Container[int]: ...

    @property
    def ignore_eos(self) -> bool: ...


class BookedRequest(Protocol):
    """A request as the booking of results sees it.

    KV is computed one position behind the tokens: the last token has none until it has gone through the device.
    """

    num_computed_tokens: int
    """Positions whose KV stands in the request's pages; written by the booking."""

    @property
    def token_ids(self) -> MutableSequence[int]:
        """The prompt, then what was generated."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def limits(self) -> StopRules: ...

    @property
    def finish_reason(self) -> str | None:
        """None until ``RequestRegister.finish`` was called with it."""
        ...


class StreamedRequest(Protocol):
    """A request as its output stream sees it. A retraction takes nothing of its output back."""

    @property
    def rid(self) -> str:
        """Unique among the requests whose end has not been streamed."""
        ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def stream_interval(self) -> int:
        """Tokens between two messages of this request; 0 for all at its end."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    def output_since(self, start: int) -> TokenOutput:
        """Return the output from its token ``start`` on, with what belongs to these tokens."""
        ...


Booked_contra = TypeVar("Booked_contra", bound=BookedRequest, contravariant=True)
Streamed_contra = TypeVar("Streamed_contra", bound=StreamedRequest, contravariant=True)
Request_contra = TypeVar("Request_contra", contravariant=True)


class KvResidence(Protocol[Request_contra]):
    """Who gives KV pages to requests and takes them back."""

    def share(self, request: Request_contra) -> None:
        """Put the pages that are full, up to ``num_computed_tokens``, into the prefix cache."""
        ...

    def release(self, request: Request_contra) -> None:
        """Take all pages back; what is computed may stay in the prefix cache."""
        ...


class RequestRegister(Protocol[Request_contra]):
    """Who knows which requests wait and run."""

    def finish(self, request: Request_contra, reason: FinishReason) -> None:
        """Take a request out, wherever it stands, free its slot, and set its ``finish_reason``."""
        ...


class ResultObserver(Protocol[Request_contra]):
    """Who counts what requests get: totals, rates, latencies. Cannot change anything."""

    def generated(self, request: Request_contra, num_tokens: int) -> None:
        """A step gave the request ``num_tokens`` tokens, more than one where drafts were accepted."""
        ...

    def ended(self, request: Request_contra, reason: FinishReason) -> None: ...


class OutputStream(Protocol[Request_contra]):
    """Who tells clients; ``OutputStreamer`` is one."""

    def stream(self, requests: Iterable[Request_contra]) -> None:
        """Tell the news of these requests, each end once. Never blocks, never raises."""
        ...


class OutputSink(Protocol):
    """The way to the receiver of outputs, usually the process that turns tokens into text."""

    def is_ready(self) -> bool:
        """Say whether the receiver takes a message now. Asked before a message is made; never blocks."""
        ...

    def send(self, batch: OutputBatch) -> bool:
        """Hand on one message, whole; False when it was not taken after all. Never blocks."""
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...


class OutputStatsSource(Protocol):
    """A streamer of outputs that counts what it does; ``OutputStreamer`` is one."""

    def stats(self) -> OutputStats: ...


# What a hierarchical cache asks of one rank: its host pages, and whoever moves pages between the tiers.


class HostPages(Protocol):
    """The pages of the host tier; ``hicache.host_pool.HostPool`` with memory behind them."""

    def reserve(self, num_pages: int) -> list[int]:
        """Take free pages, to write to.

        Raises:
            OutOfPagesError: this rank cannot; nothing is taken.
        """
        ...

    def commit(self, pages: Sequence[int]) -> None:
        """Make reserved pages readable."""
        ...

    def abort(self, pages: Sequence[int]) -> None:
        """Give reserved pages back."""
        ...

    def release(self, pages: Sequence[int]) -> None:
        """Give committed pages back."""
        ...

    def check_integrity(self, committed: Sequence[int]) -> None:
        """Check that free, reserved and committed pages add up, ``committed`` being those that the tree holds.

        Raises:
            CacheIntegrityError: with the count that does not add up.
        """
        ...


class PageMover(Protocol):
    """Moves pages between device, host and storage, as the hierarchical cache tells it to, without blocking."""

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Begin these, in order."""
        ...

    def poll(self) -> Sequence[IoEvent]:
        """Return what has happened since the last call, on this rank.

        Raises:
            CacheIntegrityError: an instruction could not be obeyed: the kit is to blame.
        """
        ...

    @property
    def load_room_pages(self) -> int:
        """Pages that this rank can begin to copy to the device now."""
        ...

    @property
    def has_storage(self) -> bool:
        """This rank has a storage backend attached and can use it."""
        ...

    def close(self) -> None:
        """End what is under way and let go of threads and backend; safe to call twice."""
        ...


class PageHook(Protocol):
    """Knows what pages ought to contain: a simulated device that makes their bytes, a test that checks them."""

    def computed(self, digests: bytes, pages: Sequence[int]) -> None:
        """The device has computed these pages; their whole digests stand one after the other."""
        ...

    def loaded(self, digests: bytes, pages: Sequence[int]) -> None:
        """These device pages were copied from the host, and requests may use them from now on.

        Raises:
            CacheIntegrityError: a page is another one's, or changed on its way.
        """
        ...


class NullMetricsSink:
    """The sink of a rank that reports no metrics."""

    def record(self, stats: SchedulerStats) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


# NO_PAGE_HOOK: the page hook of an engine that does not look into its pages.


class _NoWitness:
    def computed(self, digests: bytes, pages: Sequence[int]) -> None:
        pass

    def loaded(self, digests: bytes, pages: Sequence[int]) -> None:
        pass


NO_PAGE_HOOK: PageHook = _NoWitness()
