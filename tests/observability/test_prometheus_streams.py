"""What Prometheus reads of followed streams: every number of ``StreamStats`` once, and the state as a set of flags."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observability import StreamCollector
from observability.catalog import STREAM_METRICS, STREAM_STATE_METRIC, render_stream_markdown
from observability.kv_stream import StreamState, StreamStats
from scheduler_components import ConfigError

NOT_NUMBERS = {"rank", "endpoint", "state", "last_error"}


class FakeSource:
    def __init__(self) -> None:
        self.streams = {3: StreamStats(3, "tcp://127.0.0.1:1", StreamState.LIVE, last_seq=7, splices=2, lag_s=0.5)}

    def stats(self) -> dict[int, StreamStats]:
        return self.streams


def test_every_number_has_one_metric() -> None:
    fields = {field.name for field in msgspec.structs.fields(StreamStats)}
    assert sorted(metric.path for metric in STREAM_METRICS) == sorted(fields - NOT_NUMBERS)
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in STREAM_METRICS)


def test_a_scrape_reads_the_newest() -> None:
    registry, source = CollectorRegistry(), FakeSource()
    StreamCollector(registry, source)
    assert registry.get_sample_value("kv_stream_last_sequence", {"rank": "3"}) == 7
    assert registry.get_sample_value("kv_stream_splices_total", {"rank": "3"}) == 2
    source.streams[3] = StreamStats(3, "tcp://127.0.0.1:1", StreamState.PARTIAL, last_seq=8)
    assert registry.get_sample_value("kv_stream_last_sequence", {"rank": "3"}) == 8
    assert registry.get_sample_value("kv_stream_lag_seconds", {"rank": "3"}) is None


def test_one_state_is_set() -> None:
    registry = CollectorRegistry()
    StreamCollector(registry, FakeSource())
    flags = {
        state: registry.get_sample_value(STREAM_STATE_METRIC.name, {"rank": "3", "state": state.value})
        for state in StreamState
    }
    assert flags == {state: float(state is StreamState.LIVE) for state in StreamState}


def test_the_text_can_be_parsed() -> None:
    registry = CollectorRegistry()
    StreamCollector(registry, FakeSource())
    families = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert families == {metric.name.removesuffix("_total") for metric in (STREAM_STATE_METRIC, *STREAM_METRICS)}


def test_a_registry_takes_one_and_gives_it_back() -> None:
    registry = CollectorRegistry()
    collector = StreamCollector(registry, FakeSource())
    with pytest.raises(ConfigError, match="kv_stream_"):
        StreamCollector(registry, FakeSource())
    collector.close()
    collector.close()
    StreamCollector(registry, FakeSource())


def test_the_documentation_has_the_table() -> None:
    documentation = Path(__file__).parent.parent.parent / "docs" / "stream-metrics.md"
    assert render_stream_markdown().strip() in documentation.read_text()
