"""Statistics that one scheduler reports per step.

The annotation of a field describes its metric: collectors, documentation and the dashboard follow from it. To add a
metric, add a field. The text of the metric is the description of the field; a docstring adds what users need not know.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from scheduler_components.values.kv_events import PublisherStats
from scheduler_components.values.load import LoadSnapshot
from scheduler_components.values.metric import HistogramSnapshot, counter, gauge, histogram

__all__ = [
    "AgreedQueueStats",
    "BatchingStats",
    "DeadlineStats",
    "DecisionStats",
    "ForwardPassStats",
    "GrammarStats",
    "IntegrityStats",
    "LatencySnapshot",
    "LoraStats",
    "OutputStats",
    "PoolStats",
    "QuiesceStats",
    "ReceiverStats",
    "SchedulerCounters",
    "SchedulerStats",
    "SessionStats",
    "SpanStats",
    "TierStats",
]


# fmt: off
class LatencySnapshot(msgspec.Struct, frozen=True, gc=False):
    """A snapshot of the request-time histograms of one scheduler, in seconds. The counts never decrease.

    Tokens of one step share its interval evenly. ``e2e`` includes aborts. ``queue`` leaves out waits after a
    retraction, as in SGLang, because they would look like waits of new arrivals.
    """

    time_to_first_token: Annotated[HistogramSnapshot, histogram("time_to_first_token_seconds",
        "From the first queueing to the first token.", "time_to_first_token_seconds")]
    inter_token: Annotated[HistogramSnapshot, histogram("inter_token_latency_seconds",
        "Between tokens; tokens of one step share their interval.", "inter_token_latency_seconds")]
    e2e: Annotated[HistogramSnapshot, histogram("e2e_request_latency_seconds",
        "From the first queueing to the end of a request.", "e2e_request_latency_seconds")]
    queue: Annotated[HistogramSnapshot, histogram("queue_time_seconds",
        "In the queue before the first prefill.", "request_queue_time_seconds")]
    prefill: Annotated[HistogramSnapshot, histogram("prefill_time_seconds",
        "In prefill, over all prefills of a request.", "request_prefill_time_seconds")]
    decode: Annotated[HistogramSnapshot, histogram("decode_time_seconds",
        "In decode, over all decodes of a request.", "request_decode_time_seconds")]


class SchedulerCounters(msgspec.Struct, gc=False):
    """Counters of one scheduler since its start. The scheduler increments the fields and reports a copy.

    Prompt and cached tokens are those of a request's first admission: a retracted request would hit its own pages.
    Refusals leave out requests for which a queue had no room, and those that the receiver rejects.
    """

    num_requests_total: Annotated[int, counter("num_requests_total", "requests", "Requests accepted.")] = 0
    num_aborted_requests_total: Annotated[int, counter("num_aborted_requests_total", "requests",
        "Requests aborted.")] = 0
    num_retractions_total: Annotated[int, counter("num_retracted_requests_total", "retractions",
        "Retractions of running requests because the KV pool was full.", "num_preemptions_total")] = 0
    preemptions_per_s: Annotated[float, gauge("preemptions_per_second", "retractions/s",
        "Retractions per second, recently.")] = 0.0
    refused_too_long_total: Annotated[int, counter("requests_refused_too_long_total", "requests",
        "Requests refused because the pool or the model's context cannot hold them.")] = 0
    refused_invalid_total: Annotated[int, counter("requests_refused_invalid_total", "requests",
        "Requests refused for another reason that a retry does not change, such as an unknown token or turn.")] = 0
    prompt_tokens_total: Annotated[int, counter("prompt_tokens_total", "tokens",
        "Input tokens of requests that were prefilled.", "prompt_tokens_total", "prefix_cache_queries_total")] = 0
    cached_tokens_total: Annotated[int, counter("cached_tokens_total", "tokens",
        "The part of the input tokens that was in a cached prefix.", "prefix_cache_hits_total")] = 0
    generation_tokens_total: Annotated[int, counter("generation_tokens_total", "tokens",
        "Generated tokens.", "generation_tokens_total")] = 0
    evicted_tokens_total: Annotated[int, counter("evicted_tokens_total", "tokens",
        "Cached tokens evicted for others.")] = 0


class TierStats(msgspec.Struct, gc=False):
    """Counters since the start. They never decrease, and are equal on all ranks of a replica.

    A page that was loaded back from the host counts as a host hit, a page that was prefetched from storage as a storage
    hit.
    """

    prompt_tokens: Annotated[int, counter("hicache_prompt_tokens_total", "tokens",
        "Input tokens of requests at their first admission.")] = 0
    device_hit_tokens: Annotated[int, counter("hicache_device_hit_tokens_total", "tokens",
        "The part of the input tokens that was cached on the device.")] = 0
    host_hit_tokens: Annotated[int, counter("hicache_host_hit_tokens_total", "tokens",
        "The part of the input tokens that was on the host, and was loaded from there.")] = 0
    storage_hit_tokens: Annotated[int, counter("hicache_storage_hit_tokens_total", "tokens",
        "The part of the input tokens that was in storage, and was read from there.")] = 0
    pages_written: Annotated[int, counter("hicache_pages_written_total", "pages", "Pages copied to the host.")] = 0
    pages_not_written: Annotated[int, counter("hicache_pages_not_written_total", "pages",
        "Copies to the host given up: no room, or a failure.")] = 0
    pages_loaded: Annotated[int, counter("hicache_pages_loaded_total", "pages", "Pages copied back to the device.")] = 0
    pages_not_loaded: Annotated[int, counter("hicache_pages_not_loaded_total", "pages",
        "Copies back given up after a failure on some rank.")] = 0
    pages_backed_up: Annotated[int, counter("hicache_pages_backed_up_total", "pages", "Pages written to storage.")] = 0
    pages_not_backed_up: Annotated[int, counter("hicache_pages_not_backed_up_total", "pages",
        "Writes to storage given up: too many under way, or a failure.")] = 0
    pages_prefetched: Annotated[int, counter("hicache_pages_prefetched_total", "pages",
        "Pages read from storage and put in the cache.")] = 0
    pages_revoked: Annotated[int, counter("hicache_pages_revoked_total", "pages",
        "Pages found in storage and not put in the cache.")] = 0
    prefetches: Annotated[int, counter("hicache_prefetches_total", "prefetches",
        "Reads from storage that were started.")] = 0
    prefetches_revoked: Annotated[int, counter("hicache_prefetches_revoked_total", "prefetches",
        "Reads from storage that returned no page.")] = 0
    pages_dropped: Annotated[int, counter("hicache_pages_dropped_total", "pages",
        "Pages evicted from the device without a copy on the host.")] = 0


class ReceiverStats(msgspec.Struct, gc=False):
    """Counters of one rank's receiver. Only the leading rank counts messages."""

    receives: Annotated[int, counter("intake_receives_total", "meetings",
        "Collective receives of input by all ranks of the replica.")] = 0
    receives_skipped: Annotated[int, counter("intake_receives_skipped_total", "steps",
        "Steps without a receive, which the recv skipper skipped after the previous forward mode.")] = 0
    requests_admitted: Annotated[int, counter("intake_requests_admitted_total", "requests",
        "Requests admitted and broadcast to all ranks.")] = 0
    requests_refused: Annotated[int, counter("intake_requests_refused_total", "requests",
        "Requests refused: too large, too many, draining, an id in use, or aborted earlier.")] = 0
    requests_repeated: Annotated[int, counter("intake_requests_repeated_total", "requests",
        "Duplicates of requests in flight, which were dropped.")] = 0
    messages_unreadable: Annotated[int, counter("intake_messages_unreadable_total", "messages",
        "Received messages that could not be decoded.")] = 0
    requests_held: Annotated[int, gauge("intake_requests_held", "requests",
        "Requests that wait because input is blocked.")] = 0


class PoolStats(msgspec.Struct, frozen=True, gc=False):
    """Usage of each page pool. Names are those of SGLang's metrics. Fields of a missing pool are None."""

    max_pool_usage: Annotated[float, gauge("max_pool_usage", "share",
        "Pages in use / pages of the fullest pool, 0 to 1.")]
    full_token_usage: Annotated[float | None, gauge("full_token_usage", "share",
        "KV tokens of full attention in use / capacity, 0 to 1.")] = None
    kv_available_tokens: Annotated[int | None, gauge("kv_available_tokens", "tokens",
        "Free KV tokens of full attention.")] = None
    kv_evictable_tokens: Annotated[int | None, gauge("kv_evictable_tokens", "tokens",
        "Cached and unlocked KV tokens of full attention.")] = None
    kv_used_tokens: Annotated[int | None, gauge("kv_used_tokens", "tokens",
        "KV tokens of full attention in use.")] = None
    swa_token_usage: Annotated[float | None, gauge("swa_token_usage", "share",
        "KV tokens of sliding windows in use / capacity, 0 to 1.")] = None
    swa_available_tokens: Annotated[int | None, gauge("swa_available_tokens", "tokens",
        "Free KV tokens of sliding windows.")] = None
    swa_evictable_tokens: Annotated[int | None, gauge("swa_evictable_tokens", "tokens",
        "Cached and unlocked KV tokens of sliding windows.")] = None
    swa_used_tokens: Annotated[int | None, gauge("swa_used_tokens", "tokens",
        "KV tokens of sliding windows in use.")] = None
    mamba_usage: Annotated[float | None, gauge("mamba_usage", "share", "Mamba states in use / all, 0 to 1.")] = None
    mamba_available_slots: Annotated[int | None, gauge("mamba_available_slots", "states", "Free mamba states.")] = None
    mamba_evictable_slots: Annotated[int | None, gauge("mamba_evictable_slots", "states",
        "Cached and unlocked mamba states.")] = None
    mamba_used_slots: Annotated[int | None, gauge("mamba_used_slots", "states", "Mamba states in use.")] = None
    session_held_pages: Annotated[int, gauge("session_held_pages", "pages",
        "Pages of sessions between two requests, over all pools.")] = 0


class IntegrityStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of the `PoolInvariantChecker` and the watchdog. All but `problems_open` never decrease."""

    checks: Annotated[int, counter("integrity_checks_total", "checks", "Checks of the page counts of all pools.")] = 0
    censuses: Annotated[int, counter("integrity_censuses_total", "checks",
        "Full checks of every page, lock and published block.")] = 0
    checks_failed: Annotated[int, counter("integrity_checks_failed_total", "checks",
        "Checks in which a pool raised an exception.")] = 0
    problems: Annotated[int, counter("integrity_problems_total", "problems",
        "Violations of pool invariants that were found.")] = 0
    pages_lost: Annotated[int, counter("integrity_pages_lost_total", "pages", "Pages found without an owner.")] = 0
    stalls: Annotated[int, counter("integrity_stalls_total", "stalls",
        "Steps without progress for longer than the timeout of the watchdog.")] = 0
    problems_open: Annotated[int, gauge("integrity_problems_open", "problems",
        "Violations at the last full check.")] = 0


class DecisionStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of one rank's ``DecisionLog``. They never decrease."""

    num_decisions: Annotated[int, counter("decisions_total", "decisions",
        "Decisions that the rank noted and compared with the other ranks'.")] = 0
    num_divergences: Annotated[int, counter("decision_divergences_total", "divergences",
        "Agreements that found that the ranks of the replica had decided differently.")] = 0
    num_unknown: Annotated[int, counter("decision_divergences_unknown_total", "divergences",
        "Divergences whose first decision could not be named.")] = 0
    num_unregistered: Annotated[int, counter("decisions_unregistered_total", "decisions",
        "Noted decisions of a kind that is not registered.")] = 0
    num_replaced_values: Annotated[int, counter("decision_values_replaced_total", "values",
        "Values of decisions that could not be encoded and were replaced by the name of their type.")] = 0


class QuiesceStats(msgspec.Struct, frozen=True, gc=False):
    """State and counters of the control requests. The first four are current flags, 0 or 1.

    A paused engine computes nothing. It ``is_awake`` while no memory is released and the weights are loaded;
    ``has_weights_offloaded`` means on the host, ``has_discarded_all`` that a weight update must load new ones.
    """

    is_paused: Annotated[int, gauge("engine_paused", "flag", "1 while the engine is paused and computes nothing.")] = 0
    is_awake: int = 1
    has_weights_offloaded: int = 0
    has_discarded_all: int = 0
    num_pauses: Annotated[int, counter("engine_pauses_total", "pauses", "Pauses.")] = 0
    num_flushes: Annotated[int, counter("cache_flushes_total", "flushes", "Flushes of the cache.")] = 0
    num_weight_updates: Annotated[int, counter("weight_updates_total", "updates",
        "Weight updates that ended with new weights.")] = 0
    num_weight_rollbacks: Annotated[int, counter("weight_rollbacks_total", "updates",
        "Weight updates that ended with the old weights.")] = 0
    num_orders_refused: Annotated[int, counter("engine_orders_refused_total", "orders",
        "Control requests refused: wrong state, timeout, or a failure on a rank.")] = 0


class BatchingStats(msgspec.Struct, frozen=True, gc=False):
    """How batches are composed.

    Refusals are counted by ``RefusalReason``, and a waiting request once in each step that considers it. Victims are
    counted by the preemption policy that selected them.
    """

    new_token_ratio: Annotated[float, gauge("new_token_ratio", "share",
        "Share of the possible output that an admission reserves, 0 to 1.")] = 0.0
    first_tokens_predicted: Annotated[int, counter("first_tokens_predicted_total", "requests",
        "First tokens that had a forecast.")] = 0
    first_token_error_p50_s: Annotated[float, gauge("first_token_error_p50_seconds", "seconds",
        "Median error of the last 256 forecasts of a first token.")] = 0.0
    first_token_error_p90_s: Annotated[float, gauge("first_token_error_p90_seconds", "seconds",
        "90th percentile of the error of these forecasts.")] = 0.0
    dp_steps: Annotated[int, counter("dp_steps_total", "steps",
        "DP attention: steps in which at least one replica computed.")] = 0
    dp_idle_batches: Annotated[int, counter("dp_idle_batches_total", "steps",
        "DP attention: these steps without a batch on this replica.")] = 0
    dp_eager_steps: Annotated[int, counter("dp_eager_steps_total", "steps",
        "DP attention: these steps without a captured graph, because of the batch of any replica.")] = 0
    dp_padded_tokens: Annotated[int, counter("dp_padded_tokens_total", "tokens",
        "DP attention: padding of this replica's batches to the longest batch.")] = 0
    dp_prefills_delayed: Annotated[int, counter("dp_prefills_delayed_total", "steps",
        "DP attention: steps in which prefills waited for other replicas.")] = 0
    dp_prefills_forced: Annotated[int, counter("dp_prefills_forced_total", "times",
        "DP attention: prefills forced after the longest wait.")] = 0
    refused_tokens: Annotated[int, counter("admissions_refused_tokens_total", "requests",
        "Steps in which a request was not admitted because nothing was left of the prefill tokens of the step.")] = 0
    refused_slots: Annotated[int, counter("admissions_refused_slots_total", "requests",
        "Steps in which a request was not admitted because no request slot was free.")] = 0
    refused_pages: Annotated[int, counter("admissions_refused_pages_total", "requests",
        "Steps in which a request was not admitted because the KV pool lacked pages that it may need.")] = 0
    refused_watermark: Annotated[int, counter("admissions_refused_watermark_total", "requests",
        "Steps in which a request was not admitted because fewer free pages than the watermark would stay.")] = 0
    refused_tenant: Annotated[int, counter("admissions_refused_tenant_total", "requests",
        "Steps in which a request was not admitted because its tenant was at its cap of running requests.")] = 0
    refused_not_ready: Annotated[int, counter("admissions_refused_not_ready_total", "requests",
        "Steps in which a request was not admitted because its pages were still being fetched.")] = 0
    preempted_latest_arrival: Annotated[int, counter("preemptions_latest_arrival_total", "requests",
        "Requests preempted by the latest arrival.")] = 0
    preempted_least_recomputation: Annotated[int, counter("preemptions_least_recomputation_total", "requests",
        "Requests preempted by the least recomputation.")] = 0
    preempted_lowest_priority: Annotated[int, counter("preemptions_lowest_priority_total", "requests",
        "Requests preempted by the lowest priority.")] = 0
    preempted_longest_remaining: Annotated[int, counter("preemptions_longest_remaining_total", "requests",
        "Requests preempted by the longest remaining output.")] = 0
    preempted_other: Annotated[int, counter("preemptions_other_total", "requests",
        "Requests preempted by another policy.")] = 0
    policies_replaced: Annotated[int, counter("scheduling_policies_replaced_total", "policies",
        "Policies that failed and were replaced by first come, first served, or by the latest arrival.")] = 0
    admitted_high: Annotated[int, counter("requests_admitted_high_priority_total", "requests",
        "First admissions of requests with a priority above 0.")] = 0
    waited_high_s: Annotated[float, counter("queue_time_high_priority_seconds_total", "seconds",
        "Their waits before it, as a sum.")] = 0.0
    admitted_normal: Annotated[int, counter("requests_admitted_normal_priority_total", "requests",
        "First admissions of requests with a priority of 0.")] = 0
    waited_normal_s: Annotated[float, counter("queue_time_normal_priority_seconds_total", "seconds",
        "Their waits before it, as a sum.")] = 0.0
    admitted_low: Annotated[int, counter("requests_admitted_low_priority_total", "requests",
        "First admissions of requests with a priority below 0.")] = 0
    waited_low_s: Annotated[float, counter("queue_time_low_priority_seconds_total", "seconds",
        "Their waits before it, as a sum.")] = 0.0


class ForwardPassStats(msgspec.Struct, gc=False):
    """Counters of a ``ForwardPassPublisher``."""

    sent: Annotated[int, counter("forward_passes_sent_total", "messages",
        "Messages of forward-pass metrics sent, heartbeats included.")] = 0
    heartbeats: Annotated[int, counter("forward_pass_heartbeats_total", "messages",
        "Heartbeats of an idle engine among them.")] = 0
    failed: Annotated[int, counter("forward_passes_failed_total", "messages",
        "Messages of forward-pass metrics lost by an error in the scheduler's process.")] = 0


class SpanStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of a ``SpanSink``."""

    exported: Annotated[int, counter("request_spans_exported_total", "spans",
        "Spans of requests that the collector took.")] = 0
    dropped: Annotated[int, counter("request_spans_dropped_total", "spans",
        "Spans of requests lost: the queue was full, or the export failed.")] = 0
    pending: Annotated[int, gauge("request_spans_pending", "spans",
        "Spans of requests that wait for their export.")] = 0
    parents_refused: Annotated[int, counter("trace_parents_refused_total", "requests",
        "Requests whose trace headers were not valid, and that began a trace of their own.")] = 0


class OutputStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of one streamer since it was created."""

    batches_sent: Annotated[int, counter("output_batches_sent_total", "messages",
        "Messages of outputs that the receiver accepted.")] = 0
    deltas_sent: Annotated[int, counter("output_deltas_sent_total", "deltas",
        "Updates of single requests in these messages.")] = 0
    tokens_sent: Annotated[int, counter("output_tokens_sent_total", "tokens",
        "Generated tokens in these messages.")] = 0
    steps_delayed: Annotated[int, counter("output_steps_delayed_total", "steps",
        "Steps whose outputs had to wait because the receiver was behind.")] = 0
    requests_waiting: Annotated[int, gauge("output_requests_waiting", "requests",
        "Requests in flight with delayed outputs.")] = 0
    ends_held: Annotated[int, gauge("output_ends_held", "requests", "Finished requests with delayed outputs.")] = 0
    bytes_held: Annotated[int, gauge("output_bytes_held", "bytes", "Bytes of these outputs.")] = 0
    ends_dropped: Annotated[int, counter("output_ends_dropped_total", "requests",
        "Finished requests whose last outputs were dropped, because too many were held.")] = 0
    tokens_dropped: Annotated[int, counter("output_tokens_dropped_total", "tokens",
        "Generated tokens that were dropped.")] = 0


class AgreedQueueStats(msgspec.Struct, gc=False):
    """Counters of one ``AgreedQueue``. All but ``unknown`` are equal on all ranks."""

    waiting: Annotated[int, gauge("room_requests_waiting", "requests",
        "Requests that wait for something besides pages until all ranks have it.")] = 0
    ready: Annotated[int, counter("room_requests_ready_total", "requests",
        "Requests that left a room because all ranks were ready.")] = 0
    failed: Annotated[int, counter("room_requests_failed_total", "requests",
        "Requests that left a room because one rank could not prepare what they need.")] = 0
    expired: Annotated[int, counter("room_requests_expired_total", "requests",
        "Requests that left a room because they waited too long in it.")] = 0
    cancelled: Annotated[int, counter("room_requests_cancelled_total", "requests",
        "Requests that ended while they waited in a room: aborted, or ended by another limit.")] = 0
    refused: Annotated[int, counter("room_requests_refused_total", "requests",
        "Requests that a full room refused.")] = 0
    unknown: Annotated[int, counter("room_reports_unknown_total", "reports",
        "Reports of this rank about requests that did not wait.")] = 0


class DeadlineStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of ``RequestDeadlines``, equal on all ranks."""

    waiting: Annotated[int, gauge("requests_with_limit", "requests", "Requests in flight that have a time limit.")] = 0
    queue_timeouts: Annotated[int, counter("request_queue_timeouts_total", "requests",
        "Requests that ended because they were not admitted in time.")] = 0
    timeouts: Annotated[int, counter("request_timeouts_total", "requests",
        "Requests that ended because they were not complete in time.")] = 0


class SessionStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of a ``SessionTable``. All but the first two and the last never decrease."""

    open: Annotated[int, gauge("sessions_open", "sessions", "Open sessions.")] = 0
    held_pages: Annotated[int, gauge("session_locked_pages", "pages",
        "Cached pages that sessions lock between two turns; a page of two sessions counts twice.")] = 0
    opened: Annotated[int, counter("sessions_opened_total", "sessions", "Sessions that clients opened.")] = 0
    closed: Annotated[int, counter("sessions_closed_total", "sessions", "Sessions that clients closed.")] = 0
    reaped: Annotated[int, counter("sessions_reaped_total", "sessions",
        "Sessions that were closed because they were idle for their timeout.")] = 0
    refused: Annotated[int, counter("session_refusals_total", "requests", "Sessions and turns that were refused.")] = 0
    turns: Annotated[int, counter("session_turns_total", "requests", "Turns that ended and can be continued.")] = 0
    pages_released: Annotated[int, counter("session_pages_released_total", "pages",
        "Pages unlocked before their session ended: for requests, for the limit of pages or for a clear.")] = 0
    text_tokens: Annotated[int, gauge("session_text_tokens", "tokens",
        "Tokens of all turns that can be continued.")] = 0


class LoraStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of a ``LoraQueue``, equal on all ranks."""

    registered: Annotated[int, gauge("lora_adapters_registered", "adapters",
        "LoRA adapters that requests may name.")] = 0
    waiting: Annotated[int, gauge("lora_requests_waiting", "requests",
        "Requests that wait until all ranks have loaded their adapter.")] = 0
    loads: Annotated[int, counter("lora_loads_total", "adapters", "Loads of adapters that succeeded on all ranks.")] = 0
    loads_failed: Annotated[int, counter("lora_loads_failed_total", "adapters",
        "Loads of adapters that failed on some rank, or took too long.")] = 0
    evictions: Annotated[int, counter("lora_evictions_total", "adapters", "Adapters that were unloaded.")] = 0
    requests_failed: Annotated[int, counter("lora_requests_failed_total", "requests",
        "Requests that failed because their adapter was not loaded.")] = 0
    requests_refused: Annotated[int, counter("lora_requests_refused_total", "requests",
        "Requests that were refused because too many waited for adapters.")] = 0


class GrammarStats(msgspec.Struct, frozen=True, gc=False):
    """Statistics of the grammars of one rank."""

    waiting: Annotated[int, gauge("grammar_requests_waiting", "requests",
        "Requests that wait until all ranks have their grammar.")] = 0
    compiling: Annotated[int, gauge("grammars_compiling", "grammars",
        "Grammars that this rank compiles, or that wait for its thread.")] = 0
    cached: Annotated[int, gauge("grammars_cached", "grammars", "Compiled grammars that this rank keeps.")] = 0
    compiled: Annotated[int, counter("grammars_compiled_total", "grammars", "Grammars that this rank compiled.")] = 0
    failed: Annotated[int, counter("grammars_failed_total", "grammars",
        "Grammars that this rank could not compile.")] = 0
    cache_hits: Annotated[int, counter("num_grammar_cache_hit_total", "requests",
        "Requests whose grammar was kept when they arrived.")] = 0
    joined: Annotated[int, counter("grammar_requests_joined_total", "requests",
        "Requests whose grammar was already being compiled when they arrived.")] = 0
    cancelled: Annotated[int, counter("grammar_compilations_cancelled_total", "grammars",
        "Compilations that did not begin because no request waited for them any more.")] = 0
    expired: Annotated[int, counter("num_grammar_timeout_total", "requests",
        "Requests that waited too long for their grammar.")] = 0
    refused: Annotated[int, counter("grammar_requests_refused_total", "requests",
        "Requests that were refused because too many waited for a grammar.")] = 0
    compile_s: Annotated[float, counter("grammar_compile_seconds_total", "seconds", "Time of all compilations.")] = 0.0
# fmt: on


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    """The report of one rank after one step. The path of a metric in the catalogue is a path of fields from here.

    ``labels`` are ``ParallelState.metric_labels``, which distinguish the ranks in one sink. ``load`` is from this step.
    ``MetricsEmitter`` reads the other parts every few steps. A part that the engine does not have is None.
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
