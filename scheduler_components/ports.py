"""The ports of the kit: the small interfaces between a scheduler and its components. Read this page first.

Sources are read, sinks are written. Each port has at most five members of its own, and a component asks for the
smallest that will do. Any object that has the members fits: nothing here is ever inherited from. Sources are read late,
so a scheduler that rebinds ``self.running`` needs no lambda. Beside a port stands its null object, where a component
can do without: no caller writes ``if enabled``, and none asks whether a collaborator is the null object.

Each docstring says who has the members and who uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Mapping, MutableSequence, Sequence, Sized
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from scheduler_components.errors import ConfigError
from scheduler_components.events import EventBatch, KVCacheEvent, MediumGroup
from scheduler_components.page_operations import Instruction, IoEvent
from scheduler_components.page_shape import PageShape
from scheduler_components.values import (
    AllocationAction,
    AllocationRecord,
    DecodeMoments,
    HeldCount,
    InputMessage,
    KvMetrics,
    LoadSections,
    LoadSnapshot,
    OutputBatch,
    OutputStats,
    PageHolding,
    PoolCount,
    PublisherStats,
    QuiesceStats,
    RelayedInput,
    RequestRejection,
    SchedulerStats,
    SchedulerTotals,
    StallReport,
    TokenOutput,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from scheduler_components.values import FinishReason, SyncCall

__all__ = [
    "KvEventSource",
    "HeldBlocksSource",
    "NullHeldBlocksSource",
    "AuditedPool",
    "PageHolders",
    "NullPageHolders",
    "TreeNode",
    "AllocationSink",
    "NullAllocationSink",
    "OwnerTrails",
    "NullOwnerTrails",
    "StallSink",
    "QueuedRequest",
    "QueueSource",
    "PoolSource",
    "RateSource",
    "NullRateSource",
    "LoadSectionsSource",
    "NullLoadSectionsSource",
    "LoadSource",
    "NullLoadSource",
    "WorkSource",
    "NullWorkSource",
    "TotalsSource",
    "NullTotalsSource",
    "PublisherStatsSource",
    "NullPublisherStatsSource",
    "OutputStatsSource",
    "StateValue",
    "StateProvider",
    "Profiler",
    "NullProfiler",
    "KvEventSink",
    "EventPublisher",
    "NullEventPublisher",
    "KvMetricsSink",
    "NullKvMetricsSink",
    "LoadSink",
    "NullLoadSink",
    "MetricsSink",
    "NullMetricsSink",
    "OutputSink",
    "PageBytes",
    "PageStore",
    "ZeroCopyPageStore",
    "CopyEvent",
    "NullCopyEvent",
    "HostLayerView",
    "DeviceMemory",
    "LayerDoneCounter",
    "NullLayerDoneCounter",
    "HostPages",
    "PageMover",
    "PageHook",
    "NullPageHook",
    "SyncGroup",
    "InputSource",
    "NullInputSource",
    "MessageDecoder",
    "InputRelay",
    "NullInputRelay",
    "RequestIds",
    "NullRequestIds",
    "RejectionSink",
    "NullRejectionSink",
    "ComputeGate",
    "NullComputeGate",
    "PausableRequests",
    "FlushableCache",
    "WeightStore",
    "NullWeightStore",
    "MemoryOccupation",
    "NullMemoryOccupation",
    "QuiesceStatsSource",
    "NullQuiesceStatsSource",
    "StopConditions",
    "ProcessedRequest",
    "StreamedRequest",
    "KvReleaser",
    "RequestFinisher",
    "ResultObserver",
    "NullResultObserver",
    "OutputStream",
]

# Sources: what a scheduler and its cache say of themselves.


class KvEventSource(Protocol):
    """A cache that records what happens to its blocks: ``RadixCache``. Read by ``SchedulerKvEventsPublisher``."""

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the events since the last call, in order, and forget them."""
        ...


class HeldBlocksSource(Protocol):
    """Says what the KV pool really holds: ``RadixCache``, ``HiRadixCache``, an adapter over any engine's block table.

    It reads the pool itself, never what was told of it: whoever compares the two finds what a stream forgot. It may
    walk everything, so it is asked by checks and by ``/kv_pool``, never in a step.
    """

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Return the hash of each block that a request could use now, signed 64-bit, by medium and KV-cache group.

        A place that is not named is one that this oracle knows nothing of; one with no hashes is known to be empty.
        ``events.medium_group`` makes a place of what an event says.
        """
        ...


class NullHeldBlocksSource:
    """The oracle of an engine whose pool nobody can read: it names no place, so nothing is compared."""

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        return {}


# What keeps a pool honest: what a pool says of its pages, who holds some, and who took and gave them.


class TreeNode(Protocol):
    """One node of a prefix tree: ``RadixNode``. Read by ``PoolInvariantChecker``.

    A lock is counted on the node where a prefix ends and on all above it. The root has no parent and counts nothing.
    """

    @property
    def parent(self) -> TreeNode | None: ...

    @property
    def lock_count(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]:
        """Pages of this pool that the node holds; none where it is not on the device."""
        ...


class AuditedPool(Protocol):
    """A pool whose pages can be counted and named: ``RadixCachePool``. Read by ``PoolInvariantChecker``.

    Each fact comes from whoever keeps it, never from the difference of others: what is derived is always right.
    """

    @property
    def name(self) -> str:
        """Of the pool, for example ``full``, ``swa`` or ``mamba``; no other pool of the scheduler has it."""
        ...

    def count(self) -> PoolCount:
        """Return how the pages are divided. Called in steps: no walk over pages."""
        ...

    def free_pages(self) -> Sequence[int]:
        """Return the free list as it is, with whatever stands in it twice."""
        ...

    def holdings(self) -> Iterable[PageHolding]:
        """Return what each holder outside of the tree has."""
        ...

    def tree_nodes(self) -> Iterable[TreeNode]:
        """Return every node below the root of the tree that caches pages; none for a pool without one."""
        ...


class PageHolders(Protocol):
    """Whoever holds pages outside of the cache: a scheduler's requests, its sessions, copies between tiers.

    Read by ``RadixCachePool``.
    """

    def count_held(self) -> HeldCount:
        """Return how many pages they hold outside the cache. Called in steps."""
        ...

    def holdings(self) -> Iterable[PageHolding]:
        """Return what each of them has."""
        ...


class NullPageHolders:
    """The holders of a pool of which nobody holds pages."""

    def count_held(self) -> HeldCount:
        return _NOTHING_HELD

    def holdings(self) -> Iterable[PageHolding]:
        return ()


_NOTHING_HELD = HeldCount()


class AllocationSink(Protocol):
    """Is told who takes and gives pages: ``AllocationLog``. Called by whatever hands pages to requests."""

    def is_sampled(self, holder: str) -> bool:
        """Say whether a request's, session's or copy's pages are noted. Ask once per holder."""
        ...

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """Note what a watched holder does, or is done to it.

        Args:
            action: ``took`` from the free list, ``gave`` back to it, ``cached`` its own pages, ``locked`` or
                ``unlocked`` cached ones.
            pool: of the pages.
            holder: whose they are, or were.
            component: the code that acts, for example ``RequestKvCache.grow``.
            pages: must not be changed afterwards: they are kept, not copied.
        """
        ...


class NullAllocationSink:
    """The log of a scheduler that keeps no ledger of owners."""

    def is_sampled(self, holder: str) -> bool:  # noqa: ARG002 - the port's
        return False

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        pass


class OwnerTrails(Protocol):
    """Knows who took and gave a page: ``AllocationLog``. Read by ``PoolInvariantChecker`` when something is wrong."""

    def history(self, pool: str, pages: Collection[int]) -> Sequence[AllocationRecord]:
        """Return what is known of any of these pages, oldest first."""
        ...


class NullOwnerTrails:
    """The trails of a scheduler that keeps no ledger of owners."""

    def history(self, pool: str, pages: Collection[int]) -> Sequence[AllocationRecord]:  # noqa: ARG002 - the port's
        return ()


class StallSink(Protocol):
    """Is told that a scheduler makes no progress: ``LogStallSink``. Called by a watchdog, on its own thread."""

    def on_stall(self, report: StallReport) -> None:
        """A phase has taken too long, and goes on."""
        ...

    def on_resume(self, report: StallReport) -> None:
        """It has ended."""
        ...


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


class WorkSource(Protocol):
    """What a scheduler has taken in and computed since it started: ``WorkCounters``. Read by ``LoadInquirer``."""

    @property
    def dispatched_watermarks(self) -> tuple[tuple[str, int], ...]:
        """(dispatcher, highest ticket taken in) pairs."""
        ...

    @property
    def total_prefill_uncached_tokens(self) -> int:
        """Tokens that prefill has computed."""
        ...

    @property
    def total_prefill_busy_us(self) -> int:
        """Microseconds of the steps that computed them."""
        ...

    @property
    def decode_moments(self) -> DecodeMoments | None:
        """Sums over the steps that decoded; None before the first."""
        ...


class NullWorkSource:
    """The work of a scheduler that does not count it."""

    dispatched_watermarks = ()
    total_prefill_uncached_tokens = 0
    total_prefill_busy_us = 0
    decode_moments = None


class TotalsSource(Protocol):
    """Running totals: the scheduler itself. Read by ``MetricsEmitter``."""

    def totals(self) -> SchedulerTotals:
        """Return the totals of this moment; none ever falls."""
        ...


class NullTotalsSource:
    """The totals of a scheduler that keeps none."""

    def totals(self) -> SchedulerTotals:
        return SchedulerTotals()


class PublisherStatsSource(Protocol):
    """A publisher that counts what it does: ``SchedulerKvEventsPublisher``. Read by ``MetricsEmitter``."""

    def stats(self) -> PublisherStats:
        """Return the counters of this moment."""
        ...


class NullPublisherStatsSource:
    """The counters of a scheduler without a publisher."""

    def stats(self) -> PublisherStats:
        return PublisherStats()


class OutputStatsSource(Protocol):
    """A streamer of outputs that counts what it does: ``OutputStreamer``. Read by ``PrometheusOutputs``, per scrape."""

    def stats(self) -> OutputStats:
        """Return the counters of this moment."""
        ...


StateValue: TypeAlias = int | float | bool | str | None
"""What a value of the internal state is: what JSON has without nesting."""


class StateProvider(Protocol):
    """A part that shows values of its own, and lets some be set. Called by ``InternalState``, between two steps."""

    @property
    def settable(self) -> Collection[str]:
        """Names of the values that can be set; always the same, and all of them are in ``state()``."""
        ...

    def state(self) -> Mapping[str, StateValue]:
        """Return the values of this moment, by name; the names are always the same."""
        ...

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        """Look at values for names of ``settable``, together, and set none.

        Raises:
            ConfigError: naming the value that cannot work.
        """
        ...

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        """Set values that ``check_state`` has let through."""
        ...


class Profiler(Protocol):
    """Records what this process does: ``profiling.TorchProfiler``, ``profiling.StackSampler``.

    Called by ``ProfilerManager``, on the scheduler's thread.
    """

    def start(self) -> None:
        """Begin to record. What it raises ends the session."""
        ...

    def stop(self, name: str) -> str:
        """End the recording and write it under this name, to which it adds its own ending; returns where it is."""
        ...


class NullProfiler:
    """The profiler of a scheduler that has none."""

    def start(self) -> None:
        pass

    def stop(self, name: str) -> str:  # noqa: ARG002
        return ""


# Sinks: where events, load, metrics and outputs go.


class KvEventSink(Protocol):
    """Where batches of events go: ``ZmqEventPublisher``. Called by ``SchedulerKvEventsPublisher``."""

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


class KvMetricsSink(Protocol):
    """Where KvMetrics go, usually the serving process: ``ZmqKvMetricsSink``.

    Called by ``SchedulerKvEventsPublisher``.
    """

    @property
    def wants_metrics(self) -> bool:
        """False where nobody receives: nothing is counted and sent then."""
        ...

    def send(self, metrics: KvMetrics) -> None:
        """Hand on one report; drops it, counted, when nobody takes it. Never blocks.

        Raises:
            ForkedPublisherError: this is a child of the process that opened the sink.
        """
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...


class NullKvMetricsSink:
    """The KvMetrics sink of a scheduler without a serving process."""

    wants_metrics = False

    def send(self, metrics: KvMetrics) -> None:
        pass

    def close(self) -> None:
        pass


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


class NullLoadSink:
    """The load sink of a rank that owns no stream, and of an engine whose load nobody asked for."""

    wants_load = False

    def send(self, load: LoadSnapshot) -> None:
        pass

    def close(self) -> None:
        pass


class MetricsSink(Protocol):
    """Where a step's statistics go. Called by ``MetricsEmitter``.

    To Prometheus: ``PrometheusSink``; to a log: ``LogSink``; to the serving process: ``ShmMetricsSink``.
    """

    def record(self, stats: SchedulerStats) -> None:
        """Take one step's statistics. Must be cheap: it is called on the scheduler's thread."""
        ...


class NullMetricsSink:
    """The metrics sink of a rank that reports no metrics."""

    def record(self, stats: SchedulerStats) -> None:
        """Forget them."""

    def close(self) -> None:
        """Nothing is held."""


class OutputSink(Protocol):
    """The way to whoever turns tokens into text: the engine's own socket or queue. Called by ``OutputStreamer``."""

    def is_ready(self) -> bool:
        """Say whether the receiver takes a message now. Asked before a message is made; never blocks."""
        ...

    def send(self, batch: OutputBatch) -> bool:
        """Hand on one message, whole; False when it was not taken after all. Never blocks."""
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...


# Stores: where pages of KV are, and what moves them.


PageBytes: TypeAlias = bytes | bytearray | memoryview
"""The content of one page, as contiguous bytes."""


class PageStore(Protocol):
    """The storage tier, pages under keys: the stores of ``hicache``. Called by one thread at a time.

    A key names its content, so a page never changes: a store that holds the key already may keep what it has. Every
    method may raise ``StorageError``; ``hicache.CheckedPageStore`` turns that into misses and counters.
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


class ZeroCopyPageStore(PageStore, Protocol):
    """A ``PageStore`` that also reads into and writes from the host's own pages: the file, memory and Mooncake stores.

    Its calls end by themselves: a page is not used for anything else until its call has returned.
    """

    def register(self, memory: memoryview) -> None:
        """Take note of the memory that all later buffers are parts of, writable and contiguous; called once."""
        ...

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        """Fill each buffer with the page of its key; return for each whether exactly that many bytes were held.

        What a buffer holds after a no is undefined.
        """
        ...

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        """Store the bytes of each buffer; return for each whether its key is held now."""
        ...


HostLayerView: TypeAlias = "npt.NDArray[np.uint8]"
"""One layer of all host pages: shape ``(num_parts, num_pages, part_bytes)``, with strides of the host's layout."""


class CopyEvent(Protocol):
    """The end of a copy between tiers that was begun: ``NullCopyEvent``, or an event of a device's stream."""

    def is_done(self) -> bool:
        """All its bytes are there. Never waits."""
        ...

    def wait_on_stream(self) -> None:
        """What the calling thread's forward begins from now on comes after this copy; the thread does not wait."""
        ...


class NullCopyEvent:
    """The end of a copy that was done when its call returned."""

    def is_done(self) -> bool:
        return True

    def wait_on_stream(self) -> None:
        pass


class DeviceMemory(Protocol):
    """The pages of the device tier: ``hicache.SimulatedDeviceMemory``, ``hicache.TorchDeviceMemory``.

    Called by ``hicache.HostPool`` on the thread that copies, one layer at a time, so that a forward may use a layer
    while the next one is on its way. ``layer_view`` is the host's memory of that layer. Page numbers were checked by
    the
    caller.
    """

    @property
    def shape(self) -> PageShape:
        """Of every page."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages of the device."""
        ...

    def wait_for_compute_stream(self) -> None:
        """Let copies that begin from now on come after what the calling thread's forward has begun. Never waits."""
        ...

    def copy_to_host(
        self, layer: int, pages: Sequence[int], layer_view: HostLayerView, host_pages: Sequence[int]
    ) -> CopyEvent:
        """Copy one layer of pages to the host, the n-th of ``pages`` to the n-th of ``host_pages``."""
        ...

    def copy_to_device(
        self, layer: int, layer_view: HostLayerView, host_pages: Sequence[int], pages: Sequence[int]
    ) -> CopyEvent:
        """Copy one layer of pages from the host, the n-th of ``host_pages`` to the n-th of ``pages``."""
        ...


class LayerDoneCounter(Protocol):
    """Where a forward waits for pages that are still on their way to the device: ``HiCacheTiers.fence`` of the
    reference
    engine. Called by a device, on the thread of its forward.
    """

    def start_batch(self) -> None:
        """A batch is launched: let the copies begin whose pages it reads."""
        ...

    def wait_until(self, layer: int) -> None:
        """Wait until this layer of the pages is there; at once where none are on their way.

        Raises:
            LoadBackError: they do not come; the batch cannot be computed.
        """
        ...


class NullLayerDoneCounter:
    """The fence of a device whose pages are there before a request runs."""

    def start_batch(self) -> None:
        pass

    def wait_until(self, layer: int) -> None:
        pass


class HostPages(Protocol):
    """The pages of the host tier: ``hicache.HostPool``. Called by ``HiRadixCache``."""

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
    """Moves pages between device, host and storage, without blocking: ``hicache.ThreadPageMover``.

    Called by ``HiRadixCache``.
    """

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Begin these, in order."""
        ...

    def poll(self) -> Sequence[IoEvent]:
        """Return what has happened since the last call, on this rank.

        Every instruction is answered. One that could not be carried out, for whatever reason, is answered with an event
        that says so; nothing is raised, so that all ranks can agree on it.
        """
        ...

    @property
    def load_back_budget_pages(self) -> int:
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
    """Sees pages that were computed and loaded: a simulated device that makes their bytes, a test that checks them.

    Called by ``HiRadixCache``.
    """

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        """The device has computed these pages; their whole digests stand one after the other."""
        ...

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        """These device pages were copied from the host, and requests may use them from now on.

        Raises:
            CacheIntegrityError: a page holds another's bytes, or changed on its way.
        """
        ...


class NullPageHook:
    """The page hook of an engine that does not look into its pages."""

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        pass

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        pass


# Agreement between ranks.


class SyncGroup(Protocol):
    """Ranks that agree with each other: ``hicache.TorchSyncGroup``. Called by ``hicache.ParallelGroups``.

    Every member makes the same calls, in the same order, always.
    """

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


# Input: what comes to the leading rank, and how it reaches all ranks of the replica. Used by
# ``intake.RequestReceiver``.

Message_co = TypeVar("Message_co", covariant=True)


class InputSource(Protocol):
    """Where messages come in on the leading rank: ``intake.ZmqInputSource``, a queue, a ring of an embedded server."""

    def poll(self, most: int) -> Sequence[bytes]:
        """Return what has come, oldest first, at most ``most`` messages; never wait."""
        ...


class NullInputSource:
    """The source of a rank that does not lead: all it gets comes from the leading one."""

    def poll(self, most: int) -> Sequence[bytes]:  # noqa: ARG002
        return ()


class MessageDecoder(Protocol[Message_co]):
    """Reads the engine's messages; the same on every rank."""

    def read(self, frame: bytes) -> InputMessage[Message_co]:
        """Return what a frame says. Raises DecodeError for one that is no message of this engine."""
        ...


class InputRelay(Protocol):
    """Brings the leading rank's input to all ranks of the replica: ``intake.SyncGroupRelay``,
    ``intake.ZmqLeaderRelay``.
    """

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        """Return what the leading rank brings. Every rank calls it equally often; the leading one gets ``own`` back.

        Raises:
            SyncTimeoutError, SyncDivergenceError, StopRequestedError: the ranks did not come together.
        """
        ...

    def close(self) -> None:
        """Let go of sockets and groups; safe to call twice."""
        ...


class NullInputRelay:
    """The relay of a replica of one rank."""

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        return own

    def close(self) -> None:
        pass


class RequestIds(Protocol):
    """Says which request ids are in use: a scheduler's queues."""

    def is_taken(self, rid: str) -> bool:
        """A request of this id is in flight, or its end is still to be told."""
        ...


class NullRequestIds:
    """Ids of a scheduler that cannot be asked: only what waits in the intake itself is in use."""

    def is_taken(self, rid: str) -> bool:  # noqa: ARG002
        return False


class RejectionSink(Protocol):
    """Takes the answers to requests that were not let in: the way back to the front."""

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:
        """Take the answer to one request, which comes with it; store or send it without waiting."""
        ...


class NullRejectionSink:
    """The sink of a rank that answers nobody."""

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:
        pass


# Rest: what is paused, emptied, changed and given back. Called by ``quiesce.QuiesceController``, in one order on all
# ranks.


class ComputeGate(Protocol):
    """Says what a scheduler may do now: ``quiesce.QuiesceState``. Read by the scheduler when it makes a batch."""

    @property
    def can_admit(self) -> bool:
        """Requests that wait may begin to run."""
        ...

    @property
    def can_compute(self) -> bool:
        """Requests that run may go on."""
        ...


class NullComputeGate:
    """The gate of a scheduler that nobody pauses."""

    can_admit = True
    can_compute = True


class PausableRequests(Protocol):
    """The requests of a scheduler, as a pause sees them: the scheduler itself. Called between two steps."""

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        ...

    def abort_all(self) -> int:
        """End every request, running and waiting, and tell its client; returns how many."""
        ...

    def retract_all(self) -> int:
        """Take the pages of every running request and let it wait, its output kept; returns how many."""
        ...


class FlushableCache(Protocol):
    """The cache, its tiers and its stream, as a flush sees them. Called while no request holds a page."""

    @property
    def num_operations(self) -> int:
        """Transfers of pages under way on this rank."""
        ...

    def clear(self, weight_version: str) -> None:
        """Forget every cached prefix on device and host, and send so at once, also where no step follows.

        What is cached from now on was computed by the weights of this version, and never matches what others have.
        """
        ...

    def clear_storage_index(self) -> None:
        """Count no page as stored any more, and send so at once."""
        ...


class WeightStore(Protocol):
    """One rank's weights and, beside them, those of an update. What ``begin``, ``load`` and ``checksum`` raise ends the
    update on all ranks; the other two must not fail.
    """

    def begin(self, weight_version: str) -> None:
        """Make room beside the weights for those of this version."""
        ...

    def load(self, name: str, content: bytes) -> None:
        """Load one part of them."""
        ...

    def checksum(self) -> int:
        """Return 63 bits over all that was loaded, as it came: equal on ranks that keep different slices of it."""
        ...

    def commit(self) -> None:
        """Compute with what was loaded from now on."""
        ...

    def roll_back(self) -> None:
        """Forget what was loaded; nothing may have been."""
        ...


class NullWeightStore:
    """The weights of a scheduler that keeps those that it started with: an update is refused at its beginning."""

    def begin(self, weight_version: str) -> None:
        raise ConfigError("weight_version", weight_version, "cannot be loaded", "give this scheduler a WeightStore")

    def load(self, name: str, content: bytes) -> None:  # noqa: ARG002 - the port's
        self.begin(name)

    def checksum(self) -> int:
        return 0

    def commit(self) -> None:
        pass

    def roll_back(self) -> None:
        pass


class MemoryOccupation(Protocol):
    """One rank's device memory by region: ``weights`` and ``kv_cache``, SGLang's tags."""

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        """Give regions back, also those that are not held; weights go to the host, or are lost. Must not fail."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Take regions again, and bring weights back that were kept. What it raises undoes it on all ranks."""
        ...


class NullMemoryOccupation:
    """The memory of a scheduler that gives none back: a release stops it, and changes nothing else."""

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        pass

    def resume(self, tags: Sequence[str]) -> None:
        pass


class QuiesceStatsSource(Protocol):
    """A scheduler that can be paused: ``quiesce.QuiesceState``. Read with the totals."""

    def stats(self) -> QuiesceStats | None:
        """Return the state of this moment; None where nobody can order anything."""
        ...


class NullQuiesceStatsSource:
    """The state of a scheduler that nobody pauses."""

    def stats(self) -> QuiesceStats | None:
        return None


# Requests: what the parts that book results and stream outputs ask of a scheduler's own class. A request is one object
# to all of them; each part sees the few members that it needs.


class StopConditions(Protocol):
    """When a request ends: its sampling parameters. Read by ``check_finished``."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop_token_ids(self) -> Container[int]: ...

    @property
    def ignore_eos(self) -> bool: ...


class ProcessedRequest(Protocol):
    """A request as ``BatchResultProcessor`` sees it: the scheduler's own class.

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
    def limits(self) -> StopConditions: ...

    @property
    def finish_reason(self) -> str | None:
        """None until ``RequestFinisher.finish`` was called with it."""
        ...


class StreamedRequest(Protocol):
    """A request as ``OutputStreamer`` sees it: the scheduler's own class.

    A retraction takes none of its output back.
    """

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


Request_contra = TypeVar("Request_contra", contravariant=True)


class KvReleaser(Protocol[Request_contra]):
    """Gives KV pages to requests and takes them back: the scheduler's cache. Called by ``BatchResultProcessor``."""

    def cache_unfinished(self, request: Request_contra) -> None:
        """Put the pages that are full, up to ``num_computed_tokens``, into the prefix cache."""
        ...

    def free(self, request: Request_contra) -> None:
        """Take all pages back; what is computed may stay in the prefix cache."""
        ...


class RequestFinisher(Protocol[Request_contra]):
    """Knows which requests wait and run: the scheduler itself. Called by ``BatchResultProcessor``."""

    def finish(self, request: Request_contra, reason: FinishReason) -> None:
        """Take a request out, wherever it stands, free its slot, and set its ``finish_reason``."""
        ...


class ResultObserver(Protocol[Request_contra]):
    """Counts what requests get (totals, rates, latencies) and changes nothing. Called by ``BatchResultProcessor``."""

    def on_tokens(self, requests: Sequence[Request_contra], num_tokens: Sequence[int]) -> None:
        """A step gave each of these requests so many tokens, more than one where drafts were accepted.

        Called once per step in which some request got some, before ``ended`` of those that these tokens ended.
        """
        ...

    def on_finished(self, request: Request_contra, reason: FinishReason) -> None:
        """A request is over; its ``finish_reason`` is set."""
        ...


class NullResultObserver:
    """The observer of a scheduler that counts nothing."""

    def on_tokens(self, requests: Sequence[object], num_tokens: Sequence[int]) -> None:
        pass

    def on_finished(self, request: object, reason: FinishReason) -> None:
        pass


class OutputStream(Protocol[Request_contra]):
    """Sends news to clients: ``OutputStreamer``. Called by ``BatchResultProcessor``."""

    def stream(self, requests: Iterable[Request_contra]) -> None:
        """Send the news of these requests, each end once. Never blocks, never raises."""
        ...
