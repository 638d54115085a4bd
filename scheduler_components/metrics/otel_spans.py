"""Export request spans with OpenTelemetry's SDK, on a thread with a bounded queue.

The scheduler's step appends a value to a queue, and never waits. The thread makes spans of the values and exports them.
OpenTelemetry's own `BatchSpanProcessor` would make each span in the step, and drop without a count.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from scheduler_components._internal.extras import naming_extras
from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.fork_hook import ForkGuard
from scheduler_components._internal.validators import check_integer
from scheduler_components._version import __version__
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullSpanSink, SpanSink
from scheduler_components.values import RequestSpan, SpanStats, TraceParent

with naming_extras:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import SpanKind, StatusCode, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["SPAN_NAME", "OtelSpanSink", "open_otel_span_sink"]

SPAN_NAME = "llm_request"
"""vLLM's name of a request's span."""

_MAX_SPANS = 2048
_BATCH_SPANS = 512
"""OpenTelemetry's defaults of a queue and of a batch."""

_INTERVAL_S = 1.0
"""Longest time that a span waits for its export."""

_CLOSE_S = 2.0
"""A collector that does not respond must not delay the end of a rank for longer."""

logger = logging.getLogger(__name__)


class _EndedSpans(SpanProcessor):
    """Collects the spans that the SDK has sampled and ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class OtelSpanSink:
    """A ``SpanSink`` that exports on its own thread. ``open_otel_span_sink`` opens one; one thread calls it.

    A request whose client decided not to sample its trace gets no span (the SDK's ``parentbased_always_on``).

    Args:
        exporter: any exporter of the SDK.
        service_name: name of the service in the traces.
        max_spans: size of the queue.

    Attributes:
        failures: counts failed exports, and logs each episode once.

    Raises:
        ConfigError: ``max_spans`` is not a size.
    """

    __slots__ = (
        "failures", "_closing", "_dropped", "_ended", "_exported", "_exporter", "_fork_guard", "_lost", "_max_spans",
        "_parents_refused", "_propagator", "_queue", "_thread", "_tracer", "_wake",
    )  # fmt: skip
    wants_reports = True

    def __init__(self, exporter: SpanExporter, *, service_name: str, max_spans: int = _MAX_SPANS) -> None:
        check_integer("max_spans", max_spans)
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False)
        self._ended = _EndedSpans()
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("scheduler_components", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = exporter
        self._max_spans = max_spans
        self._queue: deque[RequestSpan] = deque()
        self._dropped = 0  # by the caller's thread; the next three by the thread of the sink
        self._exported = self._lost = self._parents_refused = 0
        self._wake = threading.Event()
        self._closing = False
        self._fork_guard = ForkGuard()
        self.failures = FailureLog(logger)
        self._thread = threading.Thread(target=self._run, name="otel-spans", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once, before the first ``send``."""
        self._thread.start()

    def send(self, span: RequestSpan) -> None:
        """Queue one span. With a full queue, and after ``close``, it is dropped and counted.

        Raises:
            ForkedPublisherError: this process is a child of the one that opened the sink.
        """
        self._fork_guard.check()
        if self._closing or len(self._queue) >= self._max_spans:
            self._dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) == min(_BATCH_SPANS, self._max_spans):
            self._wake.set()

    def stats(self) -> SpanStats:
        """Return the counters."""
        return SpanStats(self._exported, self._dropped + self._lost, len(self._queue), self._parents_refused)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            is_last = self._closing  # read before the queue, which gets nothing after it is set
            while self._queue:
                self._export_batch()

    def _export_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_SPANS))]
        ended = self._ended.spans
        num_sampled = 0
        try:
            for each in batch:
                self._make(each)
            num_sampled = len(ended)
            if ended and self._exporter.export(ended) is not SpanExportResult.SUCCESS:
                raise ConnectionError("the exporter could not deliver a batch of spans")
        except Exception as error:  # noqa: BLE001 - an exporter may raise anything, and the thread must go on
            self._lost += num_sampled or len(batch)
            self.failures.failed("exporting spans", error)
        else:
            self._exported += num_sampled
            self.failures.succeeded("exporting spans")
        finally:
            ended.clear()

    def _make(self, span: RequestSpan) -> None:
        made = self._tracer.start_span(
            SPAN_NAME,
            context=self._context(span.parent),
            kind=SpanKind.SERVER,
            attributes=span.attributes,
            start_time=span.start_ns,
        )
        if span.is_error:
            made.set_status(StatusCode.ERROR)
        made.end(end_time=span.end_ns)

    def _context(self, parent: TraceParent | None) -> Context:
        """Return the context of a client's trace. Headers that are not valid begin a new trace, as W3C requires."""
        if parent is None:
            return Context()
        headers = {"traceparent": parent.traceparent, "tracestate": parent.tracestate}
        context = self._propagator.extract(headers, context=Context())
        if not get_current_span(context).get_span_context().is_valid:
            self._parents_refused += 1
        return context

    def close(self) -> None:
        """Export what is queued, for at most two seconds, and end the thread. What is left then counts as dropped.

        Safe to call twice. Does nothing in a forked child. An exporter that hangs keeps its thread, which ends with
        the process.
        """
        if self._fork_guard.is_forked or self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S / 2)
        self._exporter.shutdown()  # ends the waits between the attempts of an export, and fails further ones
        self._thread.join(_CLOSE_S / 2)

    def __repr__(self) -> str:
        return f"<OtelSpanSink: {self.stats()}>"


def open_otel_span_sink(
    endpoint: str, parallel: ParallelState, *, service_name: str = "scheduler-components", max_spans: int = _MAX_SPANS
) -> SpanSink:
    """Start to export spans to a collector as OTLP over HTTP, in protobuf. A rank that reports no metrics opens none.

    The SDK reads further settings from its environment variables, for example ``OTEL_EXPORTER_OTLP_HEADERS`` and
    ``OTEL_TRACES_SAMPLER``. A collector that cannot be reached is no error: it may start later.

    Args:
        endpoint: the whole URL, for example ``http://127.0.0.1:4318/v1/traces``; see ``check_otlp_endpoint``.
        parallel: decides whether this rank sends.
        service_name: name of the service in the traces.
        max_spans: size of the queue.
    """
    if not parallel.reports_metrics:
        return NullSpanSink()
    sink = OtelSpanSink(OTLPSpanExporter(endpoint=endpoint), service_name=service_name, max_spans=max_spans)
    sink.start()
    return sink
