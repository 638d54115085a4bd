"""In every accepted format, the page parses and each sample has its type and the name of the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.scheduler_stats import make_full_stats
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from observability import MetricsBoardCollector, PrometheusSink, StreamCollector, render_metrics
from observability.kv_stream import StreamState, StreamStats
from scheduler_components import ParallelState
from scheduler_components.values import (
    LoadSnapshot,
    SchedulerStats,
)

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
READERS: dict[str, Callable[[str], Iterable[Metric]]] = {OPENMETRICS: read_openmetrics, TEXT: read_text}

# What each reader sends, and the form that it shall get.
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PROMETHEUS_3_PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," + PROMETHEUS_3
)
ACCEPTED = {
    "prometheus 2.42": (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        OPENMETRICS,
    ),
    "prometheus 2.5": ("application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", TEXT),
    "prometheus 3": (PROMETHEUS_3, OPENMETRICS),
    "prometheus 3, native histograms": (PROMETHEUS_3_PROTOBUF, OPENMETRICS),
    "prometheus 3, legacy names": (PROMETHEUS_3.replace("allow-utf-8", "underscores"), OPENMETRICS),
    "prometheus 3, values": (PROMETHEUS_3.replace("allow-utf-8", "values"), OPENMETRICS),
    "prometheus 3, dots": (PROMETHEUS_3.replace("allow-utf-8", "dots"), OPENMETRICS),
    "scrape_protocols with text first": (
        "text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1",
        TEXT,
    ),
    "text 1.0.0, escaped": ("text/plain;version=1.0.0;escaping=underscores", TEXT),
    "openmetrics without a version": ("application/openmetrics-text", OPENMETRICS),
    "openmetrics refused": ("application/openmetrics-text;q=0,*/*", TEXT),
    "openmetrics of a later version": ("application/openmetrics-text; version=2.0.0", TEXT),
    "a quality that is no number": ("application/openmetrics-text;q=high", TEXT),
    "a browser": ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", TEXT),
    "curl": ("*/*", TEXT),
    "nothing": ("", TEXT),
}


def registry_with_all() -> CollectorRegistry:
    """Every metric of the kit, under SGLang's and vLLM's names, and those of a followed stream."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, model_name='a "model"\\', vllm_names=True, clock=lambda: 5.0)
    for dp_rank in (0, 1):
        sink.record(make_full_stats(dp_rank))
    StreamCollector(registry, Streams())
    return registry


class Streams:
    def stats(self) -> dict[int, StreamStats]:
        return {0: StreamStats(rank=0, endpoint="tcp://worker:5557", state=StreamState.LIVE, lag_s=0.5)}


def samples_of(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], tuple[str, str, float]]:
    """Each sample's name and labels: its family's type and help, and its value."""
    return {
        (sample.name, frozenset(sample.labels.items())): (family.type, family.documentation, sample.value)
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(("accept", "content_type"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_every_reader_gets_the_registrys_names_and_types(accept: str, content_type: str) -> None:
    registry = registry_with_all()
    page, named = render_metrics(registry, accept)
    assert named == content_type
    assert samples_of(READERS[content_type](page.decode())) == samples_of(registry.collect())


def test_a_rank_that_left_takes_its_labels_along() -> None:
    registry, board = CollectorRegistry(), Board()
    MetricsBoardCollector(registry, board=board)
    for dp_rank in (0, 1, 0):
        board.labels = ParallelState(dp_rank=dp_rank, dp_size=2).metric_labels
        page = render_metrics(registry)[0].decode()
        assert f'dp_rank="{dp_rank}"' in page
        assert f'dp_rank="{1 - dp_rank}"' not in page


class Board:
    failed_reads = 0
    labels: tuple[tuple[str, str], ...] = ()

    def read(self) -> dict[int, SchedulerStats]:
        return {0: SchedulerStats(self.labels, LoadSnapshot())}


@given(st.text() | st.lists(st.sampled_from([accept for accept, _ in ACCEPTED.values()] + ["q=", ";;", "=", ","])))
def test_no_header_leaves_a_reader_without_a_page(accept: str | list[str]) -> None:
    page, content_type = render_metrics(CollectorRegistry(), accept if isinstance(accept, str) else ",".join(accept))
    assert list(READERS[content_type](page.decode())) == []
