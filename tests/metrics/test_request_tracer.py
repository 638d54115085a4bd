"""A span per ended request, from one rank of each replica, under the names of vLLM and SGLang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState
from scheduler_components.metrics import RequestTimeStats
from scheduler_components.metrics.request_times import RequestPhase
from scheduler_components.metrics.request_tracer import RequestTracer, check_otlp_endpoint, read_trace_parent
from scheduler_components.testing import VirtualClock
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import FinishedRequest, RequestSpan, SpanStats, TraceParent


class SpanList(ListSink[RequestSpan]):
    wants_reports = True

    def stats(self) -> SpanStats:
        self._act()
        return SpanStats(exported=len(self.sent), dropped=1, pending=2, parents_refused=3)


def make(parallel: ParallelState | None = None) -> tuple[RequestTracer, SpanList]:
    sink = SpanList()
    parallel = parallel or ParallelState()
    return RequestTracer(parallel=parallel, sink=sink, model_name="tiny", clock=VirtualClock(1_000.0)), sink


def times_of(*moves: tuple[RequestPhase, float]) -> RequestTimeStats:
    times = RequestTimeStats(0.0)
    for phase, now in moves:
        if phase is RequestPhase.DECODE:
            times.on_token(now)
        else:
            times.move_to(phase, now)
    return times


PARENT = TraceParent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a=b")
REQUEST = FinishedRequest(
    rid="r1",
    finish_reason="stop",
    num_prompt_tokens=100,
    num_output_tokens=7,
    num_cached_tokens=64,
    max_tokens=50,
    temperature=0.5,
    top_p=0.75,
    top_k=20,
    parent=PARENT,
)
SERVED = (RequestPhase.PREFILL, 2.0), (RequestPhase.DECODE, 5.0), (RequestPhase.FINISHED, 9.0)


def test_the_span_of_a_request_that_was_served() -> None:
    tracer, sink = make()
    tracer.on_finished(times_of(*SERVED), REQUEST)
    attributes = {
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.id": "r1",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 20,
        "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.usage.cached_tokens": 64,
        "gen_ai.latency.time_in_queue": 2.0,
        "gen_ai.latency.time_to_first_token": 5.0,
        "gen_ai.latency.time_in_model_prefill": 3.0,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "gen_ai.latency.time_in_model_inference": 7.0,
        "gen_ai.latency.e2e": 9.0,
    }
    assert sink.sent == [RequestSpan(991_000_000_000, 1_000_000_000_000, attributes, False, PARENT)]


def test_what_a_request_never_reached_or_did_not_ask_for_is_left_out() -> None:
    tracer, sink = make()
    tracer.model_name = ""
    request = FinishedRequest(rid="r2", finish_reason="error", num_prompt_tokens=5, num_output_tokens=0)
    tracer.on_finished(times_of((RequestPhase.FINISHED, 3.0)), request)
    (span,) = sink.sent
    missing = ("gen_ai.response.model", "gen_ai.latency.time_to_first_token", "gen_ai.request.top_p")
    assert span.attributes.keys().isdisjoint(missing)
    assert span.attributes["gen_ai.latency.time_in_queue"] == 3.0
    assert (span.is_error, span.parent) == (True, None)


def test_the_time_in_the_queue_ends_with_the_first_prefill() -> None:
    tracer, sink = make()
    retracted = (RequestPhase.PREFILL, 2.0), (RequestPhase.DECODE, 3.0), (RequestPhase.QUEUE, 4.0)
    resumed = (RequestPhase.PREFILL, 10.0), (RequestPhase.DECODE, 11.0), (RequestPhase.FINISHED, 12.0)
    tracer.on_finished(times_of(*retracted, *resumed), REQUEST)
    (span,) = sink.sent
    assert span.attributes["gen_ai.latency.time_in_queue"] == 2.0
    assert span.attributes["gen_ai.latency.time_in_model_inference"] == 4.0
    assert span.attributes["gen_ai.latency.e2e"] == 12.0


@given(st.integers(0, 15))
def test_one_rank_of_each_replica_traces(tp_rank: int) -> None:
    parallel = ParallelState.from_tp_rank(tp_rank, tp_size=16, attn_dp_size=4, attn_cp_size=2)
    tracer, sink = make(parallel)
    tracer.on_finished(times_of(*SERVED), REQUEST)
    assert len(sink.sent) == parallel.reports_metrics


def test_a_failing_sink_does_not_raise_into_the_step_and_its_spans_count_as_dropped() -> None:
    tracer, sink = make()
    tracer.on_finished(times_of(*SERVED), REQUEST)
    assert tracer.stats() == SpanStats(1, 1, 2, 3)
    sink.error = OSError("gone")
    tracer.on_finished(times_of(*SERVED), REQUEST)
    assert tracer.stats() == SpanStats(0, 1, 0, 0)
    sink.error = None
    assert tracer.stats() == SpanStats(1, 2, 2, 3)
    sink.error = OSError("stuck")
    tracer.close()
    assert tracer.failures.counts["closing the spans"] == 1


def test_without_a_receiver_no_span_is_made() -> None:
    tracer, sink = make()
    sink.wants_reports = False
    tracer.on_finished(times_of(*SERVED), REQUEST)
    assert (sink.sent, RequestTracer(parallel=ParallelState()).stats()) == ([], SpanStats())


def test_headers_are_bounded() -> None:
    assert read_trace_parent(None, "a=b") is None
    assert read_trace_parent("00-1", "a=b") == TraceParent("00-1", "a=b")
    long = read_trace_parent("0" * 10_000, "s" * 513)
    assert long == TraceParent("0" * 256, "")
    assert read_trace_parent("0", "s" * 512) == TraceParent("0", "s" * 512)


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:4318/v1/traces", "https://collector/v1/traces", "http://[::1]:4318/otlp/v1/traces"]
)
def test_the_url_of_a_collector_is_accepted(text: str) -> None:
    check_otlp_endpoint(text)


@pytest.mark.parametrize(
    "text",
    ["localhost:4317", "grpc://host:4317/x", "http://", "http:///v1/traces", "http://h:99999/v1/traces", "http://[::1/t",
     "http://host:4318", "http://host:4318/"],
)  # fmt: skip
def test_any_other_address_of_a_collector_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_otlp_endpoint(text)
    assert raised.value.field == "otlp_traces_endpoint"
    assert raised.value.hint == "give the whole URL, for example http://127.0.0.1:4318/v1/traces"
