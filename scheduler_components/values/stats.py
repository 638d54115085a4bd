"""Statistics that one scheduler reports per step."""

from __future__ import annotations

import msgspec

from scheduler_components.values.decisions import DecisionStats
from scheduler_components.values.forward_pass import ForwardPassStats
from scheduler_components.values.grammar import GrammarStats
from scheduler_components.values.load import LoadSnapshot
from scheduler_components.values.outputs import OutputStats
from scheduler_components.values.pools import IntegrityStats, PoolStats
from scheduler_components.values.receive import ReceiverStats
from scheduler_components.values.request_span import SpanStats
from scheduler_components.values.sessions import SessionStats
from scheduler_components.values.tiers import TierStats
from scheduler_components.values.waiting import AgreedQueueStats, DeadlineStats, LoraStats

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
    """A snapshot of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, ascending. A value equal to a bound is in its bucket, as in Prometheus.
        counts: number of values per bucket, with one more bucket above the last bound. Not cumulative.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)


class LatencySnapshot(msgspec.Struct, frozen=True, gc=False):
    """A snapshot of the request-time histograms of one scheduler, in seconds. The counts never decrease.

    Attributes:
        time_to_first_token: from the first queueing, one value per request.
        inter_token: between tokens, one value per token; tokens of one step share its interval evenly.
        e2e: from the first queueing to the end, one value per ended request, aborts included.
        queue: in the queue before the first prefill, one value per request. Waits after a retraction are excluded, as
            in SGLang, because they would look like waits of new arrivals.
        prefill, decode: total time in these phases, one value per ended request.
    """

    time_to_first_token: HistogramSnapshot
    inter_token: HistogramSnapshot
    e2e: HistogramSnapshot
    queue: HistogramSnapshot
    prefill: HistogramSnapshot
    decode: HistogramSnapshot


class KvMetrics(msgspec.Struct, frozen=True, gc=False):
    """Slots and blocks of one rank, as SGLang's schedulers push them to the serving process (0.5.x names).

    `kv_active_blocks` and `kv_total_blocks` count whole pages. The ``perc`` and ``rate`` values range from 0 to 1,
    as in SGLang.
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
        batches_sent, events_sent, bytes_sent: passed to the PUB socket.
        events_refused: events that readers could not decode. The publisher leaves them out of their batch.
        batches_collapsed: batches merged with others because the queue of pending batches was full.
        batches_dropped: batches accepted by `publish()` and not sent before the deadline of `close()`.
        replays_served, batches_replayed: complete replay answers, and batches in them.
        replays_refused: replay requests that were malformed or over the client limit.
        replays_truncated: incomplete replay answers: the client was too slow, or the publisher closed.
        replays_open: answers in progress.
        batches_buffered, bytes_buffered: current content of the replay buffer.
        blocks_in_base: blocks in the snapshot: those of batches that left the replay buffer and were not removed since.
        bytes_in_base: size of the payloads with these blocks. A payload is rewritten when more than half of its blocks
            are removed. The snapshot takes another 100 bytes per block.
        batches_pending: batches accepted and not sent yet.
        lag_s: upper bound of the age of the oldest pending batch: the time since the publisher last emptied its
            queue; 0 without pending batches.
        last_sequence: sequence number of the last batch sent; -1 before the first.
        subscribers_seen: connections of live subscribers so far; tcp and ipc only.
        peers_refused: rejected connections, live and replay: missing or wrong keys, or not a ZeroMQ peer.
        open_bind_without_auth: 1 if the stream listens beyond loopback without authentication.
        replays_waiting: replay requests that wait for the end of an open answer.
        send_stalls: times that batches waited while the sockets stayed in use: a call was stuck for a second, or a
            signal handler's exception interrupted one. After the latter, sending goes on.
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
    send_stalls: int = 0


class QuiesceStats(msgspec.Struct, frozen=True, gc=False):
    """State and counters of the control requests. The first four are current flags, 0 or 1.

    Attributes:
        is_paused: nothing is computed until a request to continue.
        is_awake: no memory is released, and the weights are loaded.
        has_weights_offloaded: the weights are on the host instead of the device.
        has_discarded_all: the weights are discarded; a weight update must load new ones.
        num_pauses, num_flushes: pauses and flushes carried out.
        num_weight_updates, num_weight_rollbacks: weight updates that ended with the new weights, and with the old ones.
        num_orders_refused: control requests that were rejected or failed.
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
    """How batches are composed.

    Attributes:
        new_token_ratio: current share of a request's possible output that an admission reserves.
        first_tokens_predicted: predictions of a first token that was generated since.
        first_token_error_p50_s, first_token_error_p90_s: median and 90th percentile of the error of the last
            predictions; 0 before the first.
        dp_steps: with DP attention, steps in which at least one replica computed.
        dp_idle_batches: of them, steps in which this replica had nothing to compute.
        dp_eager_steps: of them, steps without a captured graph.
        dp_padded_tokens: padding of this replica's batches to the longest batch, in tokens.
        dp_prefills_delayed: steps in which replicas with a prefill had to wait.
        dp_prefills_forced: times that such a wait reached its limit.
        refused_tokens, refused_slots, refused_pages, refused_watermark, refused_tenant, refused_not_ready: refusals by
            ``RefusalReason``. A waiting request counts once in each step that considers it.
        preempted_latest_arrival, preempted_least_recomputation, preempted_lowest_priority: victims by the preemption
            policy that selected them.
        preempted_longest_remaining, preempted_other: the same, of this policy and of all others.
        policies_replaced: scheduling and preemption policies that failed and were replaced.
        admitted_high, admitted_normal, admitted_low: first admissions by priority: above, at and below 0.
        waited_high_s, waited_normal_s, waited_low_s: sums of their waits before it.
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
    refused_tokens: int = 0
    refused_slots: int = 0
    refused_pages: int = 0
    refused_watermark: int = 0
    refused_tenant: int = 0
    refused_not_ready: int = 0
    preempted_latest_arrival: int = 0
    preempted_least_recomputation: int = 0
    preempted_lowest_priority: int = 0
    preempted_longest_remaining: int = 0
    preempted_other: int = 0
    policies_replaced: int = 0
    admitted_high: int = 0
    admitted_normal: int = 0
    admitted_low: int = 0
    waited_high_s: float = 0.0
    waited_normal_s: float = 0.0
    waited_low_s: float = 0.0


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
        refused_too_long_total: requests refused because the pool or the model's context cannot hold them.
        refused_invalid_total: requests refused for another reason that a retry does not change. Requests for which a
            queue had no room, and those that the receiver rejects, are counted there.
    """

    num_requests_total: int = 0
    num_aborted_requests_total: int = 0
    num_retractions_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    evicted_tokens_total: int = 0
    preemptions_per_s: float = 0.0
    refused_too_long_total: int = 0
    refused_invalid_total: int = 0


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
        forward_passes: counters of the forward-pass metrics.
        spans: counters of the request spans.
        grammars: requests with a grammar, and compilations.
        rooms: requests that wait or waited for anything besides pages, a grammar included.
        deadlines: requests with time limits.
        decisions: counters of the decision log.
        sessions: conversations that keep their pages between turns.
        adapters: loads and evictions of LoRA adapters.

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
    forward_passes: ForwardPassStats | None = None
    spans: SpanStats | None = None
    grammars: GrammarStats | None = None
    decisions: DecisionStats | None = None
    rooms: AgreedQueueStats | None = None
    deadlines: DeadlineStats | None = None
    sessions: SessionStats | None = None
    adapters: LoraStats | None = None
