"""The values that travel: between packages, to sinks, and over the wire. Nothing here has behaviour of its own.

In order: why a request ended, load, caches over tiers, what a pool held and who holds its pages, latencies, statistics,
outputs, agreement between ranks, input.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from scheduler_components.events import MediumGroup

__all__ = [
    "FinishReason",
    "BatchingStats",
    "DecodeMoments",
    "DisaggregationLoad",
    "LoadSections",
    "LoadSnapshot",
    "LoraLoad",
    "MemoryLoad",
    "QueueLoad",
    "SpeculativeLoad",
    "CachedTokens",
    "TierStats",
    "KvPoolSnapshot",
    "HeldCount",
    "PageHolding",
    "PoolCount",
    "AllocationAction",
    "AllocationRecord",
    "IntegrityStats",
    "PoolStats",
    "StallReport",
    "HistogramSnapshot",
    "LatencySnapshot",
    "KvMetrics",
    "PublisherStats",
    "QuiesceStats",
    "SchedulerStats",
    "SchedulerTotals",
    "OutputBatch",
    "OutputDelta",
    "OutputStats",
    "TokenOutput",
    "MAX_OPERATION_BYTES",
    "SYNC_CALL_INTS",
    "SyncCall",
    "describe_calls",
    "ForwardMode",
    "InputMessage",
    "InputKind",
    "RequestRejection",
    "ReceiverStats",
    "RejectionReason",
    "RelayedInput",
]


class FinishReason(enum.StrEnum):
    """Why a request ended. The first three are the values of SGLang's ``meta_info``, the last is vLLM's."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


# Load. What one replica says of itself: the value behind ``/v1/loads``, dispatching and the load gauges.
#
# Field and section names are SGLang's (``LoadSnapshot``, 0.5.23), so that readers of its ``/v1/loads`` read this one.


class QueueLoad(msgspec.Struct, frozen=True, gc=False):
    """Requests that are neither running nor plainly waiting, counted."""

    waiting: int = 0
    grammar: int = 0
    paused: int = 0
    retracted: int = 0


class DisaggregationLoad(msgspec.Struct, frozen=True, gc=False):
    """Queues of a prefill or decode instance under prefill/decode disaggregation.

    ``waiting_reqs`` and ``pending_tokens`` are what these queues add to the plain counts: on a decode instance
    requests in transfer already hold their pages, so they wait but add no pending tokens.
    """

    mode: str = "null"
    prefill_bootstrap_queue_reqs: int = 0
    prefill_inflight_queue_reqs: int = 0
    decode_prealloc_queue_reqs: int = 0
    decode_transfer_queue_reqs: int = 0
    decode_retracted_queue_reqs: int = 0
    kv_transfer_speed_gb_s: float = 0.0
    kv_transfer_latency_ms: float = 0.0
    waiting_reqs: int = 0
    pending_tokens: int = 0


class LoraLoad(msgspec.Struct, frozen=True, gc=False):
    """Adapter slots in use; adapters of running and of waiting requests, by name.

    The names travel with every report and are one label of a metric, joined by commas: give each adapter once, and of
    those that wait only the first few dozen, which is more than a router looks at.
    """

    slots_used: int
    slots_total: int
    utilization: float
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()


class SpeculativeLoad(msgspec.Struct, frozen=True, gc=False):
    """Mean accepted tokens per verification step, and the share of drafts that were accepted."""

    accept_length: float
    accept_rate: float


class MemoryLoad(msgspec.Struct, frozen=True, gc=False):
    """Where device memory went, in GB, and how many tokens the KV pool holds."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float
    token_capacity: int


class DecodeMoments(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Sums over the steps that decoded and prefilled nothing, since the start. An array in JSON, in SGLang's order.

    With b requests and t microseconds of a step, a reader takes differences between two reports and has the
    least-squares line t = t0 + t1 * b of that time: what one more request costs those that run.

    Attributes:
        steps: number of steps.
        requests: sum of b.
        time_us: sum of t.
        requests_squared: sum of b * b.
        requests_time_us: sum of b * t.
        tokens: tokens generated.
    """

    steps: int = 0
    requests: int = 0
    time_us: int = 0
    requests_squared: int = 0
    requests_time_us: int = 0
    tokens: int = 0


class LoadSections(msgspec.Struct, frozen=True, gc=False):
    """The parts of a load snapshot that not every engine has; None for those that this one has not."""

    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None


class LoadSnapshot(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One replica's load at one moment.

    Attributes:
        sequence: one more with each snapshot; a reader drops a report whose sequence it has passed.
        timestamp: wall-clock seconds since the epoch at which the counts were read.
        dp_rank: the replica (``ParallelState.kv_stream_index``).
        num_running_reqs, num_waiting_reqs: requests.
        num_pending_tokens: input tokens of waiting requests plus what is left of a chunked prefill.
        num_waiting_uncached_tokens: the part of them that no cached prefix covers.
        num_used_tokens: KV tokens held by running requests; evictable cache is not counted.
        num_total_tokens: used plus pending: what a dispatcher balances.
        max_total_num_tokens: capacity of the KV pool in tokens.
        page_size: tokens per page of that pool.
        max_running_requests: request slots.
        token_usage: used / capacity, 0 to 1.
        gen_throughput: generated tokens per second over the recent window.
        cache_hit_rate: cached / input tokens over the recent window, 0 to 1.
        utilization: the fuller of request slots and tokens, 0 to 1.
        total_prefill_uncached_tokens: tokens that prefill has computed since the start.
        total_prefill_busy_us: microseconds that those steps took; readers take differences of both between two
            reports and have the prefill rate (SGLang 0.5.16 and later).
        decode_moments: of the steps that decoded; None before the first (SGLang 0.5.23).
        dispatched_watermarks: (dispatcher, ticket) pairs: this report counts every request that the dispatcher gave
            that ticket or a lower one.
    """

    sequence: int = 0
    timestamp: float = 0.0
    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_pending_tokens: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    max_total_num_tokens: int = 0
    page_size: int = 1
    max_running_requests: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    utilization: float = 0.0
    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    decode_moments: DecodeMoments | None = None
    dispatched_watermarks: tuple[tuple[str, int], ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool."""
        return self.max_total_num_tokens // self.page_size if self.page_size > 0 else 0


# Caches over tiers: what a hierarchical cache has done, and where prompts were found.


class CachedTokens(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The cached tokens of one prompt, by the tier on which they were found, as ``TierStats`` tells hits apart."""

    device: int = 0
    host: int = 0
    storage: int = 0


class TierStats(msgspec.Struct, gc=False):
    """Counters since the start; each only ever grows. The same on every rank of a replica.

    Attributes:
        prompt_tokens: prompts at their first admission.
        device_hit_tokens, host_hit_tokens, storage_hit_tokens: of them, what was cached, by the tier on which it was
            found: a page that had to be loaded from the host first is a hit of the host, one that had to be read
            from storage is a hit of storage.
        pages_written, pages_not_written: copied to the host; given up because of no room or a failure on some rank.
        pages_loaded, pages_not_loaded: copied back to the device; given up.
        pages_backed_up, pages_not_backed_up: written to storage; given up.
        pages_prefetched: read from storage and put in the tree.
        pages_revoked: found in storage on every rank and then not put in the tree.
        prefetches, prefetches_revoked: begun; of them, ended without a page.
        pages_dropped: evicted from the device without a copy on the host.
    """

    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    pages_written: int = 0
    pages_not_written: int = 0
    pages_loaded: int = 0
    pages_not_loaded: int = 0
    pages_backed_up: int = 0
    pages_not_backed_up: int = 0
    pages_prefetched: int = 0
    pages_revoked: int = 0
    prefetches: int = 0
    prefetches_revoked: int = 0
    pages_dropped: int = 0

    def record_admission(
        self, *, prompt_tokens: int, cached_tokens: int, loaded_tokens: int, read_tokens: int
    ) -> CachedTokens:
        """Count one prompt that begins to run: how much of it is cached, and what was moved for it before."""
        loaded = min(loaded_tokens, cached_tokens)
        read = min(read_tokens, loaded)
        cached = CachedTokens(cached_tokens - loaded, loaded - read, read)
        self.prompt_tokens += prompt_tokens
        self.device_hit_tokens += cached.device
        self.host_hit_tokens += cached.host
        self.storage_hit_tokens += cached.storage
        return cached

    def copy(self) -> TierStats:
        """Return the counts of this moment."""
        return msgspec.structs.replace(self)


class KvPoolSnapshot(msgspec.Struct, frozen=True):
    """What a KV pool held at one moment, and where its stream stood then.

    Attributes:
        blocks: hashes by medium and KV-cache group, as ``HeldBlocksSource.held_blocks`` gives them.
        sequence: number of the last batch of the stream that tells of changes before this moment; all later ones tell
            of changes after it. -1 when no batch had gone out; None when whoever read the pool does not know.
        rank: index of the stream.
    """

    blocks: Mapping[MediumGroup, Collection[int]]
    sequence: int | None = None
    rank: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in all places; one that lies in two counts twice."""
        return sum(map(len, self.blocks.values()))


# Who holds the pages of a pool. A page is the pool's unit: KV of ``page_size`` tokens, a mamba state, a request slot.


class PoolCount(msgspec.Struct, frozen=True, gc=False):
    """How the pages of one pool are divided at one moment; names are those of SGLang's leak reports.

    Attributes:
        name: of the pool, for example ``full``, ``swa`` or ``mamba``.
        total: pages of the pool, numbered from ``first_page``.
        available: free.
        evictable: cached, and locked by nobody.
        protected: cached and locked.
        session_held: of sessions that are between two requests, outside the cache.
        uncached: of requests, outside the cache.
        in_transfer: of copies between tiers, outside the cache.
        first_page: 1 where page 0 is a place for padding, as in SGLang.
    """

    name: str
    total: int
    available: int
    evictable: int = 0
    protected: int = 0
    session_held: int = 0
    uncached: int = 0
    in_transfer: int = 0
    first_page: int = 0

    @property
    def num_missing(self) -> int:
        """Pages that nobody accounts for; negative when some are accounted for twice. 0 in a sound pool."""
        held = self.protected + self.session_held + self.uncached + self.in_transfer
        return self.total - self.available - self.evictable - held

    @property
    def num_used(self) -> int:
        """Pages that are neither free nor evictable."""
        return self.total - self.available - self.evictable

    @property
    def usage(self) -> float:
        """Used / total, 0 to 1; 0 for a pool without pages."""
        return self.num_used / self.total if self.total else 0.0

    def __str__(self) -> str:
        return (
            f"[{self.name}] total={self.total}, available={self.available}, evictable={self.evictable}, "
            f"protected={self.protected}, session_held={self.session_held}, uncached={self.uncached}, "
            f"in_transfer={self.in_transfer}"
        )


class HeldCount(msgspec.Struct, frozen=True, gc=False):
    """Pages outside the cache, by the kind of who holds them: terms of ``PoolCount``."""

    uncached: int = 0
    session_held: int = 0
    in_transfer: int = 0


class PageHolding(msgspec.Struct, frozen=True):
    """What one holder has of one pool.

    Attributes:
        holder: id of the request, session or copy.
        kind: what the holder is.
        pages: its own, outside the cache.
        shared: cached pages that it uses.
        node: the end of the prefix that it has locked in the pool's tree, as the tree's nodes are; None for none.
    """

    holder: str
    kind: Literal["request", "session", "transfer"] = "request"
    pages: Sequence[int] = ()
    shared: Sequence[int] = ()
    node: object = None


AllocationAction: TypeAlias = Literal["allocated", "freed", "cached", "locked", "unlocked"]
"""What can be done with a page, as ledgers note it."""


class AllocationRecord(msgspec.Struct, frozen=True):
    """One entry of a ledger of owners: who took or gave which pages, when and where.

    Attributes:
        step: of the scheduler.
        phase: what the step was at, for example ``results``.
        component: the code that did it, for example ``RequestKvCache.grow``.
        action: what it did.
        holder: id of the request, session or copy.
        pool: of the pages.
        pages: the pages.
    """

    step: int
    phase: str
    component: str
    action: AllocationAction
    holder: str
    pool: str
    pages: Sequence[int]

    def __str__(self) -> str:
        return f"{self.action} by {self.holder} in step {self.step} ({self.component}, {self.phase})"


class PoolStats(msgspec.Struct, frozen=True, gc=False):
    """How full each pool of a scheduler is now. Names are those of SGLang's metrics; pools that it has not are None.

    Attributes:
        max_pool_usage: used / total of the fullest pool, 0 to 1.
        full_token_usage, kv_available_tokens, kv_evictable_tokens, kv_used_tokens: KV of full attention.
        swa_token_usage, swa_available_tokens, swa_evictable_tokens, swa_used_tokens: KV of sliding windows.
        mamba_usage, mamba_available_slots, mamba_evictable_slots, mamba_used_slots: states.
        session_held_pages: pages, over all pools, that sessions hold between two requests.
    """

    max_pool_usage: float
    full_token_usage: float | None = None
    kv_available_tokens: int | None = None
    kv_evictable_tokens: int | None = None
    kv_used_tokens: int | None = None
    swa_token_usage: float | None = None
    swa_available_tokens: int | None = None
    swa_evictable_tokens: int | None = None
    swa_used_tokens: int | None = None
    mamba_usage: float | None = None
    mamba_available_slots: int | None = None
    mamba_evictable_slots: int | None = None
    mamba_used_slots: int | None = None
    session_held_pages: int = 0


class IntegrityStats(msgspec.Struct, frozen=True, gc=False):
    """What a ``PoolInvariantChecker`` and a watchdog have done and found. All but ``problems_open`` only ever grow.

    Attributes:
        checks: times that the counts of all pools were added up.
        censuses: of them, those with a look at every page, lock and told block.
        checks_failed: a pool or a policy raised instead of answering.
        problems: found so far; one that stands counts once.
        pages_lost: of them, pages that nobody has.
        stalls: times that no progress was made for longer than the watchdog's bound.
        problems_open: that the last census found.
    """

    checks: int = 0
    censuses: int = 0
    checks_failed: int = 0
    problems: int = 0
    pages_lost: int = 0
    stalls: int = 0
    problems_open: int = 0


class StallReport(msgspec.Struct, frozen=True):
    """A scheduler that made no progress; as text, a sentence.

    Attributes:
        rank: in words.
        step, phase: where it stands, or stood.
        request: id of the request at hand; empty where it is a whole batch.
        waited_s: seconds in this phase, so far or in all.
        stacks: of all threads, the scheduler's first.
        is_resolved: it goes on again.
    """

    rank: str
    step: int
    phase: str
    request: str
    waited_s: float
    stacks: str = ""
    is_resolved: bool = False

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"step {self.step}, phase {self.phase}" + (f", request {self.request}" if self.request else "")

    def __str__(self) -> str:
        does = "went on after" if self.is_resolved else "has made no progress for"
        return f"rank {self.rank} {does} {self.waited_s:.1f} s in {self.place}"


class HistogramSnapshot(msgspec.Struct, frozen=True, gc=False):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds of the buckets, rising; a value equal to a bound is in its bucket, as in Prometheus.
        counts: values in each bucket, and in one more for those above the last bound. Not cumulative.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)


class LatencySnapshot(msgspec.Struct, frozen=True, gc=False):
    """The histograms of one scheduler at one moment, seconds. The counts only grow.

    Attributes:
        time_to_first_token: from the first queueing, one value per request.
        inter_token: between tokens, one value per token; tokens that come together share their interval evenly.
        e2e: from the first queueing to the end, one value per request that ended, aborts too.
        queue: in the queue before the first prefill, one value per request. Waits after retractions are not in it, as
            in SGLang: they would look like arrivals that waited.
        prefill, decode: over all stays in these phases, one value per request that ended.
    """

    time_to_first_token: HistogramSnapshot
    inter_token: HistogramSnapshot
    e2e: HistogramSnapshot
    queue: HistogramSnapshot
    prefill: HistogramSnapshot
    decode: HistogramSnapshot


# Statistics. What a scheduler, its publisher and its counters say in one step.


class KvMetrics(msgspec.Struct, frozen=True, gc=False):
    """Slots and blocks of one rank, as SGLang's schedulers push them to the serving process (0.5.x names).

    ``kv_active_blocks`` and ``kv_total_blocks`` count whole pages; the two ``perc`` and ``rate`` values run from
    0 to 1 as in the original.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0
    data_parallel_rank: int = 0


class PublisherStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of one event publisher since it was opened.

    Attributes:
        batches_sent, events_sent, bytes_sent: handed to the PUB socket.
        events_refused: readers would not take them; left out of their batch by name, the rest went out.
        batches_collapsed: merged with others into one, because more were pending than may be.
        batches_dropped: accepted by ``publish()`` and not sent before the deadline of ``close()``.
        replays_served, batches_replayed: finished replay answers, and batches in them.
        replays_refused: replay requests that were malformed or over the client limit.
        replays_truncated: replay answers cut before their end: the client was too slow, or the publisher closed.
        replays_open: answers being sent now.
        batches_buffered, bytes_buffered: kept for replay one by one, now.
        blocks_in_base: standing blocks of batches that left that window, now.
        bytes_in_base: size of the payloads that these blocks came in, now. Of payloads that are half gone, what stands
            is kept alone once more is gone than stands. Besides, the base takes some 100 bytes per block.
        batches_pending: accepted and not yet sent, now.
        lag_s: how long the oldest of them has waited at most, namely since the publisher last drained its queue; 0
            when there are none.
        last_sequence: number of the last batch sent, -1 before the first.
        subscribers_seen: connections of live subscribers that came about; tcp and ipc only.
        peers_refused: connections, live and replay, that did not: no or wrong keys, or no ZeroMQ peer.
        open_bind_without_auth: 1 when the stream listens beyond loopback without authentication.
        replays_waiting: replay requests that wait for one of the open answers to end.
    """

    batches_sent: int = 0
    events_sent: int = 0
    bytes_sent: int = 0
    events_refused: int = 0
    batches_collapsed: int = 0
    batches_dropped: int = 0
    replays_served: int = 0
    batches_replayed: int = 0
    replays_refused: int = 0
    replays_truncated: int = 0
    replays_open: int = 0
    batches_buffered: int = 0
    bytes_buffered: int = 0
    blocks_in_base: int = 0
    bytes_in_base: int = 0
    batches_pending: int = 0
    lag_s: float = 0.0
    last_sequence: int = -1
    subscribers_seen: int = 0
    peers_refused: int = 0
    open_bind_without_auth: int = 0
    replays_waiting: int = 0


class QuiesceStats(msgspec.Struct, frozen=True, gc=False):
    """What a scheduler was ordered to be, and how often. The first four are flags of this moment, 0 or 1.

    Attributes:
        is_paused: nothing is computed until it is told to continue.
        is_awake: all of its memory is there, and the weights in it.
        has_weights_offloaded: the weights are on the host instead of the device.
        has_discarded_all: the weights are nowhere; an update must bring new ones.
        num_pauses, num_flushes: carried out.
        num_weight_updates, num_weight_rollbacks: sessions that ended with new weights, and with the old ones.
        num_orders_refused: orders of any kind that were not carried out.
    """

    is_paused: int = 0
    is_awake: int = 1
    has_weights_offloaded: int = 0
    has_discarded_all: int = 0
    num_pauses: int = 0
    num_flushes: int = 0
    num_weight_updates: int = 0
    num_weight_rollbacks: int = 0
    num_orders_refused: int = 0


class ReceiverStats(msgspec.Struct, gc=False):
    """Counters of one rank's intake; those of messages are the leading rank's.

    Attributes:
        receives: times that all ranks met for input.
        receives_skipped: steps that took no input, by the weight of their forward mode.
        requests_admitted: requests that went to all ranks.
        requests_refused: requests that were answered instead, whatever the reason.
        requests_repeated: further copies of requests in flight, which were dropped.
        messages_unreadable: frames that are no message of the engine.
        requests_held: requests that wait now because input is blocked.
    """

    receives: int = 0
    receives_skipped: int = 0
    requests_admitted: int = 0
    requests_refused: int = 0
    requests_repeated: int = 0
    messages_unreadable: int = 0
    requests_held: int = 0

    def copy(self) -> ReceiverStats:
        """Return the counts of this moment."""
        return msgspec.structs.replace(self)


class BatchingStats(msgspec.Struct, frozen=True, gc=False):
    """How batches are made.

    Attributes:
        new_token_ratio: share of possible output that an admission reserves, now.
        first_tokens_predicted: forecasts of a first token that came since.
        first_token_error_p50_s, first_token_error_p90_s: how far off the last of them were, in the middle and at most
            but for one in ten; 0 before the first.
        dp_steps: under DP attention, steps in which some replica computed.
        dp_idle_batches: of them, in which this one had nothing to compute.
        dp_eager_steps: of them, without a captured graph.
        dp_padded_tokens: positions that this replica's batches were short of the longest.
        dp_prefills_delayed: steps before which replicas that would have prefilled were told to wait.
        dp_prefills_forced: times that they had waited enough.
    """

    new_token_ratio: float = 0.0
    first_tokens_predicted: int = 0
    first_token_error_p50_s: float = 0.0
    first_token_error_p90_s: float = 0.0
    dp_steps: int = 0
    dp_idle_batches: int = 0
    dp_eager_steps: int = 0
    dp_padded_tokens: int = 0
    dp_prefills_delayed: int = 0
    dp_prefills_forced: int = 0


class SchedulerTotals(msgspec.Struct, frozen=True, gc=False):
    """Running totals of one scheduler since it started; each only ever grows, except that ``preemptions_per_s`` are the
    retractions per second of the recent window.

    ``latencies`` are the histograms of its requests' times, where it keeps them; ``tiers`` are the counters of its
    hierarchical cache, where it has one; ``intake`` are those of its input, where an ``RequestReceiver`` takes it;
    ``quiesce`` is what it was ordered, where it takes orders; ``batching`` says how it makes its batches.
    ``integrity`` are those of its checks; ``pools`` says how full its pools are, which does not only grow.
    """

    num_requests_total: int = 0
    num_aborted_requests_total: int = 0
    num_retractions_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    evicted_tokens_total: int = 0
    preemptions_per_s: float = 0.0
    latencies: LatencySnapshot | None = None
    tiers: TierStats | None = None
    intake: ReceiverStats | None = None
    quiesce: QuiesceStats | None = None
    integrity: IntegrityStats | None = None
    pools: PoolStats | None = None
    batching: BatchingStats | None = None


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    """Everything that one rank reports at the end of one step. The load is that step's; totals and counters may be of a
    step before while requests run (``MetricsEmitter``).

    ``labels`` are ``ParallelState.metric_labels``: they tell the ranks apart in one sink.
    """

    labels: tuple[tuple[str, str], ...]
    load: LoadSnapshot
    totals: SchedulerTotals = SchedulerTotals()
    publisher: PublisherStats = PublisherStats()


# Outputs. The news of requests as they leave a scheduler: token ids, which the receiver turns into text.


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request and what belongs to them.

    Attributes:
        token_ids: the tokens, in order.
        num_prompt_tokens: of the whole request.
        num_cached_tokens: prompt tokens that the prefix cache covered at the first admission.
        num_retractions: how often the request lost its pages.
        cached: the cached ones by the tier on which they were found.
        logprobs: one per token, where the request asked for them.
        top_logprobs: per token, the most probable ones there and their logprobs, where the request asked for them.
        hidden_states: one vector per token, as the model gave it; type and width are the model's.
    """

    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    cached: CachedTokens = CachedTokens()
    logprobs: tuple[float, ...] | None = None
    hidden_states: tuple[bytes, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """News of one request.

    Attributes:
        rid: whose news it is.
        start: place of the first new token in the request's output. A receiver that has more already has read this
            before; ``start`` never lies beyond what was sent.
        num_output_tokens: the request's output so far. More than ``start`` and the new tokens together only where
            tokens had to be dropped, and then the request ends here.
        finish_reason: None while the request goes on.
        output: the new tokens.
    """

    rid: str
    start: int
    num_output_tokens: int
    finish_reason: str | None
    output: TokenOutput


class OutputBatch(msgspec.Struct, frozen=True, gc=False):
    """The news of one step, of all requests that have some.

    Attributes:
        sequence: number of the message, contiguous from 0.
        deltas: at most one per request.
    """

    sequence: int
    deltas: tuple[OutputDelta, ...]


class OutputStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of one streamer since it was made.

    Attributes:
        batches_sent, deltas_sent, tokens_sent: taken by the receiver.
        steps_delayed: steps whose news had to wait, because the receiver was behind.
        requests_waiting: requests in flight with news that wait, now.
        ends_held, bytes_held: requests that are over and whose last news wait, now, and what these take.
        ends_dropped: requests whose end was never told: more were over than may be held.
        tokens_dropped: tokens never told, with their request's end or without.
    """

    batches_sent: int = 0
    deltas_sent: int = 0
    tokens_sent: int = 0
    steps_delayed: int = 0
    requests_waiting: int = 0
    ends_held: int = 0
    bytes_held: int = 0
    ends_dropped: int = 0
    tokens_dropped: int = 0


# Agreement. What names one: which rank asks, for which time, at which step, and what for.

MAX_OPERATION_BYTES = 64
SYNC_CALL_INTS = 3 + MAX_OPERATION_BYTES // 8


class SyncCall(msgspec.Struct, frozen=True, gc=False):
    """One rank's part in one agreement.

    Attributes:
        rank: the global rank that asks.
        number: how many agreements this domain had before, on this rank.
        step: the caller's step.
        operation: what is agreed, at most 64 bytes of UTF-8.
    """

    rank: int
    number: int
    step: int
    operation: str

    def __str__(self) -> str:
        return f"{self.operation!r} at step {self.step}, call {self.number}"

    def to_ints(self) -> list[int]:
        """Pack into ``SYNC_CALL_INTS`` signed 64-bit integers."""
        name = self.operation.encode().ljust(MAX_OPERATION_BYTES, b"\0")
        words = (int.from_bytes(name[at : at + 8], "big", signed=True) for at in range(0, MAX_OPERATION_BYTES, 8))
        return [self.rank, self.number, self.step, *words]

    @classmethod
    def from_ints(cls, record: Sequence[int]) -> SyncCall:
        """Read what ``to_ints`` packed."""
        rank, number, step, *words = record
        name = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
        # A rank that is lost may have sent anything; its record must still be printable.
        return cls(rank, number, step, name.rstrip(b"\0").decode(errors="replace"))

    @classmethod
    def many_from_ints(cls, records: Sequence[int]) -> list[SyncCall]:
        """Read records that stand one after the other."""
        return [cls.from_ints(records[at : at + SYNC_CALL_INTS]) for at in range(0, len(records), SYNC_CALL_INTS)]


def describe_calls(calls: Iterable[SyncCall]) -> dict[int, str]:
    """Return what each rank asked, as ``SyncDivergenceError`` lists it."""
    return {call.rank: str(call) for call in calls}


# Input: what comes to a replica's leading rank, and how it reaches all of its ranks.


class ForwardMode(enum.StrEnum):
    """What a step computed; equal on all ranks of a replica. Names are SGLang's (``ForwardMode``, 0.5.23)."""

    IDLE = "idle"
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"


class InputKind(enum.StrEnum):
    """What an intake must know of a message.

    A ``REQUEST`` may wait and may be refused. An ``ABORT`` ends one. A ``COMMAND`` is for the scheduler and always
    passes. ``BLOCK``, ``UNBLOCK`` and ``DRAIN`` are for the intake itself and go no further.
    """

    REQUEST = "request"
    ABORT = "abort"
    COMMAND = "command"
    BLOCK = "block"
    UNBLOCK = "unblock"
    DRAIN = "drain"


Message_co = TypeVar("Message_co", covariant=True)


class InputMessage(msgspec.Struct, Generic[Message_co], frozen=True, gc=False):
    """One message, read.

    Attributes:
        kind: what the intake does with it.
        message: for the scheduler, as the engine's own reader made it.
        rid: of requests and aborts: which request.
    """

    kind: InputKind
    message: Message_co
    rid: str = ""


class RejectionReason(enum.StrEnum):
    """Why a request was not let in."""

    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    HELD_FULL = "held_full"
    DRAINING = "draining"
    IN_USE = "in_use"
    SERVED = "served"
    ABORTED = "aborted"


class RequestRejection(msgspec.Struct, frozen=True, gc=False):
    """The answer to a request that was not let in.

    Attributes:
        rid: which request.
        reason: why, for programs.
        text: why, in one sentence with what to do, for the request's author.
        retry_after_s: when to try again; None where that would not help, or where nobody knows.
    """

    rid: str
    reason: RejectionReason
    text: str
    retry_after_s: float | None = None


class RelayedInput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the leading rank brings to all ranks before a step.

    Attributes:
        step: the caller's step.
        state_digest: the caller's state before it, 32 bits.
        input_digest: of all frames that were relayed before, in order, 32 bits.
        frames: messages in the order in which they are let in, as they came.
    """

    step: int
    state_digest: int
    input_digest: int
    frames: tuple[bytes, ...] = ()
