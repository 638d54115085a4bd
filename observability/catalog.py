"""The one table of metrics: what each is called, what it means, and where in a step's statistics it stands.

Names are SGLang's where SGLang (0.5.23) has the fact, and follow its habits where it has not, so that dashboards and
routers written for SGLang read them. ``vllm_names`` are what vLLM (0.33.0) calls the same fact. A sink exports what
stands here and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

from scheduler_components.metrics.stats import SchedulerStats

__all__ = ["CATALOG", "LOAD_AGE", "RANKS_REFUSED", "SGLANG_PREFIX", "VLLM_PREFIX", "Metric", "render_markdown"]

SGLANG_PREFIX = "sglang:"
VLLM_PREFIX = "vllm:"


@attrs.frozen(kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: without prefix; a counter's ends in ``_total``.
        kind: a gauge moves both ways; a counter only grows, except that a restarted rank begins at 0 again.
        unit: of the value, in words.
        help: one sentence for a person.
        path: where ``SchedulerStats`` holds the value, for example ``load.num_running_reqs``; empty for the few
            that a sink knows by itself.
        vllm_names: vLLM's names of the same fact, without prefix.
    """

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    help: str
    path: str
    vllm_names: tuple[str, ...] = ()

    def read(self, stats: SchedulerStats) -> float | None:
        """Return the value in ``stats``; None where the engine has no such part (no LoRA, no disaggregation)."""
        value: object = stats
        for attribute in self.path.split("."):
            value = getattr(value, attribute)
            if value is None:
                return None
        assert isinstance(value, int | float), f"{self.path} is {value!r}"
        return value


def _gauge(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, help=help, path=path, vllm_names=vllm_names)


def _counter(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="counter", unit=unit, help=help, path=path, vllm_names=vllm_names)


_LOAD = (
    _gauge("num_running_reqs", "requests", "load.num_running_reqs", "Running requests.", "num_requests_running"),
    _gauge("num_queue_reqs", "requests", "load.num_waiting_reqs", "Waiting requests.", "num_requests_waiting"),
    _gauge("token_usage", "share", "load.token_usage", "KV tokens in use / capacity, 0 to 1.", "kv_cache_usage_perc"),
    _gauge("gen_throughput", "tokens/s", "load.gen_throughput", "Generated tokens a second, recently."),
    _gauge("cache_hit_rate", "share", "load.cache_hit_rate", "Cached / input tokens, recently, 0 to 1."),
    _gauge("utilization", "share", "load.utilization", "The fuller of request slots and KV tokens, 0 to 1."),
    _gauge("num_used_tokens", "tokens", "load.num_used_tokens", "KV tokens that running requests hold."),
    _gauge("num_pending_tokens", "tokens", "load.num_pending_tokens", "Input tokens that wait for prefill."),
    _gauge(
        "num_waiting_uncached_tokens",
        "tokens",
        "load.num_waiting_uncached_tokens",
        "Input tokens that wait for prefill and that no cached prefix covers.",
    ),
    _gauge("num_total_tokens", "tokens", "load.num_total_tokens", "KV tokens in use plus pending tokens."),
    _gauge("max_total_num_tokens", "tokens", "load.max_total_num_tokens", "Capacity of the KV pool."),
    _gauge("page_size", "tokens", "load.page_size", "Tokens a page of the KV pool."),
    _gauge("max_running_requests", "requests", "load.max_running_requests", "Request slots."),
    _gauge("load_sequence", "reports", "load.sequence", "Number of the load snapshot that the gauges are from."),
)

_SPECIAL_QUEUES = (
    _gauge("num_grammar_queue_reqs", "requests", "load.queues.grammar", "Requests that wait for their grammar."),
    _gauge("num_paused_reqs", "requests", "load.queues.paused", "Paused requests."),
    _gauge("num_retracted_reqs", "requests", "load.queues.retracted", "Retracted requests that wait to run again."),
)

_DISAGGREGATION = (
    _gauge(
        "num_prefill_bootstrap_queue_reqs",
        "requests",
        "load.disaggregation.prefill_bootstrap_queue_reqs",
        "Prefill instance: requests that wait for their decode peer.",
    ),
    _gauge(
        "num_prefill_inflight_queue_reqs",
        "requests",
        "load.disaggregation.prefill_inflight_queue_reqs",
        "Prefill instance: requests whose KV is being sent.",
    ),
    _gauge(
        "num_decode_prealloc_queue_reqs",
        "requests",
        "load.disaggregation.decode_prealloc_queue_reqs",
        "Decode instance: requests that wait for pages.",
    ),
    _gauge(
        "num_decode_transfer_queue_reqs",
        "requests",
        "load.disaggregation.decode_transfer_queue_reqs",
        "Decode instance: requests whose KV is being received.",
    ),
    _gauge(
        "num_decode_retracted_queue_reqs",
        "requests",
        "load.disaggregation.decode_retracted_queue_reqs",
        "Decode instance: retracted requests.",
    ),
    _gauge("kv_transfer_speed_gb_s", "GB/s", "load.disaggregation.kv_transfer_speed_gb_s", "Speed of KV transfers."),
    _gauge("kv_transfer_latency_ms", "ms", "load.disaggregation.kv_transfer_latency_ms", "Latency of KV transfers."),
)

_ENGINE_PARTS = (
    _gauge("lora_pool_slots_used", "slots", "load.lora.slots_used", "LoRA adapter slots in use."),
    _gauge("lora_pool_slots_total", "slots", "load.lora.slots_total", "LoRA adapter slots."),
    _gauge("lora_pool_utilization", "share", "load.lora.utilization", "LoRA adapter slots in use / all, 0 to 1."),
    _gauge("spec_accept_length", "tokens", "load.speculative.accept_length", "Accepted tokens a verification step."),
    _gauge("spec_accept_rate", "share", "load.speculative.accept_rate", "Accepted / drafted tokens, 0 to 1."),
    _gauge("weight_memory_usage_gb", "GB", "load.memory.weight_gb", "Device memory of the weights."),
    _gauge("kv_cache_memory_usage_gb", "GB", "load.memory.kv_cache_gb", "Device memory of the KV pool."),
    _gauge("graph_memory_usage_gb", "GB", "load.memory.graph_gb", "Device memory of captured graphs."),
)

_TOTALS = (
    _counter("num_requests_total", "requests", "totals.num_requests_total", "Requests accepted."),
    _counter("num_aborted_requests_total", "requests", "totals.num_aborted_requests_total", "Requests aborted."),
    _counter(
        "num_retracted_requests_total",
        "retractions",
        "totals.num_retractions_total",
        "Retractions of running requests because the KV pool was full.",
        "num_preemptions_total",
    ),
    _counter(
        "prompt_tokens_total",
        "tokens",
        "totals.prompt_tokens_total",
        "Input tokens of requests that were prefilled.",
        "prompt_tokens_total",
        "prefix_cache_queries_total",
    ),
    _counter(
        "cached_tokens_total",
        "tokens",
        "totals.cached_tokens_total",
        "The part of them that a cached prefix covered.",
        "prefix_cache_hits_total",
    ),
    _counter(
        "generation_tokens_total",
        "tokens",
        "totals.generation_tokens_total",
        "Generated tokens.",
        "generation_tokens_total",
    ),
    _counter("evicted_tokens_total", "tokens", "totals.evicted_tokens_total", "Cached tokens evicted for others."),
)

_PUBLISHER = (
    _counter("kv_events_batches_sent_total", "batches", "publisher.batches_sent", "KV-event batches sent."),
    _counter("kv_events_sent_total", "events", "publisher.events_sent", "KV events sent."),
    _counter("kv_events_bytes_sent_total", "bytes", "publisher.bytes_sent", "Bytes of KV-event batches sent."),
    _counter("kv_events_refused_total", "events", "publisher.events_refused", "KV events that could not be encoded."),
    _counter(
        "kv_events_batches_dropped_total",
        "batches",
        "publisher.batches_dropped",
        "KV-event batches accepted and not sent: an overflow, a shutdown or a failing publisher.",
    ),
    _counter("kv_events_replays_served_total", "replays", "publisher.replays_served", "Replay answers finished."),
    _counter("kv_events_batches_replayed_total", "batches", "publisher.batches_replayed", "Batches in them."),
    _counter("kv_events_replays_refused_total", "replays", "publisher.replays_refused", "Replay requests refused."),
    _gauge("kv_events_batches_buffered", "batches", "publisher.batches_buffered", "Batches kept for replay."),
    _gauge("kv_events_bytes_buffered", "bytes", "publisher.bytes_buffered", "Bytes kept for replay."),
    _gauge("kv_events_batches_pending", "batches", "publisher.batches_pending", "Batches accepted and not yet sent."),
    _gauge("kv_events_last_sequence", "sequence", "publisher.last_sequence", "Number of the last batch sent, or -1."),
    _gauge(
        "kv_events_open_bind_without_auth",
        "flag",
        "publisher.open_bind_without_auth",
        "1 when the stream listens beyond loopback without authentication.",
    ),
)

CATALOG: tuple[Metric, ...] = (*_LOAD, *_SPECIAL_QUEUES, *_DISAGGREGATION, *_ENGINE_PARTS, *_TOTALS, *_PUBLISHER)
"""Every metric that is read from a step's ``SchedulerStats``. Each is labelled with ``ParallelState.metric_labels``."""

LOAD_AGE = _gauge("load_age_seconds", "seconds", "", "Age of the load snapshot that the gauges are from.")
"""What a sink knows at the time of a scrape: a rank that has stopped reporting shows as a growing age."""

RANKS_REFUSED = _counter("metrics_reports_refused_total", "reports", "", "Reports of ranks beyond the sink's limit.")
"""What a sink did not store, because ranks it did not know came after the last it has room for."""


def render_markdown(metrics: Iterable[Metric] = (*CATALOG, LOAD_AGE, RANKS_REFUSED)) -> str:
    """Return the catalogue as a Markdown table, for the documentation."""
    lines = ["| Metric | Kind | Unit | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    for metric in metrics:
        vllm_names = ", ".join(f"`{VLLM_PREFIX}{name}`" for name in metric.vllm_names)
        lines.append(
            f"| `{SGLANG_PREFIX}{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} | {vllm_names} |"
        )
    return "\n".join(lines) + "\n"
