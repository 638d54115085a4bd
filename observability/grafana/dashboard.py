"""The Grafana dashboard of the catalogue: ``python -m observability.grafana.dashboard`` writes ``dashboard.json``.

``ROWS`` places metrics in panels. The last row draws all others, one panel per group of the catalogue. Unit, help and
query of each metric follow from the catalogue. The metrics of followed streams come from readers, which are other
processes than the schedulers, so a variable of their own selects them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from observability.catalog import ALL_METRICS, METRIC_GROUPS, SGLANG_PREFIX, STREAM_METRICS, STREAM_STATE_METRIC, Metric

__all__ = [
    "DASHBOARD_FILE",
    "render_dashboard",
]


@attrs.frozen
class Panel:
    """One panel: its title, the catalogue names of its metrics, and its width in the grid of 24."""

    title: str
    metrics: tuple[str, ...]
    width: int = 8


@attrs.frozen
class Row:
    """Panels under one heading. A closed row sends no query until a user opens it."""

    title: str
    panels: tuple[Panel, ...]
    is_open: bool = False


ROWS = (
    Row(
        "Load",
        (
            Panel("Running requests, and slots", ("num_running_reqs", "max_running_requests")),
            Panel("Waiting requests", ("num_queue_reqs",)),
            Panel("KV tokens in use", ("token_usage",)),
            Panel("Prefix cache hit rate", ("cache_hit_rate",)),
            Panel("Generated tokens per second", ("gen_throughput",)),
            Panel("Age of the load report", ("load_age_seconds",)),
        ),
        is_open=True,
    ),
    Row(
        "Latency",
        (
            Panel("Time to first token", ("time_to_first_token_seconds",)),
            Panel("Between tokens", ("inter_token_latency_seconds",)),
            Panel("End to end", ("e2e_request_latency_seconds",)),
            Panel("In the queue", ("queue_time_seconds",)),
            Panel("In prefill", ("prefill_time_seconds",)),
            Panel("In decode", ("decode_time_seconds",)),
        ),
        is_open=True,
    ),
    Row(
        "Work",
        (
            Panel("Tokens waiting for prefill", ("num_pending_tokens", "num_waiting_uncached_tokens")),
            Panel("KV pool", ("num_used_tokens", "num_total_tokens", "max_total_num_tokens")),
            Panel("Fuller of slots and tokens", ("utilization",)),
            Panel("Requests per second", ("num_requests_total", "num_aborted_requests_total")),
            Panel("Prompt tokens per second", ("prompt_tokens_total", "cached_tokens_total")),
            Panel("Tokens per second", ("generation_tokens_total", "prefill_uncached_tokens_total")),
            Panel("Retractions per second", ("num_retracted_requests_total", "preemptions_per_second")),
            Panel("Decode steps, and their tokens, per second", ("decode_steps_total", "decode_step_tokens_total")),
            Panel("Evicted tokens per second", ("evicted_tokens_total",)),
            Panel(
                "Requests admitted, refused and repeated per second",
                (
                    "intake_requests_admitted_total",
                    "intake_requests_refused_total",
                    "intake_requests_repeated_total",
                ),
            ),
            Panel(
                "Receives and skipped receives per second",
                ("intake_receives_total", "intake_receives_skipped_total"),
            ),
            Panel("Requests held while input is blocked", ("intake_requests_held",)),
            Panel("Unreadable messages per second", ("intake_messages_unreadable_total",)),
            Panel("Held back requests", ("num_grammar_queue_reqs", "num_paused_reqs", "num_retracted_reqs")),
            Panel(
                "Metric reports refused, and pages unread, per second",
                ("metrics_reports_refused_total", "metrics_pages_unread_total"),
            ),
        ),
    ),
    Row(
        "Quiesce",
        (
            Panel("Paused", ("engine_paused",)),
            Panel("Pauses and flushes per second", ("engine_pauses_total", "cache_flushes_total")),
            Panel("Weight updates per second", ("weight_updates_total", "weight_rollbacks_total")),
            Panel("Control requests refused per second", ("engine_orders_refused_total",)),
        ),
    ),
    Row(
        "Pools",
        (
            Panel("Pages in use", ("max_pool_usage", "full_token_usage", "swa_token_usage", "mamba_usage")),
            Panel("KV tokens", ("kv_available_tokens", "kv_evictable_tokens", "kv_used_tokens")),
            Panel("KV tokens of sliding windows", ("swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens")),
            Panel("Mamba states", ("mamba_available_slots", "mamba_evictable_slots", "mamba_used_slots")),
            Panel("Pages held by sessions", ("session_held_pages",)),
            Panel("Open violations", ("integrity_problems_open",)),
            Panel("Violations and lost pages per second", ("integrity_problems_total", "integrity_pages_lost_total")),
            Panel(
                "Checks per second",
                ("integrity_checks_total", "integrity_censuses_total", "integrity_checks_failed_total"),
            ),
            Panel("Stalls per second", ("integrity_stalls_total",)),
            Panel(
                "Decisions per second",
                ("decisions_total", "decisions_unregistered_total", "decision_values_replaced_total"),
            ),
            Panel(
                "Divergences of ranks per second",
                ("decision_divergences_total", "decision_divergences_unknown_total"),
            ),
        ),
    ),
    Row(
        "Telemetry",
        (
            Panel(
                "Messages of forward-pass metrics per second",
                ("forward_passes_sent_total", "forward_pass_heartbeats_total", "forward_passes_failed_total"),
            ),
            Panel("Spans per second", ("request_spans_exported_total", "request_spans_dropped_total")),
            Panel("Spans waiting for their export", ("request_spans_pending",)),
            Panel("Invalid trace headers per second", ("trace_parents_refused_total",)),
        ),
    ),
    Row(
        "Batches",
        (
            Panel("New-token ratio", ("new_token_ratio",)),
            Panel(
                "Error of forecasts of first tokens",
                ("first_token_error_p50_seconds", "first_token_error_p90_seconds"),
            ),
            Panel("Forecasts per second", ("first_tokens_predicted_total",)),
            Panel(
                "DP attention: steps per second", ("dp_steps_total", "dp_idle_batches_total", "dp_eager_steps_total")
            ),
            Panel("DP attention: padded tokens per second", ("dp_padded_tokens_total",)),
            Panel(
                "DP attention: prefills delayed and forced, per second",
                ("dp_prefills_delayed_total", "dp_prefills_forced_total"),
            ),
        ),
    ),
    Row(
        "Hierarchical cache",
        (
            Panel(
                "Prompt tokens per second, by tier of their hits",
                (
                    "hicache_prompt_tokens_total",
                    "hicache_device_hit_tokens_total",
                    "hicache_host_hit_tokens_total",
                    "hicache_storage_hit_tokens_total",
                ),
                16,
            ),
            Panel("Pages lost by eviction per second", ("hicache_pages_dropped_total",)),
            Panel("Pages to the host per second", ("hicache_pages_written_total", "hicache_pages_not_written_total")),
            Panel("Pages to the device per second", ("hicache_pages_loaded_total", "hicache_pages_not_loaded_total")),
            Panel(
                "Pages to storage per second", ("hicache_pages_backed_up_total", "hicache_pages_not_backed_up_total")
            ),
            Panel("Pages from storage per second", ("hicache_pages_prefetched_total", "hicache_pages_revoked_total")),
            Panel("Prefetches per second", ("hicache_prefetches_total", "hicache_prefetches_revoked_total")),
        ),
    ),
    Row(
        "KV events",
        (
            Panel("Batches and events per second", ("kv_events_batches_sent_total", "kv_events_sent_total")),
            Panel("Bytes per second", ("kv_events_bytes_sent_total",)),
            Panel("Lag", ("kv_events_lag_seconds",)),
            Panel(
                "Batches lost, events refused, stalls, per second",
                ("kv_events_batches_dropped_total", "kv_events_refused_total", "kv_events_send_stalls_total"),
            ),
            Panel(
                "Batches pending, and collapsed per second",
                ("kv_events_batches_pending", "kv_events_batches_collapsed_total"),
            ),
            Panel("Last sequence", ("kv_events_last_sequence",)),
            Panel("Replays per second", ("kv_events_replays_served_total", "kv_events_batches_replayed_total")),
            Panel(
                "Replays cut or refused per second",
                ("kv_events_replays_truncated_total", "kv_events_replays_refused_total"),
            ),
            Panel("Replays open and waiting", ("kv_events_replays_open", "kv_events_replays_waiting")),
            Panel(
                "Batches in the replay buffer, blocks in the snapshot",
                ("kv_events_batches_buffered", "kv_events_blocks_in_base"),
            ),
            Panel("Bytes kept for replay", ("kv_events_bytes_buffered", "kv_events_bytes_in_base")),
            Panel(
                "Connections and refusals per second",
                ("kv_events_subscribers_seen_total", "kv_events_peers_refused_total"),
            ),
            Panel("Open to the network without keys", ("kv_events_open_bind_without_auth",)),
        ),
    ),
    Row(
        "Followed streams",
        (
            Panel("Age of the newest batch in the view", ("kv_stream_newest_batch_age_seconds",)),
            Panel("Lag of live batches", ("kv_stream_lag_seconds",)),
            Panel("State of the view", ("kv_stream_state",)),
            Panel("Batches and events per second", ("kv_stream_batches_total", "kv_stream_events_total")),
            Panel("Blocks in the view", ("kv_stream_blocks_held",)),
            Panel(
                "Blocks stored and removed per second",
                ("kv_stream_blocks_stored_total", "kv_stream_blocks_removed_total"),
            ),
            Panel(
                "Gaps and losses per second",
                ("kv_stream_gaps_total", "kv_stream_losses_total", "kv_stream_disconnects_total"),
            ),
            Panel(
                "Batches replayed, and snapshots, per second",
                ("kv_stream_batches_recovered_total", "kv_stream_snapshots_total"),
            ),
            Panel(
                "Unreadable batches and messages per second",
                ("kv_stream_decode_errors_total", "kv_stream_bad_frames_total"),
            ),
        ),
    ),
    Row(
        "Outputs",
        (
            Panel("Tokens sent per second", ("output_tokens_sent_total",)),
            Panel("Messages and updates sent per second", ("output_batches_sent_total", "output_deltas_sent_total")),
            Panel("Steps delayed per second", ("output_steps_delayed_total",)),
            Panel("Requests that wait for the receiver", ("output_requests_waiting", "output_ends_held")),
            Panel("Bytes held for the receiver", ("output_bytes_held",)),
            Panel("Ends and tokens dropped per second", ("output_ends_dropped_total", "output_tokens_dropped_total")),
        ),
    ),
    Row(
        "Engine parts",
        (
            Panel("Prefill instance", ("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs")),
            Panel(
                "Decode instance",
                (
                    "num_decode_prealloc_queue_reqs",
                    "num_decode_transfer_queue_reqs",
                    "num_decode_retracted_queue_reqs",
                ),
            ),
            Panel("KV transfer speed", ("kv_transfer_speed_gb_s",), 4),
            Panel("KV transfer latency", ("kv_transfer_latency_ms",), 4),
            Panel("LoRA slots", ("lora_pool_slots_used", "lora_pool_slots_total")),
            Panel("Speculation: accepted per step", ("spec_accept_length",), 4),
            Panel("Speculation: accepted share", ("spec_accept_rate",), 4),
            Panel("Device memory", ("weight_memory_usage_gb", "kv_cache_memory_usage_gb", "graph_memory_usage_gb")),
        ),
    ),
)


def _other_metrics() -> Row:
    """Return the row of the metrics that no panel of ``ROWS`` names."""
    drawn = {name for row in ROWS for panel in row.panels for name in panel.metrics}
    groups = [(group.title, tuple(metric.name for metric in group.metrics)) for group in METRIC_GROUPS]
    left = [(title, tuple(name for name in names if name in _METRICS and name not in drawn)) for title, names in groups]
    return Row("Other metrics", tuple(Panel(title, names) for title, names in left if names))


DASHBOARD_FILE = Path(__file__).with_name("dashboard.json")

Json: TypeAlias = dict[str, Any]

_OF_STREAMS = {metric.name: metric for metric in (STREAM_STATE_METRIC, *STREAM_METRICS)}
_METRICS = {metric.name: metric for metric in ALL_METRICS} | _OF_STREAMS

_SCHEMA_VERSION = 39
"""The schema of Grafana 11. Newer versions migrate older dashboards when they load them."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

_UNITS = {
    "share": "percentunit",
    "seconds": "s",
    "ms": "ms",
    "microseconds": "µs",
    "bytes": "decbytes",
    "GB": "decgbytes",
    "GB/s": "GBs",
}
"""Grafana's names of the catalogue's units; any other unit is a plain number."""

_RATE_UNITS = {"bytes": "Bps"}
"""The same for counters, which are drawn as rates."""

_WITHOUT_FLOOR = (
    ("kv_events_last_sequence",),  # a clock-based sequence would be a flat line far above 0
    ("kv_stream_newest_batch_age_seconds",),  # below 0 if the reader's clock is behind the publisher's
    ("kv_stream_lag_seconds",),
)
"""Panels whose axis does not begin at 0."""

_GRID_WIDTH = 24
_PANEL_HEIGHT = 8


def render_dashboard(prefix: str = SGLANG_PREFIX) -> Json:
    """Return the dashboard as JSON values.

    Args:
        prefix: the prefix of every metric name of a scheduler, as in the ``PrometheusSink``.
    """
    return {
        "title": "Schedulers",
        "uid": "scheduler-components",
        "description": "Load, latency and KV events of schedulers, by replica.",
        "tags": ["llm", "scheduler-components"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": _SCHEMA_VERSION,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables(prefix))},
        "panels": list(_panels(prefix)),
    }


def _variables(prefix: str) -> Iterator[Json]:
    yield {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}
    of_engines = f"{prefix}num_running_reqs"
    for name, label, values in (
        ("instance", "Engine", f"{of_engines}, instance"),
        ("dp_rank", "Replica", f'{of_engines}{{instance=~"$instance"}}, dp_rank'),
        ("reader", "Reader", f"{STREAM_STATE_METRIC.name}, instance"),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values({values})", "refId": name},
            "refresh": 2,
            "sort": 3,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _panels(prefix: str) -> Iterator[Json]:
    """Yield rows and panels, numbered and placed from the top left. A closed row contains its panels."""
    number, top = 1, 0
    for row in (*ROWS, _other_metrics()):
        heading = {"id": number, "type": "row", "title": row.title, "collapsed": not row.is_open, "panels": []}
        heading["gridPos"] = {"x": 0, "y": top, "w": _GRID_WIDTH, "h": 1}
        placed, bottom = _place_panels(row.panels, prefix, first_id=number + 1, top=top + 1)
        number += 1 + len(placed)
        if row.is_open:
            yield heading
            yield from placed
            top = bottom
        else:
            yield heading | {"panels": placed}
            top += 1


def _place_panels(panels: Iterable[Panel], prefix: str, *, first_id: int, top: int) -> tuple[list[Json], int]:
    """Place panels side by side while they fit; return them and the line below the last."""
    drawn: list[Json] = []
    left = 0
    for number, panel in enumerate(panels, start=first_id):
        if left + panel.width > _GRID_WIDTH:
            left, top = 0, top + _PANEL_HEIGHT
        place = {"x": left, "y": top, "w": panel.width, "h": _PANEL_HEIGHT}
        drawn.append(_draw(panel, prefix) | {"id": number, "gridPos": place})
        left += panel.width
    return drawn, top + _PANEL_HEIGHT


def _draw(panel: Panel, prefix: str) -> Json:
    metrics = [_METRICS[name] for name in panel.metrics]
    targets = [target for metric in metrics for target in _targets(metric, prefix, is_alone=len(metrics) == 1)]
    units = {_unit(metric) for metric in metrics}
    defaults: Json = {
        "unit": units.pop() if len(units) == 1 else "short",
        "custom": {"drawStyle": "line", "fillOpacity": 8, "showPoints": "never", "spanNulls": False},
    }
    if panel.metrics not in _WITHOUT_FLOOR:
        defaults["min"] = 0
    if defaults["unit"] == "percentunit":
        defaults["max"] = 1
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"{_series(metric, prefix)}: {metric.help}" for metric in metrics),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [target | {"refId": chr(ord("A") + at)} for at, target in enumerate(targets)],
    }


def _series(metric: Metric, prefix: str) -> str:
    return metric.name if metric.name in _OF_STREAMS else f"{prefix}{metric.name}"


def _unit(metric: Metric) -> str:
    return (_RATE_UNITS if metric.kind == "counter" else _UNITS).get(metric.unit, "short")


def _targets(metric: Metric, prefix: str, *, is_alone: bool) -> Iterator[Json]:
    """Yield the queries: a gauge as it is, a counter as its rate, a histogram as its median and 99th percentile."""
    chosen, legend = '{instance=~"$instance", dp_rank=~"$dp_rank"}', "{{instance}} dp{{dp_rank}}"
    if metric.name in _OF_STREAMS:
        chosen, legend = '{instance=~"$reader"}', "{{instance}} {{source}} {{rank}}"
    series = _series(metric, prefix)
    if not is_alone:
        legend = f"{metric.name} {legend}"
    if metric is STREAM_STATE_METRIC:
        yield _target(f"{series}{chosen} == 1", f"{legend} {{{{state}}}}")
    elif metric.kind == "gauge":
        yield _target(f"{series}{chosen}", legend)
    elif not metric.is_per_rank:
        legend = legend.removesuffix(" dp{{dp_rank}}")
        yield _target(f'rate({series}{{instance=~"$instance"}}[$__rate_interval])', legend)
    elif metric.kind == "counter":
        yield _target(f"rate({series}{chosen}[$__rate_interval])", legend)
    else:
        for share, name in ((0.5, "median"), (0.99, "p99")):
            rate = f"sum by (le, instance, dp_rank) (rate({series}_bucket{chosen}[$__rate_interval]))"
            yield _target(f"histogram_quantile({share}, {rate})", f"{name} {legend}")


def _target(expression: str, legend: str) -> Json:
    return {"datasource": _SOURCE, "expr": expression, "legendFormat": legend, "editorMode": "code", "range": True}


if __name__ == "__main__":
    DASHBOARD_FILE.write_text(json.dumps(render_dashboard(), indent=2) + "\n")
