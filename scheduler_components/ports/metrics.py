"""Metrics: where the statistics of each step, of each forward pass and of each request go."""

from __future__ import annotations

from typing import Protocol

from scheduler_components.values import ForwardPassMetrics, RequestSpan, SchedulerStats, SpanStats

__all__ = [
    "ForwardPassSink",
    "MetricsSink",
    "NullForwardPassSink",
    "NullMetricsSink",
    "NullSpanSink",
    "SpanSink",
]


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


class ForwardPassSink(Protocol):
    """Where forward-pass metrics go. Called by `ForwardPassPublisher`. `ZmqForwardPassSink` sends them to planners."""

    @property
    def wants_forward_passes(self) -> bool:
        """False without a receiver. `ForwardPassPublisher` then counts nothing."""
        ...

    def send(self, metrics: ForwardPassMetrics) -> None:
        """Send one message. Never block. `ForwardPassPublisher` counts an exception."""
        ...

    def close(self) -> None:
        """Release the socket. Safe to call twice."""
        ...


class NullForwardPassSink:
    """The sink of a rank that reports no forward passes."""

    wants_forward_passes = False

    def send(self, metrics: ForwardPassMetrics) -> None:
        pass

    def close(self) -> None:
        pass


class SpanSink(Protocol):
    """Where the spans of ended requests go. Called by `RequestTracer`. `OtelSpanSink` exports them to OpenTelemetry."""

    @property
    def wants_spans(self) -> bool:
        """False without a receiver. `RequestTracer` then makes no span."""
        ...

    def send(self, span: RequestSpan) -> None:
        """Queue one span. Never block. `RequestTracer` counts an exception."""
        ...

    def stats(self) -> SpanStats:
        """Return the counters since the start."""
        ...

    def close(self) -> None:
        """Export what is queued, for a bounded time. Safe to call twice."""
        ...


class NullSpanSink:
    """The sink of a rank that traces no requests."""

    wants_spans = False

    def send(self, span: RequestSpan) -> None:
        pass

    def stats(self) -> SpanStats:
        return SpanStats()

    def close(self) -> None:
        pass
