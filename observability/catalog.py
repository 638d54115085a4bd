"""One row of the metric catalogue, and where its value stands in a step's statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

from scheduler_components import HistogramSnapshot, SchedulerStats

__all__ = [
    "Metric",
    "counter",
    "gauge",
    "histogram",
    "HICACHE_METRICS",
    "OUTPUT_METRICS",
    "CATALOG",
    "EVERY_METRIC",
    "HISTOGRAMS",
    "LOAD_AGE",
    "PAGES_UNREAD",
    "RANKS_REFUSED",
    "SGLANG_PREFIX",
    "VLLM_PREFIX",
    "render_markdown",
    "STREAM_CATALOG",
    "STREAM_PREFIX",
    "STREAM_STATE",
    "render_stream_markdown",
]


@attrs.frozen(kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: without prefix; a counter's ends in ``_total``.
        kind: a gauge moves both ways; a counter only grows, except that a restarted rank begins at 0 again; a
            histogram is counters of values in buckets.
        unit: of the value, in words.
        help: one sentence for a person.
        path: where ``SchedulerStats`` holds the value, for example ``load.num_running_reqs``; empty for the few
            that a sink knows by itself.
        vllm_names: vLLM's names of the same fact, without prefix.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    help: str
    path: str
    vllm_names: tuple[str, ...] = ()

    def read(self, stats: SchedulerStats) -> float | None:
        """Return the value in ``stats``; None where the engine has no such part (no LoRA, no disaggregation)."""
        value = self._find(stats)
        assert value is None or isinstance(value, int | float), f"{self.path} is {value!r}"
        return value

    def read_histogram(self, stats: SchedulerStats) -> HistogramSnapshot | None:
        """Return the histogram in ``stats``, for the metrics that are one; None where the engine keeps none."""
        value = self._find(stats)
        assert value is None or isinstance(value, HistogramSnapshot), f"{self.path} is {value!r}"
        return value

    def _find(self, stats: SchedulerStats) -> object:
        value: object = stats
        for attribute in self.path.split("."):
            value = getattr(value, attribute)
            if value is None:
                return None
        return value


def gauge(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    """Make the row of a gauge."""
    return Metric(name=name, kind="gauge", unit=unit, help=help, path=path, vllm_names=vllm_names)


def counter(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    """Make the row of a counter."""
    return Metric(name=name, kind="counter", unit=unit, help=help, path=path, vllm_names=vllm_names)


def histogram(name: str, path: str, help: str, *vllm_names: str) -> Metric:
    """Make the row of a histogram of times."""
    return Metric(name=name, kind="histogram", unit="seconds", help=help, path=path, vllm_names=vllm_names)


# The rows of the metric catalogue about the hierarchical cache: where prompts were found, what moved between tiers.
#
# SGLang's metrics of its hierarchical cache count tokens; these count pages, under names of their own. ``page_size``
# makes one of the other.


def _row(name: str, unit: str, field: str, help: str) -> Metric:
    return counter(f"hicache_{name}_total", unit, f"totals.tiers.{field}", help)


HICACHE_METRICS: tuple[Metric, ...] = (
    _row("prompt_tokens", "tokens", "prompt_tokens", "Input tokens of requests at their first admission."),
    _row("device_hit_tokens", "tokens", "device_hit_tokens", "The part of them that was cached on the device."),
    _row(
        "host_hit_tokens", "tokens", "host_hit_tokens", "The part of them that was on the host, and loaded from there."
    ),
    _row(
        "storage_hit_tokens",
        "tokens",
        "storage_hit_tokens",
        "The part of them that was in storage, and read from there.",
    ),
    _row("pages_written", "pages", "pages_written", "Pages copied to the host."),
    _row("pages_not_written", "pages", "pages_not_written", "Copies to the host given up: no room, or a failure."),
    _row("pages_loaded", "pages", "pages_loaded", "Pages copied back to the device."),
    _row("pages_not_loaded", "pages", "pages_not_loaded", "Copies back given up after a failure on some rank."),
    _row("pages_backed_up", "pages", "pages_backed_up", "Pages written to storage."),
    _row(
        "pages_not_backed_up",
        "pages",
        "pages_not_backed_up",
        "Writes to storage given up: too many under way, or a failure.",
    ),
    _row("pages_prefetched", "pages", "pages_prefetched", "Pages read from storage and put in the cache."),
    _row("pages_revoked", "pages", "pages_revoked", "Pages found in storage and then not put in the cache."),
    _row("prefetches", "prefetches", "prefetches", "Reads from storage begun."),
    _row("prefetches_revoked", "prefetches", "prefetches_revoked", "The part of them that ended without a page."),
    _row("pages_dropped", "pages", "pages_dropped", "Pages evicted from the device without a copy on the host."),
)
"""One row for each field of ``TierStats``; without a hierarchical cache none of them is exported."""


# The rows of the metric catalogue about outputs: what was sent to the receiver, what waits for it, what it never got.
#
# Paths are fields of ``OutputStats``. Each metric is labelled with ``ParallelState.metric_labels``, as a step's are.

OUTPUT_METRICS: tuple[Metric, ...] = (
    counter("output_batches_sent_total", "messages", "batches_sent", "Messages of outputs that the receiver took."),
    counter("output_deltas_sent_total", "deltas", "deltas_sent", "News of single requests in them."),
    counter("output_tokens_sent_total", "tokens", "tokens_sent", "Generated tokens in them."),
    counter(
        "output_steps_delayed_total",
        "steps",
        "steps_delayed",
        "Steps whose outputs had to wait, because the receiver was behind.",
    ),
    gauge("output_requests_waiting", "requests", "requests_waiting", "Requests in flight whose outputs wait."),
    gauge("output_ends_held", "requests", "ends_held", "Requests that are over and whose last outputs wait."),
    gauge("output_bytes_held", "bytes", "bytes_held", "Bytes that these outputs take."),
    counter(
        "output_ends_dropped_total",
        "requests",
        "ends_dropped",
        "Requests whose end the receiver was never told: more were over than may be held.",
    ),
    counter("output_tokens_dropped_total", "tokens", "tokens_dropped", "Generated tokens that it was never told."),
)
"""One row for each field of ``OutputStats``, apart from a step's report: a scrape reads them, no step does."""


# The one table of metrics: what each is called, what it means, and where in a step's statistics it stands.
#
# Names are SGLang's where SGLang (0.5.23) has the fact, and follow its habits where it has not, so that dashboards
# and
# routers written for SGLang read them. ``vllm_names`` are what vLLM (0.33.0) calls the same fact. A sink exports what
# stands here and nothing else; ``output_catalog`` has what is read from streamers beside it.

SGLANG_PREFIX = "sglang:"
VLLM_PREFIX = "vllm:"


_LOAD = (
    gauge("num_running_reqs", "requests", "load.num_running_reqs", "Running requests.", "num_requests_running"),
    gauge("num_queue_reqs", "requests", "load.num_waiting_reqs", "Waiting requests.", "num_requests_waiting"),
    gauge("token_usage", "share", "load.token_usage", "KV tokens in use / capacity, 0 to 1.", "kv_cache_usage_perc"),
    gauge("gen_throughput", "tokens/s", "load.gen_throughput", "Generated tokens a second, recently."),
    gauge("cache_hit_rate", "share", "load.cache_hit_rate", "Cached / input tokens, recently, 0 to 1."),
    gauge("utilization", "share", "load.utilization", "The fuller of request slots and KV tokens, 0 to 1."),
    gauge("num_used_tokens", "tokens", "load.num_used_tokens", "KV tokens that running requests hold."),
    gauge("num_pending_tokens", "tokens", "load.num_pending_tokens", "Input tokens that wait for prefill."),
    gauge(
        "num_waiting_uncached_tokens",
        "tokens",
        "load.num_waiting_uncached_tokens",
        "Input tokens that wait for prefill and that no cached prefix covers.",
    ),
    gauge("num_total_tokens", "tokens", "load.num_total_tokens", "KV tokens in use plus pending tokens."),
    gauge("max_total_num_tokens", "tokens", "load.max_total_num_tokens", "Capacity of the KV pool."),
    gauge("page_size", "tokens", "load.page_size", "Tokens a page of the KV pool."),
    gauge("max_running_requests", "requests", "load.max_running_requests", "Request slots."),
    gauge("load_sequence", "reports", "load.sequence", "Number of the load snapshot that the gauges are from."),
)

_SPECIAL_QUEUES = (
    gauge("num_grammar_queue_reqs", "requests", "load.queues.grammar", "Requests that wait for their grammar."),
    gauge("num_paused_reqs", "requests", "load.queues.paused", "Paused requests."),
    gauge("num_retracted_reqs", "requests", "load.queues.retracted", "Retracted requests that wait to run again."),
)

_DISAGGREGATION = (
    gauge(
        "num_prefill_bootstrap_queue_reqs",
        "requests",
        "load.disaggregation.prefill_bootstrap_queue_reqs",
        "Prefill instance: requests that wait for their decode peer.",
    ),
    gauge(
        "num_prefill_inflight_queue_reqs",
        "requests",
        "load.disaggregation.prefill_inflight_queue_reqs",
        "Prefill instance: requests whose KV is being sent.",
    ),
    gauge(
        "num_decode_prealloc_queue_reqs",
        "requests",
        "load.disaggregation.decode_prealloc_queue_reqs",
        "Decode instance: requests that wait for pages.",
    ),
    gauge(
        "num_decode_transfer_queue_reqs",
        "requests",
        "load.disaggregation.decode_transfer_queue_reqs",
        "Decode instance: requests whose KV is being received.",
    ),
    gauge(
        "num_decode_retracted_queue_reqs",
        "requests",
        "load.disaggregation.decode_retracted_queue_reqs",
        "Decode instance: retracted requests.",
    ),
    gauge("kv_transfer_speed_gb_s", "GB/s", "load.disaggregation.kv_transfer_speed_gb_s", "Speed of KV transfers."),
    gauge("kv_transfer_latency_ms", "ms", "load.disaggregation.kv_transfer_latency_ms", "Latency of KV transfers."),
)

_ENGINE_PARTS = (
    gauge("lora_pool_slots_used", "slots", "load.lora.slots_used", "LoRA adapter slots in use."),
    gauge("lora_pool_slots_total", "slots", "load.lora.slots_total", "LoRA adapter slots."),
    gauge("lora_pool_utilization", "share", "load.lora.utilization", "LoRA adapter slots in use / all, 0 to 1."),
    gauge("spec_accept_length", "tokens", "load.speculative.accept_length", "Accepted tokens a verification step."),
    gauge("spec_accept_rate", "share", "load.speculative.accept_rate", "Accepted / drafted tokens, 0 to 1."),
    gauge("weight_memory_usage_gb", "GB", "load.memory.weight_gb", "Device memory of the weights."),
    gauge("kv_cache_memory_usage_gb", "GB", "load.memory.kv_cache_gb", "Device memory of the KV pool."),
    gauge("graph_memory_usage_gb", "GB", "load.memory.graph_gb", "Device memory of captured graphs."),
)

_TOTALS = (
    counter("num_requests_total", "requests", "totals.num_requests_total", "Requests accepted."),
    counter("num_aborted_requests_total", "requests", "totals.num_aborted_requests_total", "Requests aborted."),
    counter(
        "num_retracted_requests_total",
        "retractions",
        "totals.num_retractions_total",
        "Retractions of running requests because the KV pool was full.",
        "num_preemptions_total",
    ),
    counter(
        "prompt_tokens_total",
        "tokens",
        "totals.prompt_tokens_total",
        "Input tokens of requests that were prefilled.",
        "prompt_tokens_total",
        "prefix_cache_queries_total",
    ),
    counter(
        "cached_tokens_total",
        "tokens",
        "totals.cached_tokens_total",
        "The part of them that a cached prefix covered.",
        "prefix_cache_hits_total",
    ),
    counter(
        "generation_tokens_total",
        "tokens",
        "totals.generation_tokens_total",
        "Generated tokens.",
        "generation_tokens_total",
    ),
    counter("evicted_tokens_total", "tokens", "totals.evicted_tokens_total", "Cached tokens evicted for others."),
    counter(
        "prefill_uncached_tokens_total",
        "tokens",
        "load.total_prefill_uncached_tokens",
        "Tokens that prefill has computed, as load reports count them.",
    ),
    counter(
        "prefill_busy_us_total", "microseconds", "load.total_prefill_busy_us", "Time of the steps that computed them."
    ),
)

_PUBLISHER = (
    counter("kv_events_batches_sent_total", "batches", "publisher.batches_sent", "KV-event batches sent."),
    counter("kv_events_sent_total", "events", "publisher.events_sent", "KV events sent."),
    counter("kv_events_bytes_sent_total", "bytes", "publisher.bytes_sent", "Bytes of KV-event batches sent."),
    counter("kv_events_refused_total", "events", "publisher.events_refused", "KV events that could not be encoded."),
    counter(
        "kv_events_batches_dropped_total",
        "batches",
        "publisher.batches_dropped",
        "KV-event batches accepted and not sent: an overflow, a shutdown or a failing publisher.",
    ),
    counter(
        "kv_events_batches_collapsed_total",
        "batches",
        "publisher.batches_collapsed",
        "KV-event batches merged into one because too many were pending; nothing is lost by it.",
    ),
    counter("kv_events_replays_served_total", "replays", "publisher.replays_served", "Replay answers finished."),
    counter("kv_events_batches_replayed_total", "batches", "publisher.batches_replayed", "Batches in them."),
    counter("kv_events_replays_refused_total", "replays", "publisher.replays_refused", "Replay requests refused."),
    counter(
        "kv_events_replays_truncated_total",
        "replays",
        "publisher.replays_truncated",
        "Replay answers cut before their end: the client left or was too slow, or the publisher closed.",
    ),
    counter(
        "kv_events_subscribers_seen_total",
        "connections",
        "publisher.subscribers_seen",
        "Connections of subscribers to the live stream.",
    ),
    counter(
        "kv_events_peers_refused_total",
        "connections",
        "publisher.peers_refused",
        "Connections refused: no or wrong keys, or no ZeroMQ peer.",
    ),
    gauge("kv_events_replays_open", "replays", "publisher.replays_open", "Replay answers being sent."),
    gauge("kv_events_batches_buffered", "batches", "publisher.batches_buffered", "Batches kept for replay."),
    gauge("kv_events_bytes_buffered", "bytes", "publisher.bytes_buffered", "Bytes kept for replay."),
    gauge("kv_events_batches_pending", "batches", "publisher.batches_pending", "Batches accepted and not yet sent."),
    gauge("kv_events_blocks_in_base", "blocks", "publisher.blocks_in_base", "Standing blocks of older batches."),
    gauge("kv_events_lag_seconds", "seconds", "publisher.lag_s", "Age of the oldest batch not yet sent."),
    gauge("kv_events_last_sequence", "sequence", "publisher.last_sequence", "Number of the last batch sent, or -1."),
    gauge(
        "kv_events_open_bind_without_auth",
        "flag",
        "publisher.open_bind_without_auth",
        "1 when the stream listens beyond loopback without authentication.",
    ),
)

CATALOG: tuple[Metric, ...] = (
    *_LOAD,
    *_SPECIAL_QUEUES,
    *_DISAGGREGATION,
    *_ENGINE_PARTS,
    *_TOTALS,
    *HICACHE_METRICS,
    *_PUBLISHER,
)
"""Every metric that is read from a step's ``SchedulerStats``. Each is labelled with ``ParallelState.metric_labels``."""

HISTOGRAMS: tuple[Metric, ...] = (
    histogram(
        "time_to_first_token_seconds",
        "totals.latencies.time_to_first_token",
        "From the first queueing to the first token.",
        "time_to_first_token_seconds",
    ),
    histogram(
        "inter_token_latency_seconds",
        "totals.latencies.inter_token",
        "Between tokens; tokens that come together share their interval.",
        "inter_token_latency_seconds",
    ),
    histogram(
        "e2e_request_latency_seconds",
        "totals.latencies.e2e",
        "From the first queueing to the end of a request.",
        "e2e_request_latency_seconds",
    ),
    histogram(
        "queue_time_seconds",
        "totals.latencies.queue",
        "In the queue before the first prefill.",
        "request_queue_time_seconds",
    ),
    histogram(
        "prefill_time_seconds",
        "totals.latencies.prefill",
        "In prefill, over all prefills of a request.",
        "request_prefill_time_seconds",
    ),
    histogram(
        "decode_time_seconds",
        "totals.latencies.decode",
        "In decode, over all decodes of a request.",
        "request_decode_time_seconds",
    ),
)
"""Times of requests, where the engine keeps them; labelled as ``CATALOG`` is, and by the bucket's bound."""

LOAD_AGE = gauge("load_age_seconds", "seconds", "", "Age of the load snapshot that the gauges are from.")
"""What a sink knows at the time of a scrape: a rank that has stopped reporting shows as a growing age."""

RANKS_REFUSED = counter("metrics_reports_refused_total", "reports", "", "Reports of ranks beyond the sink's limit.")
"""What a sink did not store, because ranks it did not know came after the last it has room for."""


PAGES_UNREAD = counter(
    "metrics_pages_unread_total",
    "reads",
    "",
    "Reads of a rank's page of metrics that found no whole report: none is written yet, or the page was refused.",
)
"""What a ``PrometheusBoard`` knows beside: the ranks behind these reads show their last values, or nothing."""

EVERY_METRIC: tuple[Metric, ...] = (*CATALOG, *HISTOGRAMS, *OUTPUT_METRICS, LOAD_AGE, RANKS_REFUSED, PAGES_UNREAD)
"""What the documentation lists and the dashboard may draw; streams that are followed have a catalogue of their own."""


def render_markdown(metrics: Iterable[Metric] = EVERY_METRIC) -> str:
    """Return the catalogue as a Markdown table, for the documentation."""
    lines = ["| Metric | Kind | Unit | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    for metric in metrics:
        vllm_names = ", ".join(f"`{VLLM_PREFIX}{name}`" for name in metric.vllm_names)
        lines.append(
            f"| `{SGLANG_PREFIX}{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} | {vllm_names} |"
        )
    return "\n".join(lines) + "\n"


# The table of metrics about followed streams: what whoever follows a worker's events exports of its own recovery.
#
# Paths are fields of ``StreamStats``. Each metric is labelled with the stream's ``rank``.

STREAM_PREFIX = "kv_stream_"


def _metric(kind: Literal["gauge", "counter"], name: str, unit: str, path: str, help: str) -> Metric:
    return Metric(name=f"{STREAM_PREFIX}{name}", kind=kind, unit=unit, help=help, path=path)


STREAM_STATE = _metric(
    "gauge", "state", "flag", "state", "1 for the state that the stream is in (label state), 0 for the others."
)

STREAM_CATALOG = (
    _metric("gauge", "is_extended", "flag", "is_extended", "1 when the publisher's digest proves the view."),
    _metric("gauge", "last_sequence", "sequence", "last_seq", "Number of the last batch that the view has."),
    _metric("gauge", "blocks_held", "blocks", "blocks_held", "Blocks in the view, over all tiers."),
    _metric("gauge", "lag_seconds", "seconds", "lag_s", "Receive time minus the time stamp of the last live batch."),
    _metric("counter", "batches_total", "batches", "batches", "Batches and chunks of snapshots applied."),
    _metric("counter", "events_total", "events", "events", "Events in them."),
    _metric("counter", "blocks_stored_total", "blocks", "blocks_stored", "Blocks stored by them."),
    _metric("counter", "blocks_removed_total", "blocks", "blocks_removed", "Blocks removed by them."),
    _metric("counter", "gaps_total", "gaps", "gaps", "Times that a live batch did not follow on the one before."),
    _metric("counter", "batches_recovered_total", "batches", "recovered", "Batches that came by replay."),
    _metric("counter", "losses_total", "losses", "losses", "Times that the stream became partial."),
    _metric("counter", "restarts_total", "restarts", "restarts", "Times that the publisher turned out to be another."),
    _metric("counter", "verified_total", "proofs", "verified", "Times that the publisher's digest agreed."),
    _metric("counter", "splices_total", "splices", "splices", "Times that it did not, and all began anew."),
    _metric("counter", "snapshots_total", "snapshots", "snapshots", "Views that were swapped in whole."),
    _metric("counter", "duplicates_total", "batches", "duplicates", "Batches at or below the last applied number."),
    _metric("counter", "replays_asked_total", "questions", "replays_asked", "Questions to the replay channel."),
    _metric(
        "counter", "replays_unanswered_total", "questions", "replays_unanswered", "The part without an end in time."
    ),
    _metric("counter", "replays_cut_total", "questions", "replays_cut", "Extended answers that led no further."),
    _metric("counter", "disconnects_total", "connections", "disconnects", "Times that the live connection was lost."),
    _metric("counter", "decode_errors_total", "errors", "decode_errors", "Batches or single events not readable."),
    _metric("counter", "bad_frames_total", "messages", "bad_frames", "Messages that are not frames of this wire."),
    _metric("counter", "rank_mismatches_total", "batches", "rank_mismatches", "Batches that name another rank."),
    _metric("counter", "unknown_removals_total", "blocks", "unknown_removals", "Removed blocks that were not held."),
    _metric("counter", "unknown_media_total", "events", "unknown_media", "Events that name an unknown medium."),
)


def render_stream_markdown() -> str:
    """Return the table as Markdown, for the documentation."""
    lines = ["| Metric | Kind | Unit | Meaning |", "| --- | --- | --- | --- |"]
    for metric in (STREAM_STATE, *STREAM_CATALOG):
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} |")
    return "\n".join(lines) + "\n"
