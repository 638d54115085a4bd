"""The catalogue of metrics: name, meaning and path of each value.

Collectors export exactly ``METRIC_GROUPS``. The documentation and the dashboard are generated from it. To add a metric,
add a field to the struct that its group reads, and a row here.

Names are SGLang's if SGLang (0.5.23) has the metric and follow its style otherwise, so that dashboards and routers for
SGLang can read them. ``vllm_names`` are the names of the same metric in vLLM (0.33.0).
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import attrs

from scheduler_components.values import HistogramSnapshot, SchedulerStats

__all__ = [
    "InfoMetric",
    "Metric",
    "MetricGroup",
    "METRIC_GROUPS",
    "SCHEDULER_METRICS",
    "SCHEDULER_HISTOGRAMS",
    "LOAD_AGE_METRIC",
    "REPORTS_REFUSED",
    "PAGE_READS_FAILED",
    "INFO_METRICS",
    "STATE_METRICS",
    "StateMetric",
    "ALL_METRICS",
    "STREAM_STATE_METRIC",
    "LOG_METRICS",
    "LOG_PREFIX",
    "STREAM_METRICS",
    "SGLANG_PREFIX",
    "VLLM_PREFIX",
    "STREAM_PREFIX",
    "RELAY_METRICS",
    "RELAY_PREFIX",
    "render_markdown",
    "render_stream_markdown",
]

SGLANG_PREFIX = "sglang:"
VLLM_PREFIX = "vllm:"
STREAM_PREFIX = "kv_stream_"
RELAY_PREFIX = "kv_relay_"
LOG_PREFIX = "kv_log_"
PROXY_PREFIX = "kv_proxy_"


@attrs.frozen(kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: without prefix; a counter's ends in ``_total``.
        kind: a gauge rises and falls; a counter only grows, except that a restarted rank begins at 0; a histogram
            counts values in buckets.
        unit: unit of the value, in words.
        help: one sentence for users.
        path: path of the value in the statistics, for example ``load.num_running_reqs``; empty if the collector itself
            computes it.
        vllm_names: vLLM's names of the same metric, without prefix.
        is_per_rank: whether the metric has a rank's labels; else the scraped process counts it over all ranks.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    help: str
    path: str
    vllm_names: tuple[str, ...] = ()
    is_per_rank: bool = True

    def read(self, stats: object) -> float | None:
        """Return the value in ``stats``; None if the engine lacks this part (no LoRA, no disaggregation)."""
        value = _find(stats, self.path)
        assert value is None or isinstance(value, int | float), f"{self.path} is {value!r}"
        return value

    def read_histogram(self, stats: SchedulerStats) -> HistogramSnapshot | None:
        """Return the histogram in ``stats`` of a metric of this kind; None if the engine has none."""
        value = _find(stats, self.path)
        assert value is None or isinstance(value, HistogramSnapshot), f"{self.path} is {value!r}"
        return value


@cache
def _steps(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


def _find(stats: object, path: str) -> object:
    value: object = stats
    for attribute in _steps(path):
        value = getattr(value, attribute)
        if value is None:
            return None
    return value


@attrs.frozen(kw_only=True)
class InfoMetric:
    """A gauge whose labels carry the information. Each rank has one sample.

    Attributes:
        name: without prefix; the same in vLLM.
        help: one sentence for users.
        path: path of the value; empty for a value of 1.
        labels: label and path of its value; a tuple of texts is joined by commas.
    """

    name: str
    help: str
    labels: tuple[tuple[str, str], ...]
    path: str = ""

    def read(self, stats: SchedulerStats) -> tuple[dict[str, str], float] | None:
        """Return labels and value; None if the engine lacks this part or leaves it at 0."""
        found = {label: _find(stats, path) for label, path in self.labels}
        if any(value is None or value == 0 for value in found.values()):
            return None
        value = _find(stats, self.path) if self.path else 1
        assert isinstance(value, int | float), f"{self.path} is {value!r}"
        texts = {label: ",".join(each) if isinstance(each, tuple) else str(each) for label, each in found.items()}
        return texts, value


@attrs.frozen(kw_only=True)
class StateMetric:
    """A gauge with one sample per state, 1 for each active one; the same in vLLM.

    Attributes:
        name: without prefix.
        help: one sentence for users.
        label: label with the name of the state.
        flags: each state and the path of its flag.
    """

    name: str
    help: str
    label: str
    flags: tuple[tuple[str, str], ...]

    def read(self, stats: SchedulerStats) -> dict[str, float] | None:
        """Return the value of each state; None if the engine lacks this part."""
        found = {state: _find(stats, path) for state, path in self.flags}
        values = {state: float(value) for state, value in found.items() if isinstance(value, int | float)}
        return values or None


StatsKind = Literal["step", "collector", "stream", "relay", "log", "proxy", "replica"]


@attrs.frozen
class MetricGroup:
    """The metrics of one subject.

    Attributes:
        title: heading in the documentation.
        stats_kind: the struct of the paths: ``step`` is ``SchedulerStats``, ``stream`` is ``StreamStats``, ``relay`` is
            ``RelayedStreamStats``, ``log`` is ``LogStats``. ``proxy`` and ``replica`` are the counters of a proxy and
            of each replica behind it. A collector itself computes the metrics of ``collector``.
        metrics: in the order of the documentation.
    """

    title: str
    stats_kind: StatsKind
    metrics: tuple[Metric, ...]


def gauge(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, help=help, path=path, vllm_names=vllm_names)


def counter(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="counter", unit=unit, help=help, path=path, vllm_names=vllm_names)


def histogram(name: str, path: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="histogram", unit="seconds", help=help, path=path, vllm_names=vllm_names)


LOAD_AGE_METRIC = gauge("load_age_seconds", "seconds", "", "Age of the load snapshot of the gauges.")
"""Computed at a scrape. It grows for a rank that has stopped reporting."""

REPORTS_REFUSED = attrs.evolve(
    counter("metrics_reports_refused_total", "reports", "", "Reports of ranks beyond the limit of the sink."),
    is_per_rank=False,
)
"""Counted by a ``PrometheusSink``: reports of new ranks beyond ``max_ranks``."""

PAGE_READS_FAILED = attrs.evolve(
    counter(
        "metrics_pages_unread_total",
        "reads",
        "",
        "Reads of a rank's metrics page without a complete report: none is written yet, or the page was refused.",
    ),
    is_per_rank=False,
)
"""Counted by a ``MetricsBoardCollector``. The ranks of these reads keep their last values."""

# fmt: off
METRIC_GROUPS: tuple[MetricGroup, ...] = (
    MetricGroup("Load", "step", (
        gauge("num_running_reqs", "requests", "load.num_running_reqs",
            "Running requests.", "num_requests_running"),
        gauge("num_queue_reqs", "requests", "load.num_waiting_reqs",
            "Waiting requests.", "num_requests_waiting"),
        gauge("token_usage", "share", "load.token_usage",
            "KV tokens in use / capacity, 0 to 1.", "kv_cache_usage_perc"),
        gauge("gen_throughput", "tokens/s", "load.gen_throughput",
            "Generated tokens per second, recently."),
        gauge("cache_hit_rate", "share", "load.cache_hit_rate",
            "Cached / input tokens, recently, 0 to 1."),
        gauge("utilization", "share", "load.utilization",
            "The fuller of request slots and KV tokens, 0 to 1."),
        gauge("num_used_tokens", "tokens", "load.num_used_tokens",
            "KV tokens of running requests."),
        gauge("num_pending_tokens", "tokens", "load.num_pending_tokens",
            "Input tokens that wait for prefill."),
        gauge("num_waiting_uncached_tokens", "tokens", "load.num_waiting_uncached_tokens",
            "Input tokens that wait for prefill and are not in a cached prefix."),
        gauge("num_total_tokens", "tokens", "load.num_total_tokens",
            "KV tokens in use plus pending tokens."),
        gauge("max_total_num_tokens", "tokens", "load.max_total_num_tokens",
            "Capacity of the KV pool."),
        gauge("page_size", "tokens", "load.page_size",
            "Tokens per page of the KV pool."),
        gauge("max_running_requests", "requests", "load.max_running_requests",
            "Request slots."),
        gauge("load_sequence", "reports", "load.sequence",
            "Number of the load snapshot of the gauges."),
    )),
    MetricGroup("Held requests", "step", (
        gauge("num_grammar_queue_reqs", "requests", "load.queues.grammar",
            "Requests that wait for their grammar."),
        gauge("num_paused_reqs", "requests", "load.queues.paused",
            "Paused requests."),
        gauge("num_retracted_reqs", "requests", "load.queues.retracted",
            "Retracted requests that wait to run again."),
    )),
    MetricGroup("Prefill and decode instances", "step", (
        gauge("num_prefill_bootstrap_queue_reqs", "requests", "load.disaggregation.prefill_bootstrap_queue_reqs",
            "Prefill instance: requests that wait for their decode peer."),
        gauge("num_prefill_inflight_queue_reqs", "requests", "load.disaggregation.prefill_inflight_queue_reqs",
            "Prefill instance: requests whose KV is being sent."),
        gauge("num_decode_prealloc_queue_reqs", "requests", "load.disaggregation.decode_prealloc_queue_reqs",
            "Decode instance: requests that wait for pages."),
        gauge("num_decode_transfer_queue_reqs", "requests", "load.disaggregation.decode_transfer_queue_reqs",
            "Decode instance: requests whose KV is being received."),
        gauge("num_decode_retracted_queue_reqs", "requests", "load.disaggregation.decode_retracted_queue_reqs",
            "Decode instance: retracted requests."),
        gauge("kv_transfer_speed_gb_s", "GB/s", "load.disaggregation.kv_transfer_speed_gb_s",
            "Speed of KV transfers."),
        gauge("kv_transfer_latency_ms", "ms", "load.disaggregation.kv_transfer_latency_ms",
            "Latency of KV transfers."),
    )),
    MetricGroup("LoRA, speculation, memory", "step", (
        gauge("lora_pool_slots_used", "slots", "load.lora.slots_used",
            "LoRA adapter slots in use."),
        gauge("lora_pool_slots_total", "slots", "load.lora.slots_total",
            "LoRA adapter slots."),
        gauge("lora_pool_utilization", "share", "load.lora.utilization",
            "LoRA adapter slots in use / all, 0 to 1."),
        gauge("spec_accept_length", "tokens", "load.speculative.accept_length",
            "Accepted tokens per verification step."),
        gauge("spec_accept_rate", "share", "load.speculative.accept_rate",
            "Accepted / drafted tokens, 0 to 1."),
        gauge("weight_memory_usage_gb", "GB", "load.memory.weight_gb",
            "Device memory of the weights."),
        gauge("kv_cache_memory_usage_gb", "GB", "load.memory.kv_cache_gb",
            "Device memory of the KV pool."),
        gauge("graph_memory_usage_gb", "GB", "load.memory.graph_gb",
            "Device memory of captured graphs."),
    )),
    MetricGroup("Totals", "step", (
        counter("num_requests_total", "requests", "counters.num_requests_total",
            "Requests accepted."),
        counter("num_aborted_requests_total", "requests", "counters.num_aborted_requests_total",
            "Requests aborted."),
        counter("num_retracted_requests_total", "retractions", "counters.num_retractions_total",
            "Retractions of running requests because the KV pool was full.", "num_preemptions_total"),
        gauge("preemptions_per_second", "retractions/s", "counters.preemptions_per_s",
            "Retractions per second, recently."),
        counter("requests_refused_too_long_total", "requests", "counters.refused_too_long_total",
            "Requests refused because the pool or the model's context cannot hold them."),
        counter("requests_refused_invalid_total", "requests", "counters.refused_invalid_total",
            "Requests refused for another reason that a retry does not change, such as an unknown token or turn."),
        counter("prompt_tokens_total", "tokens", "counters.prompt_tokens_total",
            "Input tokens of requests that were prefilled.", "prompt_tokens_total", "prefix_cache_queries_total"),
        counter("cached_tokens_total", "tokens", "counters.cached_tokens_total",
            "The part of the input tokens that was in a cached prefix.", "prefix_cache_hits_total"),
        counter("generation_tokens_total", "tokens", "counters.generation_tokens_total",
            "Generated tokens.", "generation_tokens_total"),
        counter("evicted_tokens_total", "tokens", "counters.evicted_tokens_total",
            "Cached tokens evicted for others."),
        counter("prefill_uncached_tokens_total", "tokens", "load.total_prefill_uncached_tokens",
            "Tokens computed by prefill, as load reports count them."),
        counter("prefill_busy_us_total", "microseconds", "load.total_prefill_busy_us",
            "Time of the steps that computed these tokens."),
        counter("decode_steps_total", "steps", "load.decode_moments.steps",
            "Steps that decoded and prefilled nothing."),
        counter("decode_step_requests_total", "requests", "load.decode_moments.requests",
            "Requests in these steps, b of each."),
        counter("decode_busy_us_total", "microseconds", "load.decode_moments.time_us",
            "Time of these steps, t of each."),
        counter("decode_step_requests_squared_total", "requests", "load.decode_moments.requests_squared",
            "Sum of b * b, for the line t = t0 + t1 * b."),
        counter("decode_step_requests_us_total", "microseconds", "load.decode_moments.requests_time_us",
            "Sum of b * t."),
        counter("decode_step_tokens_total", "tokens", "load.decode_moments.tokens",
            "Tokens generated by these steps."),
    )),
    # SGLang counts tokens here. These metrics count pages and have other names; page_size converts between them.
    MetricGroup("Hierarchical cache", "step", (
        counter("hicache_prompt_tokens_total", "tokens", "tiers.prompt_tokens",
            "Input tokens of requests at their first admission."),
        counter("hicache_device_hit_tokens_total", "tokens", "tiers.device_hit_tokens",
            "The part of the input tokens that was cached on the device."),
        counter("hicache_host_hit_tokens_total", "tokens", "tiers.host_hit_tokens",
            "The part of the input tokens that was on the host, and was loaded from there."),
        counter("hicache_storage_hit_tokens_total", "tokens", "tiers.storage_hit_tokens",
            "The part of the input tokens that was in storage, and was read from there."),
        counter("hicache_pages_written_total", "pages", "tiers.pages_written",
            "Pages copied to the host."),
        counter("hicache_pages_not_written_total", "pages", "tiers.pages_not_written",
            "Copies to the host given up: no room, or a failure."),
        counter("hicache_pages_loaded_total", "pages", "tiers.pages_loaded",
            "Pages copied back to the device."),
        counter("hicache_pages_not_loaded_total", "pages", "tiers.pages_not_loaded",
            "Copies back given up after a failure on some rank."),
        counter("hicache_pages_backed_up_total", "pages", "tiers.pages_backed_up",
            "Pages written to storage."),
        counter("hicache_pages_not_backed_up_total", "pages", "tiers.pages_not_backed_up",
            "Writes to storage given up: too many under way, or a failure."),
        counter("hicache_pages_prefetched_total", "pages", "tiers.pages_prefetched",
            "Pages read from storage and put in the cache."),
        counter("hicache_pages_revoked_total", "pages", "tiers.pages_revoked",
            "Pages found in storage and not put in the cache."),
        counter("hicache_prefetches_total", "prefetches", "tiers.prefetches",
            "Reads from storage that were started."),
        counter("hicache_prefetches_revoked_total", "prefetches", "tiers.prefetches_revoked",
            "Reads from storage that returned no page."),
        counter("hicache_pages_dropped_total", "pages", "tiers.pages_dropped",
            "Pages evicted from the device without a copy on the host."),
    )),
    MetricGroup("Input", "step", (
        counter("intake_receives_total", "meetings", "receiver.receives",
            "Collective receives of input by all ranks of the replica."),
        counter("intake_receives_skipped_total", "steps", "receiver.receives_skipped",
            "Steps without a receive, which the recv skipper skipped after the previous forward mode."),
        counter("intake_requests_admitted_total", "requests", "receiver.requests_admitted",
            "Requests admitted and broadcast to all ranks."),
        counter("intake_requests_refused_total", "requests", "receiver.requests_refused",
            "Requests refused: too large, too many, draining, an id in use, or aborted earlier."),
        counter("intake_requests_repeated_total", "requests", "receiver.requests_repeated",
            "Duplicates of requests in flight, which were dropped."),
        counter("intake_messages_unreadable_total", "messages", "receiver.messages_unreadable",
            "Received messages that could not be decoded."),
        gauge("intake_requests_held", "requests", "receiver.requests_held",
            "Requests that wait because input is blocked."),
    )),
    MetricGroup("Pools", "step", (
        gauge("max_pool_usage", "share", "pools.max_pool_usage",
            "Pages in use / pages of the fullest pool, 0 to 1."),
        gauge("full_token_usage", "share", "pools.full_token_usage",
            "KV tokens of full attention in use / capacity, 0 to 1."),
        gauge("kv_available_tokens", "tokens", "pools.kv_available_tokens",
            "Free KV tokens of full attention."),
        gauge("kv_evictable_tokens", "tokens", "pools.kv_evictable_tokens",
            "Cached and unlocked KV tokens of full attention."),
        gauge("kv_used_tokens", "tokens", "pools.kv_used_tokens",
            "KV tokens of full attention in use."),
        gauge("swa_token_usage", "share", "pools.swa_token_usage",
            "KV tokens of sliding windows in use / capacity, 0 to 1."),
        gauge("swa_available_tokens", "tokens", "pools.swa_available_tokens",
            "Free KV tokens of sliding windows."),
        gauge("swa_evictable_tokens", "tokens", "pools.swa_evictable_tokens",
            "Cached and unlocked KV tokens of sliding windows."),
        gauge("swa_used_tokens", "tokens", "pools.swa_used_tokens",
            "KV tokens of sliding windows in use."),
        gauge("mamba_usage", "share", "pools.mamba_usage",
            "Mamba states in use / all, 0 to 1."),
        gauge("mamba_available_slots", "states", "pools.mamba_available_slots",
            "Free mamba states."),
        gauge("mamba_evictable_slots", "states", "pools.mamba_evictable_slots",
            "Cached and unlocked mamba states."),
        gauge("mamba_used_slots", "states", "pools.mamba_used_slots",
            "Mamba states in use."),
        gauge("session_held_pages", "pages", "pools.session_held_pages",
            "Pages of sessions between two requests, over all pools."),
    )),
    MetricGroup("Integrity", "step", (
        counter("integrity_checks_total", "checks", "integrity.checks",
            "Checks of the page counts of all pools."),
        counter("integrity_censuses_total", "checks", "integrity.censuses",
            "Full checks of every page, lock and published block."),
        counter("integrity_checks_failed_total", "checks", "integrity.checks_failed",
            "Checks in which a pool raised an exception."),
        counter("integrity_problems_total", "problems", "integrity.problems",
            "Violations of pool invariants that were found."),
        counter("integrity_pages_lost_total", "pages", "integrity.pages_lost",
            "Pages found without an owner."),
        counter("integrity_stalls_total", "stalls", "integrity.stalls",
            "Steps without progress for longer than the timeout of the watchdog."),
        gauge("integrity_problems_open", "problems", "integrity.problems_open",
            "Violations at the last full check."),
        counter("decisions_total", "decisions", "decisions.num_decisions",
            "Decisions that the rank noted and compared with the other ranks'."),
        counter("decision_divergences_total", "divergences", "decisions.num_divergences",
            "Agreements that found that the ranks of the replica had decided differently."),
        counter("decision_divergences_unknown_total", "divergences", "decisions.num_unknown",
            "Divergences whose first decision could not be named."),
        counter("decisions_unregistered_total", "decisions", "decisions.num_unregistered",
            "Noted decisions of a kind that is not registered."),
        counter("decision_values_replaced_total", "values", "decisions.num_replaced_values",
            "Values of decisions that could not be encoded and were replaced by the name of their type."),
    )),
    MetricGroup("KV events", "step", (
        counter("kv_events_batches_sent_total", "batches", "publisher.batches_sent",
            "KV-event batches sent."),
        counter("kv_events_sent_total", "events", "publisher.events_sent",
            "KV events sent."),
        counter("kv_events_bytes_sent_total", "bytes", "publisher.bytes_sent",
            "Bytes of KV-event batches sent."),
        counter("kv_events_refused_total", "events", "publisher.events_refused",
            "Invalid KV events, left out of their batch."),
        counter("kv_events_batches_dropped_total", "batches", "publisher.batches_dropped",
            "KV-event batches accepted and not sent: overflow, shutdown or a failing publisher."),
        counter("kv_events_batches_collapsed_total", "batches", "publisher.batches_collapsed",
            "KV-event batches merged into one because too many were pending; no state is lost."),
        counter("kv_events_send_stalls_total", "stalls", "publisher.send_stalls",
            "Times that batches waited because a call was stuck for a second, or interrupted by an exception."),
        counter("kv_events_replays_served_total", "replays", "publisher.replays_served",
            "Replay answers sent completely."),
        counter("kv_events_batches_replayed_total", "batches", "publisher.batches_replayed",
            "Batches sent in replay answers."),
        counter("kv_events_replays_refused_total", "replays", "publisher.replays_refused",
            "Replay requests refused."),
        counter("kv_events_replays_truncated_total", "replays", "publisher.replays_truncated",
            "Replay answers sent partially: the client left or was too slow, or the publisher closed."),
        counter("kv_events_subscribers_seen_total", "connections", "publisher.subscribers_seen",
            "Connections of subscribers to the live stream."),
        counter("kv_events_peers_refused_total", "connections", "publisher.peers_refused",
            "Connections refused: no or wrong keys, or no ZeroMQ peer."),
        gauge("kv_events_replays_open", "replays", "publisher.replays_open",
            "Replay answers being sent."),
        gauge("kv_events_replays_waiting", "replays", "publisher.replays_waiting",
            "Replay requests that wait for a free slot."),
        gauge("kv_events_batches_buffered", "batches", "publisher.batches_buffered",
            "Batches kept for replay."),
        gauge("kv_events_bytes_buffered", "bytes", "publisher.bytes_buffered",
            "Bytes kept for replay."),
        gauge("kv_events_batches_pending", "batches", "publisher.batches_pending",
            "Batches accepted and not yet sent."),
        gauge("kv_events_blocks_in_base", "blocks", "publisher.blocks_in_base",
            "Blocks of the snapshot: stored by batches before the replay buffer and not removed since."),
        gauge("kv_events_bytes_in_base", "bytes", "publisher.bytes_in_base",
            "Bytes of the payloads that the snapshot keeps."),
        gauge("kv_events_lag_seconds", "seconds", "publisher.lag_s",
            "Age of the oldest batch not yet sent."),
        gauge("kv_events_last_sequence", "sequence", "publisher.last_sequence",
            "Number of the last batch sent, or -1."),
        gauge("kv_events_open_bind_without_auth", "flag", "publisher.open_bind_without_auth",
            "1 when the stream listens beyond loopback without authentication."),
    )),
    MetricGroup("Quiesce", "step", (
        gauge("engine_paused", "flag", "quiesce.is_paused",
            "1 while the engine is paused and computes nothing."),
        counter("engine_pauses_total", "pauses", "quiesce.num_pauses",
            "Pauses."),
        counter("cache_flushes_total", "flushes", "quiesce.num_flushes",
            "Flushes of the cache."),
        counter("weight_updates_total", "updates", "quiesce.num_weight_updates",
            "Weight updates that ended with new weights."),
        counter("weight_rollbacks_total", "updates", "quiesce.num_weight_rollbacks",
            "Weight updates that ended with the old weights."),
        counter("engine_orders_refused_total", "orders", "quiesce.num_orders_refused",
            "Control requests refused: wrong state, timeout, or a failure on a rank."),
    )),
    MetricGroup("Batches", "step", (
        gauge("new_token_ratio", "share", "batching.new_token_ratio",
            "Share of the possible output that an admission reserves, 0 to 1."),
        counter("first_tokens_predicted_total", "requests", "batching.first_tokens_predicted",
            "First tokens that had a forecast."),
        gauge("first_token_error_p50_seconds", "seconds", "batching.first_token_error_p50_s",
            "Median error of the last 256 forecasts of a first token."),
        gauge("first_token_error_p90_seconds", "seconds", "batching.first_token_error_p90_s",
            "90th percentile of the error of these forecasts."),
        counter("dp_steps_total", "steps", "batching.dp_steps",
            "DP attention: steps in which at least one replica computed."),
        counter("dp_idle_batches_total", "steps", "batching.dp_idle_batches",
            "DP attention: these steps without a batch on this replica."),
        counter("dp_eager_steps_total", "steps", "batching.dp_eager_steps",
            "DP attention: these steps without a captured graph, because of the batch of any replica."),
        counter("dp_padded_tokens_total", "tokens", "batching.dp_padded_tokens",
            "DP attention: padding of this replica's batches to the longest batch."),
        counter("dp_prefills_delayed_total", "steps", "batching.dp_prefills_delayed",
            "DP attention: steps in which prefills waited for other replicas."),
        counter("dp_prefills_forced_total", "times", "batching.dp_prefills_forced",
            "DP attention: prefills forced after the longest wait."),
        counter("admissions_refused_tokens_total", "requests", "batching.refused_tokens",
            "Steps in which a request was not admitted because nothing was left of the prefill tokens of the step."),
        counter("admissions_refused_slots_total", "requests", "batching.refused_slots",
            "Steps in which a request was not admitted because no request slot was free."),
        counter("admissions_refused_pages_total", "requests", "batching.refused_pages",
            "Steps in which a request was not admitted because the KV pool lacked pages that it may need."),
        counter("admissions_refused_watermark_total", "requests", "batching.refused_watermark",
            "Steps in which a request was not admitted because fewer free pages than the watermark would stay."),
        counter("admissions_refused_tenant_total", "requests", "batching.refused_tenant",
            "Steps in which a request was not admitted because its tenant was at its cap of running requests."),
        counter("admissions_refused_not_ready_total", "requests", "batching.refused_not_ready",
            "Steps in which a request was not admitted because its pages were still being fetched."),
        counter("preemptions_latest_arrival_total", "requests", "batching.preempted_latest_arrival",
            "Requests preempted by the latest arrival."),
        counter("preemptions_least_recomputation_total", "requests", "batching.preempted_least_recomputation",
            "Requests preempted by the least recomputation."),
        counter("preemptions_lowest_priority_total", "requests", "batching.preempted_lowest_priority",
            "Requests preempted by the lowest priority."),
        counter("preemptions_longest_remaining_total", "requests", "batching.preempted_longest_remaining",
            "Requests preempted by the longest remaining output."),
        counter("preemptions_other_total", "requests", "batching.preempted_other",
            "Requests preempted by another policy."),
        counter("scheduling_policies_replaced_total", "policies", "batching.policies_replaced",
            "Policies that failed and were replaced by first come, first served, or by the latest arrival."),
        counter("requests_admitted_high_priority_total", "requests", "batching.admitted_high",
            "First admissions of requests with a priority above 0."),
        counter("queue_time_high_priority_seconds_total", "seconds", "batching.waited_high_s",
            "Their waits before it, as a sum."),
        counter("requests_admitted_normal_priority_total", "requests", "batching.admitted_normal",
            "First admissions of requests with a priority of 0."),
        counter("queue_time_normal_priority_seconds_total", "seconds", "batching.waited_normal_s",
            "Their waits before it, as a sum."),
        counter("requests_admitted_low_priority_total", "requests", "batching.admitted_low",
            "First admissions of requests with a priority below 0."),
        counter("queue_time_low_priority_seconds_total", "seconds", "batching.waited_low_s",
            "Their waits before it, as a sum."),
    )),
    MetricGroup("Telemetry", "step", (
        counter("forward_passes_sent_total", "messages", "forward_passes.sent",
            "Messages of forward-pass metrics sent, heartbeats included."),
        counter("forward_pass_heartbeats_total", "messages", "forward_passes.heartbeats",
            "Heartbeats of an idle engine among them."),
        counter("forward_passes_failed_total", "messages", "forward_passes.failed",
            "Messages of forward-pass metrics lost by an error in the scheduler's process."),
        counter("request_spans_exported_total", "spans", "spans.exported",
            "Spans of requests that the collector took."),
        counter("request_spans_dropped_total", "spans", "spans.dropped",
            "Spans of requests lost: the queue was full, or the export failed."),
        gauge("request_spans_pending", "spans", "spans.pending",
            "Spans of requests that wait for their export."),
        counter("trace_parents_refused_total", "requests", "spans.parents_refused",
            "Requests whose trace headers were not valid, and that began a trace of their own."),
    )),
    MetricGroup("Latencies", "step", (
        histogram("time_to_first_token_seconds", "latencies.time_to_first_token",
            "From the first queueing to the first token.", "time_to_first_token_seconds"),
        histogram("inter_token_latency_seconds", "latencies.inter_token",
            "Between tokens; tokens of one step share their interval.", "inter_token_latency_seconds"),
        histogram("e2e_request_latency_seconds", "latencies.e2e",
            "From the first queueing to the end of a request.", "e2e_request_latency_seconds"),
        histogram("queue_time_seconds", "latencies.queue",
            "In the queue before the first prefill.", "request_queue_time_seconds"),
        histogram("prefill_time_seconds", "latencies.prefill",
            "In prefill, over all prefills of a request.", "request_prefill_time_seconds"),
        histogram("decode_time_seconds", "latencies.decode",
            "In decode, over all decodes of a request.", "request_decode_time_seconds"),
    )),
    MetricGroup("Outputs", "step", (
        counter("output_batches_sent_total", "messages", "outputs.batches_sent",
            "Messages of outputs that the receiver accepted."),
        counter("output_deltas_sent_total", "deltas", "outputs.deltas_sent",
            "Updates of single requests in these messages."),
        counter("output_tokens_sent_total", "tokens", "outputs.tokens_sent",
            "Generated tokens in these messages."),
        counter("output_steps_delayed_total", "steps", "outputs.steps_delayed",
            "Steps whose outputs had to wait because the receiver was behind."),
        gauge("output_requests_waiting", "requests", "outputs.requests_waiting",
            "Requests in flight with delayed outputs."),
        gauge("output_ends_held", "requests", "outputs.ends_held",
            "Finished requests with delayed outputs."),
        gauge("output_bytes_held", "bytes", "outputs.bytes_held",
            "Bytes of these outputs."),
        counter("output_ends_dropped_total", "requests", "outputs.ends_dropped",
            "Finished requests whose last outputs were dropped, because too many were held."),
        counter("output_tokens_dropped_total", "tokens", "outputs.tokens_dropped",
            "Generated tokens that were dropped."),
    )),
    MetricGroup("Waiting rooms and time limits", "step", (
        gauge("room_requests_waiting", "requests", "rooms.waiting",
            "Requests that wait for something besides pages until all ranks have it."),
        counter("room_requests_ready_total", "requests", "rooms.ready",
            "Requests that left a room because all ranks were ready."),
        counter("room_requests_failed_total", "requests", "rooms.failed",
            "Requests that left a room because one rank could not prepare what they need."),
        counter("room_requests_expired_total", "requests", "rooms.expired",
            "Requests that left a room because they waited too long in it."),
        counter("room_requests_cancelled_total", "requests", "rooms.cancelled",
            "Requests that ended while they waited in a room: aborted, or ended by another limit."),
        counter("room_requests_refused_total", "requests", "rooms.refused",
            "Requests that a full room refused."),
        counter("room_reports_unknown_total", "reports", "rooms.unknown",
            "Reports of this rank about requests that did not wait."),
        gauge("requests_with_limit", "requests", "deadlines.waiting",
            "Requests in flight that have a time limit."),
        counter("request_queue_timeouts_total", "requests", "deadlines.queue_timeouts",
            "Requests that ended because they were not admitted in time."),
        counter("request_timeouts_total", "requests", "deadlines.timeouts",
            "Requests that ended because they were not complete in time."),
    )),
    MetricGroup("Sessions", "step", (
        gauge("sessions_open", "sessions", "sessions.open",
            "Open sessions."),
        gauge("session_locked_pages", "pages", "sessions.held_pages",
            "Cached pages that sessions lock between two turns; a page of two sessions counts twice."),
        counter("sessions_opened_total", "sessions", "sessions.opened",
            "Sessions that clients opened."),
        counter("sessions_closed_total", "sessions", "sessions.closed",
            "Sessions that clients closed."),
        counter("sessions_reaped_total", "sessions", "sessions.reaped",
            "Sessions that were closed because they were idle for their timeout."),
        counter("session_refusals_total", "requests", "sessions.refused",
            "Sessions and turns that were refused."),
        counter("session_turns_total", "requests", "sessions.turns",
            "Turns that ended and can be continued."),
        counter("session_pages_released_total", "pages", "sessions.pages_released",
            "Pages unlocked before their session ended: for requests, for the limit of pages or for a clear."),
        gauge("session_text_tokens", "tokens", "sessions.text_tokens",
            "Tokens of all turns that can be continued."),
    )),
    MetricGroup("LoRA adapters", "step", (
        gauge("lora_adapters_registered", "adapters", "adapters.registered",
            "LoRA adapters that requests may name."),
        gauge("lora_requests_waiting", "requests", "adapters.waiting",
            "Requests that wait until all ranks have loaded their adapter."),
        counter("lora_loads_total", "adapters", "adapters.loads",
            "Loads of adapters that succeeded on all ranks."),
        counter("lora_loads_failed_total", "adapters", "adapters.loads_failed",
            "Loads of adapters that failed on some rank, or took too long."),
        counter("lora_evictions_total", "adapters", "adapters.evictions",
            "Adapters that were unloaded."),
        counter("lora_requests_failed_total", "requests", "adapters.requests_failed",
            "Requests that failed because their adapter was not loaded."),
        counter("lora_requests_refused_total", "requests", "adapters.requests_refused",
            "Requests that were refused because too many waited for adapters."),
    )),
    MetricGroup("Grammars", "step", (
        gauge("grammar_requests_waiting", "requests", "grammars.waiting",
            "Requests that wait until all ranks have their grammar."),
        gauge("grammars_compiling", "grammars", "grammars.compiling",
            "Grammars that this rank compiles, or that wait for its thread."),
        gauge("grammars_cached", "grammars", "grammars.cached",
            "Compiled grammars that this rank keeps."),
        counter("grammars_compiled_total", "grammars", "grammars.compiled",
            "Grammars that this rank compiled."),
        counter("grammars_failed_total", "grammars", "grammars.failed",
            "Grammars that this rank could not compile."),
        counter("num_grammar_cache_hit_total", "requests", "grammars.cache_hits",
            "Requests whose grammar was kept when they arrived."),
        counter("grammar_requests_joined_total", "requests", "grammars.joined",
            "Requests whose grammar was already being compiled when they arrived."),
        counter("grammar_compilations_cancelled_total", "grammars", "grammars.cancelled",
            "Compilations that did not begin because no request waited for them any more."),
        counter("num_grammar_timeout_total", "requests", "grammars.expired",
            "Requests that waited too long for their grammar."),
        counter("grammar_requests_refused_total", "requests", "grammars.refused",
            "Requests that were refused because too many waited for a grammar."),
        counter("grammar_compile_seconds_total", "seconds", "grammars.compile_s",
            "Time of all compilations."),
    )),
    MetricGroup("Reports", "collector", (LOAD_AGE_METRIC, REPORTS_REFUSED, PAGE_READS_FAILED)),
    MetricGroup("Followed streams", "stream", (
        gauge("kv_stream_state", "flag", "state",
            "1 for the state that the stream is in (label state), 0 for the others."),
        gauge("kv_stream_is_extended", "flag", "is_extended",
            "1 if the publisher has a digest, which verifies the view."),
        gauge("kv_stream_last_sequence", "sequence", "last_seq",
            "Number of the last batch in the view."),
        gauge("kv_stream_blocks_held", "blocks", "blocks_held",
            "Blocks in the view, over all tiers."),
        gauge("kv_stream_lag_seconds", "seconds", "lag_s",
            "Receive time minus timestamp of the last live batch."),
        gauge("kv_stream_newest_batch_age_seconds", "seconds", "newest_batch_age_s",
            "Time now minus timestamp of the newest batch in the view."),
        counter("kv_stream_batches_total", "batches", "batches",
            "Batches and snapshot chunks applied."),
        counter("kv_stream_events_total", "events", "events",
            "Events in these batches."),
        counter("kv_stream_blocks_stored_total", "blocks", "blocks_stored",
            "Blocks stored by these events."),
        counter("kv_stream_blocks_removed_total", "blocks", "blocks_removed",
            "Blocks removed by these events."),
        counter("kv_stream_gaps_total", "gaps", "gaps",
            "Gaps in the numbers of live batches."),
        counter("kv_stream_batches_recovered_total", "batches", "recovered",
            "Batches received by replay."),
        counter("kv_stream_losses_total", "losses", "losses",
            "Times that the stream became partial."),
        counter("kv_stream_restarts_total", "restarts", "restarts",
            "Restarts of the publisher."),
        counter("kv_stream_verified_total", "proofs", "verified",
            "Times that the publisher's digest matched."),
        counter("kv_stream_splices_total", "splices", "splices",
            "Times that the publisher's digest did not match, and the view was rebuilt."),
        counter("kv_stream_snapshots_total", "snapshots", "snapshots",
            "Snapshots that replaced a view."),
        counter("kv_stream_duplicates_total", "batches", "duplicates",
            "Batches at or below the last applied number."),
        counter("kv_stream_replays_asked_total", "questions", "replays_asked",
            "Requests to the replay channel."),
        counter("kv_stream_replays_unanswered_total", "questions", "replays_unanswered",
            "Replay requests without a complete answer in time."),
        counter("kv_stream_replays_cut_total", "questions", "replays_cut",
            "Extended replay answers that could not be used completely."),
        counter("kv_stream_disconnects_total", "connections", "disconnects",
            "Times that the live connection was lost."),
        counter("kv_stream_decode_errors_total", "errors", "decode_errors",
            "Batches or single events that could not be decoded."),
        counter("kv_stream_bad_frames_total", "messages", "bad_frames",
            "Messages that are not frames of this protocol."),
        counter("kv_stream_other_topics_total", "messages", "other_topics",
            "Skipped messages of another topic with the same beginning."),
        counter("kv_stream_rank_mismatches_total", "batches", "rank_mismatches",
            "Batches of another rank."),
        counter("kv_stream_unknown_removals_total", "blocks", "unknown_removals",
            "Removed blocks that were not in the view."),
        counter("kv_stream_unknown_media_total", "events", "unknown_media",
            "Events with an unknown medium."),
        counter("kv_stream_fenced_total", "messages", "fenced",
            "Skipped messages of another epoch in the same log."),
    )),
    MetricGroup("Streams written to a broker", "log", (
        gauge("kv_log_is_connected", "flag", "is_connected",
            "1 while the broker is connected."),
        gauge("kv_log_is_superseded", "flag", "is_superseded",
            "1 after another writer has taken over the stream and this one has stopped."),
        gauge("kv_log_last_sequence", "sequence", "last_seq",
            "Number of the last batch."),
        gauge("kv_log_batches_waiting", "batches", "waiting",
            "Batches that the broker has not stored yet."),
        counter("kv_log_batches_stored_total", "batches", "stored",
            "Batches that the broker has acknowledged."),
        counter("kv_log_batches_retried_total", "batches", "retried",
            "Batches sent again because no acknowledgement arrived."),
        counter("kv_log_batches_collapsed_total", "batches", "collapsed",
            "Batches sent only as part of a snapshot."),
        counter("kv_log_bases_total", "bases", "bases",
            "Snapshots stored."),
        counter("kv_log_failures_total", "failures", "failures",
            "Batches and snapshots that the broker refused."),
        counter("kv_log_broker_losses_total", "losses", "broker_losses",
            "Losses of the broker connection."),
    )),
    MetricGroup("Relayed streams", "relay", (
        gauge("kv_relay_is_whole", "flag", "is_whole",
            "1 while every source of the stream is complete."),
        gauge("kv_relay_sources", "sources", "num_sources",
            "Sources of the stream, including those that do not answer."),
    )),
    MetricGroup("Requests of a proxy", "proxy", (
        gauge("kv_proxy_requests_open", "requests", "open",
            "Requests that are open."),
        counter("kv_proxy_requests_total", "requests", "requests",
            "Requests that were accepted."),
        counter("kv_proxy_requests_refused_total", "requests", "refused",
            "Requests beyond the limit, or while the proxy was stopping."),
        counter("kv_proxy_requests_unplaced_total", "requests", "unplaced",
            "Requests that no replica could take."),
        counter("kv_proxy_retries_total", "attempts", "retried",
            "Attempts at another replica, after the first one of a request had failed."),
        counter("kv_proxy_answers_cut_total", "answers", "cut",
            "Answers that ended early because an engine failed, or because other answers filled the memory."),
        counter("kv_proxy_answers_refused_total", "answers", "answers_refused",
            "Answers that were not passed on whole, because other answers filled the memory."),
        counter("kv_proxy_prompts_unknown_total", "prompts", "unknown_prompts",
            "Prompts routed by load alone, because no engine returned their tokens."),
    )),
    MetricGroup("Replicas of a proxy", "replica", (
        gauge("kv_proxy_replica_is_up", "flag", "is_up",
            "1 while the replica gets requests."),
        counter("kv_proxy_replica_picks_total", "requests", "picks",
            "Requests that were sent to the replica."),
        counter("kv_proxy_replica_prompt_blocks_total", "blocks", "prompt_blocks",
            "Whole blocks of the prompts of these requests."),
        counter("kv_proxy_replica_cached_blocks_total", "blocks", "cached_blocks",
            "The part of these blocks that counted as cached there."),
        counter("kv_proxy_replica_failures_total", "requests", "failures",
            "Requests that the replica failed to answer."),
    )),
)
# fmt: on
"""Every metric. Each row has two lines: name, unit and path; then help and vLLM's names."""


def _metrics_of(kind: StatsKind) -> tuple[Metric, ...]:
    return tuple(metric for group in METRIC_GROUPS if group.stats_kind == kind for metric in group.metrics)


SCHEDULER_METRICS = tuple(metric for metric in _metrics_of("step") if metric.kind != "histogram")
"""Read from ``SchedulerStats`` and labelled with ``ParallelState.metric_labels``."""

SCHEDULER_HISTOGRAMS = tuple(metric for metric in _metrics_of("step") if metric.kind == "histogram")
"""Request times, labelled as ``SCHEDULER_METRICS`` and with the bound of the bucket."""

# fmt: off
INFO_METRICS = (
    InfoMetric(
        name="cache_config_info",
        help="The KV pool: tokens per page and pages, by SGLang's labels and by vLLM's.",
        labels=(
            ("page_size", "load.page_size"), ("num_pages", "load.num_pages"),
            ("block_size", "load.page_size"), ("num_gpu_blocks", "load.num_pages"),
        ),
    ),
    InfoMetric(
        name="lora_requests_info",
        help="Adapters of running and waiting requests, and adapter slots; the value is the time of the report.",
        path="load.timestamp",
        labels=(
            ("max_lora", "load.lora.slots_total"),
            ("running_lora_adapters", "load.lora.running_adapters"),
            ("waiting_lora_adapters", "load.lora.waiting_adapters"),
        ),
    ),
)
"""Read by the model-server protocol of Kubernetes' gateway, from ``SchedulerStats``."""

STATE_METRICS = (
    StateMetric(
        name="engine_sleep_state",
        help="awake is 1 while all memory is held; weights_offloaded is 1 while the weights are on the host; "
        "discard_all is 1 while they are discarded.",
        label="sleep_state",
        flags=(
            ("awake", "quiesce.is_awake"),
            ("weights_offloaded", "quiesce.has_weights_offloaded"),
            ("discard_all", "quiesce.has_discarded_all"),
        ),
    ),
)
"""States of an engine, as in vLLM, from ``SchedulerStats``."""

# fmt: on

ALL_METRICS = (*SCHEDULER_METRICS, *SCHEDULER_HISTOGRAMS, *_metrics_of("collector"))
"""All metrics of schedulers, which the dashboard draws; without those of streams."""

STREAM_STATE_METRIC = _metrics_of("stream")[0]
"""The state of a followed stream: one flag per state."""

STREAM_METRICS = _metrics_of("stream")[1:]
"""Read from ``StreamStats`` and labelled with the ``rank``, as ``STREAM_STATE_METRIC``."""

LOG_METRICS = _metrics_of("log")
"""Read from ``LogStats`` and labelled with the ``rank``."""

RELAY_METRICS = _metrics_of("relay") + tuple(
    attrs.evolve(metric, name=RELAY_PREFIX + metric.name.removeprefix("kv_"))
    for metric in SCHEDULER_METRICS
    if metric.path.startswith("publisher.")
)
"""Read from ``RelayedStreamStats`` of each stream that a relay publishes, and labelled with the ``rank``."""


PROXY_METRICS = _metrics_of("proxy")
"""Read from the counters of a proxy, without labels."""

REPLICA_METRICS = _metrics_of("replica")
"""Read from the counters of each replica behind a proxy, and labelled with its ``engine`` and ``rank``."""


def render_markdown() -> str:
    """Return the catalogue of schedulers as Markdown: one heading and one table per group."""
    lines: list[str] = []
    for group in METRIC_GROUPS:
        if group.stats_kind in ("step", "collector"):
            lines += ["", f"## {group.title}", ""]
            lines += ["| Metric | Kind | Unit | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
            lines += map(_row, group.metrics)
    lines += ["", "## For Kubernetes' gateway", ""]
    lines += ["| Metric | Kind | Labels | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    for info in INFO_METRICS:
        labels = ", ".join(f"`{label}`" for label, _ in info.labels)
        name = f"`{VLLM_PREFIX}{info.name}`"
        lines.append(f"| `{SGLANG_PREFIX}{info.name}` | gauge | {labels} | {info.help} | {name} |")
    lines += ["", "## States", ""]
    lines += ["| Metric | Kind | Label and its values | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    for state in STATE_METRICS:
        values = f"`{state.label}`: " + ", ".join(f"`{each}`" for each, _ in state.flags)
        name = f"`{VLLM_PREFIX}{state.name}`"
        lines.append(f"| `{SGLANG_PREFIX}{state.name}` | gauge | {values} | {state.help} | {name} |")
    return "\n".join(lines[1:]) + "\n"


def _row(metric: Metric) -> str:
    vllm_names = ", ".join(f"`{VLLM_PREFIX}{name}`" for name in metric.vllm_names)
    return f"| `{SGLANG_PREFIX}{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} | {vllm_names} |"


def render_stream_markdown() -> str:
    """Return the Markdown tables of followed, relayed and logged streams, and of proxies."""
    titled = (
        ("Relayed streams", RELAY_METRICS),
        ("Streams written to a broker", LOG_METRICS),
        ("Requests of a proxy", PROXY_METRICS),
        ("Replicas of a proxy", REPLICA_METRICS),
    )
    others = "".join(f"\n## {title}\n\n{_plain_table(metrics)}" for title, metrics in titled)
    return f"{_plain_table((STREAM_STATE_METRIC, *STREAM_METRICS))}{others}"


def _plain_table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| Metric | Kind | Unit | Meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} |" for metric in metrics]
    return "\n".join(lines) + "\n"
