"""Prometheus exports every number of ``OutputStats`` once, for each rank that reports."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from observability import PrometheusSink
from observability.catalog import SCHEDULER_METRICS
from scheduler_components import MetricsEmitter, OutputStreamer, ParallelState
from scheduler_components.testing import ListOutputSink
from scheduler_components.values import LoadSnapshot, OutputStats, SchedulerStats, TokenOutput

FIRST, SECOND = (ParallelState(dp_rank=rank, dp_size=2) for rank in range(2))
METRICS = [metric for metric in SCHEDULER_METRICS if metric.path.startswith("outputs.")]
FIELDS = [field.name for field in msgspec.structs.fields(OutputStats)]


class Idle:
    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot()


class FinishedRequest:
    rid, finish_reason, stream_interval, num_output_tokens = "a", "length", 1, 3

    def output_since(self, start: int) -> TokenOutput:
        return TokenOutput((7, 8, 9)[start:])


def test_every_field_has_one_metric() -> None:
    assert [metric.path.removeprefix("outputs.") for metric in METRICS] == FIELDS
    now = {"outputs.requests_waiting", "outputs.ends_held", "outputs.bytes_held"}  # the others only ever grow
    assert {metric.path for metric in METRICS if metric.kind == "gauge"} == now


def test_each_number_is_exported_under_its_name_and_the_labels_of_its_rank() -> None:
    first, second = (OutputStats(**{field: base + at for at, field in enumerate(FIELDS)}) for base in (10, 100))
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, model_name="m")
    for parallel, stats in ((FIRST, first), (SECOND, second)):
        sink.record(SchedulerStats(parallel.metric_labels, LoadSnapshot(), outputs=stats))
    for parallel, stats in ((FIRST, first), (SECOND, second)):
        labels = {**dict(parallel.metric_labels), "model_name": "m"}
        read = [registry.get_sample_value(f"sglang:{metric.name}", labels) for metric in METRICS]
        assert read == [getattr(stats, field) for field in FIELDS]


def test_a_report_of_an_idle_scheduler_has_the_newest_counters_of_the_streamer() -> None:
    registry, outputs = CollectorRegistry(), ListOutputSink()
    streamer = OutputStreamer(sink=outputs)
    emitter = MetricsEmitter(
        parallel=FIRST, load=Idle(), sink=PrometheusSink(registry, prefix=""), sources={"outputs": streamer}
    )

    def value(name: str) -> float | None:
        emitter.emit()
        return registry.get_sample_value(name, dict(FIRST.metric_labels))

    assert (value("output_steps_delayed_total"), value("output_ends_held")) == (0, 0)
    outputs.is_full = True
    streamer.stream([FinishedRequest()])
    assert (value("output_steps_delayed_total"), value("output_ends_held")) == (1, 1)
    outputs.is_full = False
    streamer.flush()
    assert (value("output_tokens_sent_total"), value("output_ends_held")) == (3, 0)
    outputs.is_full = True
    streamer.stream([FinishedRequest()])
    streamer.close()
    assert (value("output_ends_dropped_total"), value("output_tokens_dropped_total")) == (1, 3)


def test_a_rank_that_does_not_report_exports_no_outputs() -> None:
    registry, follower = CollectorRegistry(), ParallelState.from_tp_rank(1, tp_size=2)
    sink, streamer = PrometheusSink(registry), OutputStreamer(sink=ListOutputSink())
    MetricsEmitter(parallel=follower, load=Idle(), sink=sink, sources={"outputs": streamer}).emit()
    assert not any(family.name.startswith("sglang:output") for family in registry.collect())
