"""RequestTracer: make an OpenTelemetry span of each ended request from its times.

Attributes have the names that vLLM 0.32 (`vllm/tracing/utils.py`) and SGLang 0.5.23 (`observability/trace.py`) emit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.errors import ConfigError
from scheduler_components.metrics import RequestTimeStats
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullSpanSink, SpanSink
from scheduler_components.values import FinishedRequest, FinishReason, RequestSpan, SpanStats, TraceParent

__all__ = ["RequestTracer", "check_otlp_endpoint", "read_trace_parent", "span_attributes"]

logger = logging.getLogger(__name__)

_TRACING = "tracing a request"
_READING = "reading the counters of the spans"
_CLOSING = "closing the spans"

_MAX_TRACEPARENT_CHARACTERS = 256
"""Version 00 has 55. A later version may append fields."""

_MAX_TRACESTATE_CHARACTERS = 512
"""W3C Trace Context: a longer list may be dropped."""


def span_attributes(
    times: RequestTimeStats, request: FinishedRequest, *, model_name: str = ""
) -> dict[str, str | int | float | tuple[str, ...]]:
    """Return the attributes of a request's span. Latencies are in seconds; one that was never reached is left out.

    A retracted request has been in its phases several times, and each latency is the sum. The exception is the time in
    the queue: as in vLLM, it ends with the first prefill.
    """
    optional = {
        "gen_ai.response.model": model_name or None,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.latency.time_to_first_token": times.first_token_s,
    }
    return {
        "gen_ai.request.id": request.rid,
        "gen_ai.response.finish_reasons": (request.finish_reason,),
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": request.num_output_tokens,
        "gen_ai.usage.cached_tokens": request.num_cached_tokens,
        "gen_ai.latency.time_in_queue": times.queue_s if times.first_queue_s is None else times.first_queue_s,
        "gen_ai.latency.time_in_model_prefill": times.prefill_s,
        "gen_ai.latency.time_in_model_decode": times.decode_s,
        "gen_ai.latency.time_in_model_inference": times.prefill_s + times.decode_s,
        "gen_ai.latency.e2e": times.e2e_s,
        **{name: value for name, value in optional.items() if value is not None},
    }


@dataclass(slots=True, kw_only=True)
class RequestTracer:
    """Sends the span of each ended request to its sink. The scheduler calls it when a request has ended.

    Only the rank that reports its replica's metrics sends (``ParallelState.reports_metrics``), because every rank of a
    replica ends the same requests. An exception of the sink never reaches the scheduler's step: ``failures`` counts it
    and logs each episode once.

    Attributes:
        parallel: decides whether this rank sends.
        sink: receives the spans; ``open_otel_span_sink`` opens one.
        model_name: name of the model, for the spans.
        clock: wall-clock seconds since 1970.
        failures: counts the spans that were lost before the sink took them.
    """

    parallel: ParallelState
    sink: SpanSink = field(default_factory=NullSpanSink)
    model_name: str = ""
    clock: Callable[[], float] = time.time
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))

    def on_finished(self, times: RequestTimeStats, request: FinishedRequest) -> None:
        """Send the span of a request that ends now. Its times must be final.

        The span ends now, and begins the end-to-end time earlier. So a clock that was set while the request ran moves
        the span and does not stretch it.
        """
        if self.sink.wants_reports and self.parallel.reports_metrics:
            with self.failures.guard(_TRACING):
                end_s = self.clock()
                self.sink.send(
                    RequestSpan(
                        int((end_s - times.e2e_s) * 1e9),
                        int(end_s * 1e9),
                        span_attributes(times, request, model_name=self.model_name),
                        request.finish_reason == FinishReason.ERROR,
                        request.parent,
                    )
                )

    def stats(self) -> SpanStats:
        """Return the sink's counters. A span that the sink did not take counts as dropped, too."""
        stats = SpanStats()
        with self.failures.guard(_READING):
            stats = self.sink.stats()
        num_lost = self.failures.counts.get(_TRACING, 0)
        return SpanStats(stats.exported, stats.dropped + num_lost, stats.pending, stats.parents_refused)

    def close(self) -> None:
        """Close the sink. Safe to call twice; never raises."""
        with self.failures.guard(_CLOSING):
            self.sink.close()


def read_trace_parent(traceparent: str | None, tracestate: str | None = None) -> TraceParent | None:
    """Return the trace that the headers of a request name; None without one.

    Headers are bounded in length here and parsed by the sink, which counts those that are not valid.
    """
    if traceparent is None:
        return None
    state = "" if tracestate is None or len(tracestate) > _MAX_TRACESTATE_CHARACTERS else tracestate
    return TraceParent(traceparent[:_MAX_TRACEPARENT_CHARACTERS], state)


def check_otlp_endpoint(text: str) -> None:
    """Check the address of an OTLP collector that takes spans over HTTP.

    Raises:
        ConfigError: it is not an http or https URL with a host and a path.
    """
    hint = "give the whole URL, for example http://127.0.0.1:4318/v1/traces"
    try:
        url = urlsplit(text)
        has_address = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # a port that is not a number, or brackets that do not match
        has_address = False
    if not has_address:
        raise ConfigError("otlp_traces_endpoint", text, "is not an http or https address", hint)
    if not url.path.strip("/"):
        raise ConfigError("otlp_traces_endpoint", text, "has no path, and a collector has one per signal", hint)
