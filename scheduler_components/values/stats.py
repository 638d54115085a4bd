"""Statistics that one scheduler reports per step."""

from __future__ import annotations

import msgspec

from scheduler_components.values.load import LoadSnapshot
from scheduler_components.values.outputs import OutputStats
from scheduler_components.values.pools import IntegrityStats, PoolStats
from scheduler_components.values.receive import ReceiverStats
from scheduler_components.values.tiers import TierStats

__all__ = [
    "HistogramSnapshot",
    "LatencySnapshot",
    "KvMetrics",
    "PublisherStats",
    "QuiesceStats",
    "BatchingStats",
    "SchedulerCounters",
    "SchedulerStats",
]


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


class SchedulerCounters(msgspec.Struct, gc=False):
    """Counters of one scheduler since its start. The scheduler increments the fields and reports a copy.

    Attributes:
        num_requests_total: requests accepted.
        num_aborted_requests_total: of them, requests that ended with an abort.
        num_retractions_total: times that a running request lost its pages to other requests.
        prompt_tokens_total, cached_tokens_total: prompt tokens at the first admission of each request, and the part
            that the prefix cache covered. Later admissions do not count: a retracted request would hit its own pages.
        generation_tokens_total: tokens generated.
        evicted_tokens_total: cached tokens evicted to make room.
        preemptions_per_s: retractions per second over the recent window; the only field that can fall.
    """

    num_requests_total: int = 0
    num_aborted_requests_total: int = 0
    num_retractions_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    evicted_tokens_total: int = 0
    preemptions_per_s: float = 0.0


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    """The report of one rank after one step. The path of a metric in the catalogue is a path of fields from here.

    Attributes:
        labels: ``ParallelState.metric_labels``, which distinguish the ranks in one sink.
        load: how busy the rank is after this step.
        counters: counters of the scheduler.
        publisher: counters of the KV-event publisher.
        latencies: histograms of request times.
        tiers: counters of the hierarchical cache.
        receiver: counters of the request receiver.
        quiesce: pauses, flushes and weight updates.
        integrity: counters of the invariant checks.
        pools: usage of each page pool.
        batching: how batches are composed.
        outputs: counters of the output streamer.

    ``load`` is from this step. ``MetricsEmitter`` reads the other parts every few steps. A part that the engine does
    not have is None.
    """

    labels: tuple[tuple[str, str], ...]
    load: LoadSnapshot
    counters: SchedulerCounters = msgspec.field(default_factory=SchedulerCounters)
    publisher: PublisherStats = PublisherStats()
    latencies: LatencySnapshot | None = None
    tiers: TierStats | None = None
    receiver: ReceiverStats | None = None
    quiesce: QuiesceStats | None = None
    integrity: IntegrityStats | None = None
    pools: PoolStats | None = None
    batching: BatchingStats | None = None
    outputs: OutputStats | None = None
