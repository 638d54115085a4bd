"""Statistics that one scheduler reports per step."""

from __future__ import annotations

import msgspec

from scheduler_components.values.decisions import DecisionStats
from scheduler_components.values.forward_pass import ForwardPassStats
from scheduler_components.values.grammar import GrammarStats
from scheduler_components.values.kv_events import PublisherStats
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
