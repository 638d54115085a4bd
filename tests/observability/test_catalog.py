"""The catalogue is whole: every number that a scheduler reports is in it once, under names that Prometheus takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import get_args, get_type_hints

import msgspec
import pytest
from kit.scheduler_stats import make_full_stats

from observability.catalog import (
    ALL_METRICS,
    INFO_METRICS,
    SCHEDULER_HISTOGRAMS,
    SCHEDULER_METRICS,
    STATE_METRICS,
    Metric,
    read_histogram,
    read_number,
    render_markdown,
)
from scheduler_components.metrics import RequestLatencyRecorder
from scheduler_components.values import HistogramSnapshot, LoadSnapshot, SchedulerStats

# Facts that reach a dashboard in another way, each with its reason.
NOT_EXPORTED = {
    "load.timestamp": "exported as load_age_seconds",
    "load.dp_rank": "a label",
    "load.dispatched_watermarks": "tickets mean something to their dispatcher alone",
    "load.queues.waiting": "num_queue_reqs says it",
    "load.memory.token_capacity": "max_total_num_tokens says it",
    "load.lora.running_adapters": "a label of lora_requests_info",
    "load.lora.waiting_adapters": "a label of lora_requests_info",
    "load.lora.by_adapter": "one entry per adapter; /v1/loads says it",
    "quiesce.is_awake": "a sample of engine_sleep_state",
    "quiesce.has_weights_offloaded": "a sample of engine_sleep_state",
    "quiesce.has_discarded_all": "a sample of engine_sleep_state",
    "load.disaggregation.mode": "not a number; /v1/loads says it",
    "load.disaggregation.waiting_reqs": "in num_queue_reqs",
    "load.disaggregation.pending_tokens": "in num_pending_tokens",
}
WHOLE = make_full_stats()


def paths_of(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the path of each value of a report, without those of histograms."""
    for name, hint in get_type_hints(kind).items():
        part = get_args(hint)[0] if isinstance(hint, UnionType) else hint
        if isinstance(part, type) and issubclass(part, msgspec.Struct) and part is not HistogramSnapshot:
            yield from paths_of(part, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_fact_of_a_report_has_one_metric() -> None:
    paths = [metric.path for metric in (*SCHEDULER_METRICS, *SCHEDULER_HISTOGRAMS)]
    facts = set(paths_of(SchedulerStats)) - {"labels"}
    assert sorted(paths) == sorted(facts - NOT_EXPORTED.keys())
    assert NOT_EXPORTED.keys() <= facts


def test_names_and_words_follow_the_habits() -> None:
    for metric in ALL_METRICS:
        for name in (metric.name, *metric.vllm_names):
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name), metric
            # SGLang calls one gauge so.
            assert (metric.kind == "counter") == name.endswith("_total") or name == "lora_pool_slots_total", metric
        assert metric.help.endswith("."), metric
        assert metric.unit, metric


def test_names_are_unique() -> None:
    names = [metric.name for metric in (*ALL_METRICS, *INFO_METRICS, *STATE_METRICS)]
    vllm_names = [name for metric in ALL_METRICS for name in metric.vllm_names]
    assert len(set(names)) == len(names)
    assert len(set(vllm_names)) == len(vllm_names)


def test_what_gateways_and_dashboards_read_is_there() -> None:
    names = {metric.name for metric in SCHEDULER_METRICS}
    assert {"num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput", "cache_hit_rate"} <= names
    assert {"num_used_tokens", "max_total_num_tokens", "num_retracted_reqs", "prompt_tokens_total"} <= names
    vllm_names = {name for metric in SCHEDULER_METRICS for name in metric.vllm_names}
    assert {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"} <= vllm_names
    assert {"prefix_cache_hits_total", "prefix_cache_queries_total", "num_preemptions_total"} <= vllm_names


def test_each_metric_reads_a_number_and_none_where_the_part_is_missing() -> None:
    always = ("load.", "counters.", "publisher.")
    for metric in SCHEDULER_METRICS:
        assert isinstance(read_number(metric, WHOLE), int | float), metric
        bare = read_number(metric, SchedulerStats(labels=(), load=LoadSnapshot()))
        assert (bare is not None) == (metric.path.startswith(always) and metric.path.count(".") == 1), metric


@pytest.mark.parametrize("metric", SCHEDULER_HISTOGRAMS, ids=lambda metric: metric.name)
def test_each_histogram_is_read_and_none_where_the_engine_keeps_none(metric: Metric) -> None:
    latencies = RequestLatencyRecorder().stats()
    histogram = read_histogram(metric, SchedulerStats(labels=(), load=LoadSnapshot(), latencies=latencies))
    assert histogram is not None
    assert histogram.count == 0
    assert read_histogram(metric, SchedulerStats(labels=(), load=LoadSnapshot())) is None


def test_the_names_of_latencies_are_those_of_the_peers() -> None:
    names = {metric.name: metric.vllm_names for metric in SCHEDULER_HISTOGRAMS}
    assert names.keys() >= {"time_to_first_token_seconds", "inter_token_latency_seconds"}
    assert names.keys() >= {"e2e_request_latency_seconds", "queue_time_seconds"}
    assert names["queue_time_seconds"] == ("request_queue_time_seconds",)


def test_the_tables_for_the_documentation_have_one_row_per_metric() -> None:
    lines = render_markdown().splitlines()
    named = [match[1] for line in lines if (match := re.match(r"\| `sglang:(\w+)` \|", line))]
    assert sorted(named) == sorted(metric.name for metric in (*ALL_METRICS, *INFO_METRICS, *STATE_METRICS))
    assert "| `sglang:num_running_reqs` | gauge | requests | Running requests. | `vllm:num_requests_running` |" in lines


def test_only_what_a_collector_itself_knows_has_no_path() -> None:
    assert all(bool(metric.path) == (metric in (*SCHEDULER_METRICS, *SCHEDULER_HISTOGRAMS)) for metric in ALL_METRICS)
    assert all(metric.is_per_rank for metric in ALL_METRICS if metric.path)
