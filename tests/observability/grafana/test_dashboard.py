"""The dashboard draws what the sink exposes, all of it, in a file that Grafana can import."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any

import pytest
from kit.scheduler_stats import make_full_stats
from prometheus_client import CollectorRegistry, generate_latest

from observability import MetricsBoardCollector, StreamCollector
from observability.catalog import ALL_METRICS, STREAM_METRICS, STREAM_STATE_METRIC, Metric
from observability.grafana import DASHBOARD_FILE, render_dashboard
from observability.kv_stream import StreamState, StreamStats
from scheduler_components.values import (
    SchedulerStats,
)

SERIES = re.compile(r"((?:sglang:|kv_stream_)\w+)(\{[^}]*\})")
OF_STREAMS = (STREAM_STATE_METRIC, *STREAM_METRICS)


def name_of(metric: Metric) -> str:
    return metric.name if metric in OF_STREAMS else f"sglang:{metric.name}"


def panels_of(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel, those of closed rows included; rows left out."""
    for panel in dashboard["panels"]:
        yield from (panel["panels"] if panel["type"] == "row" else [panel])


def expressions_of(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels_of(dashboard) for target in panel["targets"]]


class Board:
    """What a ``MetricsBoardCollector`` exposes is what a sink does, and what it counts itself."""

    failed_reads = 0

    def __init__(self, report: SchedulerStats) -> None:
        self.report = report

    def read(self) -> dict[int, SchedulerStats]:
        return {0: self.report}


class OneStream:
    """The source of a reader of one stream."""

    def stats(self) -> dict[int, StreamStats]:
        return {0: StreamStats(0, "tcp://worker:5557", StreamState.LIVE, lag_s=0.1, newest_batch_age_s=0.1)}


@pytest.fixture
def exposed() -> set[tuple[str, frozenset[str]]]:
    """Name and label names of every sample of an engine with all parts, and of a reader."""
    registry = CollectorRegistry()
    MetricsBoardCollector(registry, board=Board(make_full_stats()))
    StreamCollector(registry, OneStream())
    found = re.findall(r"^(\w+:?\w+)(\{.*\})? ", generate_latest(registry).decode(), re.MULTILINE)
    return {(name, frozenset(re.findall(r'(\w+)="', labels))) for name, labels in found}


def test_the_file_is_the_catalogues() -> None:
    stored = json.loads(DASHBOARD_FILE.read_text())
    assert stored == render_dashboard(), "run python -m observability.grafana.dashboard"


def test_every_query_asks_for_what_the_sink_exposes(exposed: set[tuple[str, frozenset[str]]]) -> None:
    labels_of = dict(exposed)
    for expression in expressions_of(render_dashboard()):
        ((name, selector),) = SERIES.findall(expression)
        asked = set(re.findall(r"(\w+)=~", selector)) - {"instance"}  # Prometheus adds that one
        asked |= set(re.findall(r"\b(le|dp_rank)\b(?=[,)])", expression))
        assert name in labels_of, expression
        assert asked <= labels_of[name], expression


def test_every_metric_of_the_catalogue_is_drawn() -> None:
    drawn = {name for expression in expressions_of(render_dashboard()) for name, _ in SERIES.findall(expression)}
    endings = {"gauge": "", "counter": "", "histogram": "_bucket"}
    names = {name_of(metric) + endings[metric.kind] for metric in (*ALL_METRICS, *OF_STREAMS)}
    assert names == drawn


def test_counters_are_drawn_as_rates_and_nothing_else_is() -> None:
    counters = {name_of(metric) for metric in (*ALL_METRICS, *OF_STREAMS) if metric.kind == "counter"}
    for expression in expressions_of(render_dashboard()):
        ((name, _),) = SERIES.findall(expression)
        assert ("rate(" in expression) == (name in counters or name.endswith("_bucket")), expression


def test_the_prefix_is_the_sinks() -> None:
    assert "sglang:" not in json.dumps(render_dashboard("mine_"))
    assert "mine_token_usage{" in json.dumps(render_dashboard("mine_"))


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    """Grafana moves panels that overlap, and shows one of two that share an id."""
    dashboard = render_dashboard()
    every = [*dashboard["panels"], *(panel for row in dashboard["panels"] for panel in row.get("panels", ()))]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_what_an_import_needs_is_there() -> None:
    dashboard = render_dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) - {"__all", "__rate_interval"}
    assert used == variables
    for panel in panels_of(dashboard):
        assert {"type", "title", "datasource", "fieldConfig", "options", "targets", "gridPos"} <= panel.keys()
        assert [target["refId"] for target in panel["targets"]] == list(ascii_uppercase[: len(panel["targets"])])
