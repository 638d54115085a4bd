"""What Prometheus reads of outputs: every number of ``OutputStats`` once, of each rank that reports."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observability import OUTPUT_METRICS, OutputCollector, PrometheusSink, RankLabels, RankOutputs
from scheduler_components import (
    ConfigError,
    LoadSnapshot,
    OutputStats,
    OutputStreamer,
    ParallelState,
    SchedulerStats,
    TokenOutput,
)
from scheduler_components.testing import ListOutputSink

FIRST, SECOND = (ParallelState(dp_rank=rank, dp_size=2) for rank in range(2))


class Source:
    def __init__(self, stats: Mapping[RankLabels, OutputStats]) -> None:
        self.stats = dict(stats)

    def output_stats(self) -> Mapping[RankLabels, OutputStats]:
        return self.stats


class Ended:
    """A request that is over."""

    rid, finish_reason, stream_interval, num_output_tokens = "a", "length", 1, 3

    def output_since(self, start: int) -> TokenOutput:
        return TokenOutput((7, 8, 9)[start:])


def test_every_number_has_one_metric() -> None:
    fields = [field.name for field in msgspec.structs.fields(OutputStats)]
    assert [metric.path for metric in OUTPUT_METRICS] == fields
    now = {"requests_waiting", "ends_held", "bytes_held"}  # the others only ever grow
    assert {metric.path for metric in OUTPUT_METRICS if metric.kind == "gauge"} == now


def test_each_number_comes_out_under_its_name_and_its_ranks_labels() -> None:
    fields = [metric.path for metric in OUTPUT_METRICS]
    first, second = (OutputStats(**{field: base + at for at, field in enumerate(fields)}) for base in (10, 100))
    registry = CollectorRegistry()
    OutputCollector(registry, Source({FIRST.metric_labels: first, SECOND.metric_labels: second}), model_name="m")
    for parallel, stats in ((FIRST, first), (SECOND, second)):
        labels = {**dict(parallel.metric_labels), "model_name": "m"}
        read = [registry.get_sample_value(f"sglang:{metric.name}", labels) for metric in OUTPUT_METRICS]
        assert read == [getattr(stats, field) for field in fields]


def test_a_scrape_reads_the_newest_of_a_streamer() -> None:
    registry, sink = CollectorRegistry(), ListOutputSink()
    streamer = OutputStreamer(sink=sink)
    OutputCollector(registry, RankOutputs(parallel=FIRST, outputs=streamer), prefix="")

    def value(name: str) -> float | None:
        return registry.get_sample_value(name, dict(FIRST.metric_labels))

    assert (value("output_steps_delayed_total"), value("output_ends_held")) == (0, 0)
    sink.is_full = True
    streamer.stream([Ended()])
    assert (value("output_steps_delayed_total"), value("output_ends_held")) == (1, 1)
    sink.is_full = False
    streamer.flush()
    assert (value("output_tokens_sent_total"), value("output_ends_held")) == (3, 0)
    sink.is_full = True
    streamer.stream([Ended()])
    streamer.close()
    assert (value("output_ends_dropped_total"), value("output_tokens_dropped_total")) == (1, 3)


def test_a_rank_that_does_not_report_has_no_outputs() -> None:
    follower = ParallelState.from_tp_rank(1, tp_size=2)
    assert RankOutputs(parallel=follower, outputs=OutputStreamer(sink=ListOutputSink())).output_stats() == {}


def test_the_text_can_be_parsed_and_shares_a_registry_with_the_sink() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry).record(SchedulerStats(labels=FIRST.metric_labels, load=LoadSnapshot()))
    OutputCollector(registry, Source({FIRST.metric_labels: OutputStats()}))
    text = generate_latest(registry).decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert families >= {f"sglang:{metric.name.removesuffix('_total')}" for metric in OUTPUT_METRICS}
    assert "sglang:num_running_reqs" in families


def test_a_registry_takes_one_and_gives_it_back() -> None:
    registry = CollectorRegistry()
    collector = OutputCollector(registry, Source({}))
    with pytest.raises(ConfigError, match="taken"):
        OutputCollector(registry, Source({}))
    collector.close()
    collector.close()
    OutputCollector(registry, Source({}))


@pytest.mark.parametrize("prefix", ["1", "a-", "sglang "])
def test_a_prefix_that_begins_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        OutputCollector(CollectorRegistry(), Source({}), prefix=prefix)
