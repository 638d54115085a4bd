"""Reports: where the statistics of each step, the load, each forward pass and each request's span go."""

from __future__ import annotations

from typing import Protocol, TypeVar

from scheduler_components.values import RequestSpan, SchedulerStats, SpanStats

__all__ = ["MetricsSink", "NullMetricsSink", "NullReportSink", "NullSpanSink", "ReportSink", "SpanSink"]

Report_contra = TypeVar("Report_contra", contravariant=True)


class MetricsSink(Protocol):
    """Export one rank's statistics. Called by `MetricsEmitter`.

    `PrometheusSink` exports them to Prometheus, `LogSink` to a log, `ShmMetricsSink` to the serving process.
    """

    def record(self, stats: SchedulerStats) -> None:
        """Record the statistics of one step. Called on the scheduler's thread, so it must be cheap."""
        ...


class NullMetricsSink:
    """The metrics sink of a rank that reports no metrics."""

    def record(self, stats: SchedulerStats) -> None:
        pass

    def close(self) -> None:
        pass


class ReportSink(Protocol[Report_contra]):
    """Where one kind of reports goes: `LoadSnapshot`, `KvMetrics`, `ForwardPassMetrics` or `RequestSpan`.

    Called by `LoadPublisher`, `SchedulerKvEventsPublisher`, `ForwardPassPublisher` and `RequestTracer`. `ZmqReportSink`
    sends reports over the network.
    """

    @property
    def wants_reports(self) -> bool:
        """False without a receiver. The caller then reads and counts nothing."""
        ...

    def send(self, report: Report_contra) -> None:
        """Send one report. Never block: drop it if the receiver does not accept it. The caller counts an exception."""
        ...

    def close(self) -> None:
        """Release the sockets; send what is queued for a bounded time at most. Safe to call twice."""
        ...


class NullReportSink:
    """The sink of a rank that sends no reports of a kind."""

    wants_reports = False

    def send(self, report: object) -> None:
        pass

    def close(self) -> None:
        pass


class SpanSink(ReportSink[RequestSpan], Protocol):
    """Where the spans of ended requests go: `OtelSpanSink` exports them to OpenTelemetry."""

    def stats(self) -> SpanStats:
        """Return the counters since the start."""
        ...


class NullSpanSink(NullReportSink):
    """The sink of a rank that traces no requests."""

    def stats(self) -> SpanStats:
        return SpanStats()
