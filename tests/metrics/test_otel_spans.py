"""Spans leave on a thread, for an exporter in memory and for a real OTLP endpoint; nothing waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from kit.waiting import wait_until

from scheduler_components import ConfigError, ForkedPublisherError, ParallelState
from scheduler_components.ports import NullSpanSink
from scheduler_components.values import RequestSpan, SpanStats, TraceParent

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` installs it")

from kit.otlp_collector import open_collector
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from scheduler_components.metrics.otel_spans import SPAN_NAME, OtelSpanSink, open_otel_span_sink

pytestmark = [pytest.mark.threads, pytest.mark.sockets]

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = TraceParent(f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=1")
NOT_SAMPLED = TraceParent(f"00-{TRACE_ID}-{PARENT_ID}-00")


def span(rid: str = "r", parent: TraceParent | None = None, *, is_error: bool = False) -> RequestSpan:
    attributes = {"gen_ai.request.id": rid, "gen_ai.latency.e2e": 0.5, "gen_ai.response.finish_reasons": ("stop",)}
    return RequestSpan(1_000, 2_000, attributes, is_error, parent)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= threads)


def in_memory(*spans: RequestSpan) -> tuple[tuple[ReadableSpan, ...], SpanStats]:
    """Export spans to memory; return them and the counters after the close."""
    exporter = InMemorySpanExporter()
    sink = OtelSpanSink(exporter, service_name="kit")
    sink.start()
    for each in spans:
        sink.send(each)
    sink.close()
    sink.close()
    return exporter.get_finished_spans(), sink.stats()


def test_a_span_has_the_name_times_and_attributes_of_its_request() -> None:
    (found,), stats = in_memory(span())
    assert (found.name, found.kind, found.parent) == (SPAN_NAME, SpanKind.SERVER, None)
    assert (found.start_time, found.end_time, found.status.status_code) == (1_000, 2_000, StatusCode.UNSET)
    assert dict(found.attributes or {}) == span().attributes
    assert found.resource.attributes["service.name"] == "kit"
    assert stats == SpanStats(exported=1)


def test_the_client_is_the_parent() -> None:
    (found,), _ = in_memory(span(parent=SAMPLED))
    assert found.context is not None
    assert found.parent is not None
    assert (f"{found.context.trace_id:032x}", f"{found.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert found.context.trace_state.get("vendor") == "1"


def test_a_client_that_does_not_sample_gets_no_span() -> None:
    found, stats = in_memory(span("a", NOT_SAMPLED), span("b", SAMPLED))
    assert [(each.attributes or {})["gen_ai.request.id"] for each in found] == ["b"]
    assert stats == SpanStats(exported=1)


@pytest.mark.parametrize(
    "header", ["", "00", f"00-{'0' * 32}-{PARENT_ID}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01", "\0" * 9]
)
def test_a_header_that_is_not_valid_begins_a_new_trace_and_is_counted(header: str) -> None:
    (found,), stats = in_memory(span(parent=TraceParent(header)))
    assert found.parent is None
    assert stats == SpanStats(exported=1, parents_refused=1)


def test_a_failed_request_is_an_error() -> None:
    (found,), _ = in_memory(span(is_error=True))
    assert found.status.status_code is StatusCode.ERROR


class GatedExporter(SpanExporter):
    """Waits in each export until it may go on, and then fails or succeeds."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.batches: list[int] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append(len(spans))
        self.entered.set()
        assert self.go.wait(30)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        self.go.set()


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    exporter = GatedExporter()
    sink = OtelSpanSink(exporter, service_name="kit", max_spans=4)
    sink.start()
    for _ in range(4):
        sink.send(span())
    assert exporter.entered.wait(30)  # a full queue wakes the thread
    for _ in range(10):
        sink.send(span())
    assert sink.stats() == SpanStats(dropped=6, pending=4)
    exporter.go.set()
    sink.close()
    assert sink.stats() == SpanStats(exported=8, dropped=6)
    sink.send(span())
    assert sink.stats() == SpanStats(exported=8, dropped=7)


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("broken")])
def test_what_an_exporter_fails_to_deliver_is_counted_and_the_next_batch_is_tried(
    result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = GatedExporter(result)
    exporter.go.set()
    sink = OtelSpanSink(exporter, service_name="kit", max_spans=2)
    sink.start()
    sink.send(span())
    sink.send(span())
    wait_until(lambda: sink.stats().dropped == 2)
    exporter.result = SpanExportResult.SUCCESS
    sink.send(span())
    sink.close()
    assert sink.stats() == SpanStats(exported=1, dropped=2)
    assert (sink.failures.total, len(caplog.records)) == (1, 2)  # the failure, and its end


def test_a_span_that_the_sdk_cannot_make_costs_its_batch_and_not_the_thread() -> None:
    broken = RequestSpan(1_000, 2_000, {"gen_ai.request.id": "r"}, False, TraceParent(7))  # type: ignore[arg-type]
    found, stats = in_memory(broken)
    assert (found, stats) == ((), SpanStats(dropped=1))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_a_forked_child_cannot_send() -> None:
    sink = OtelSpanSink(InMemorySpanExporter(), service_name="kit")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sink.close()
            sink.send(span())
        except ForkedPublisherError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    sink.send(span())
    assert sink.stats() == SpanStats(pending=1)


def test_other_ranks_start_nothing() -> None:
    parallel = ParallelState.from_tp_rank(1, tp_size=2)
    assert isinstance(open_otel_span_sink("http://127.0.0.1:1/v1/traces", parallel), NullSpanSink)


def test_a_queue_has_a_size() -> None:
    with pytest.raises(ConfigError, match="max_spans"):
        OtelSpanSink(InMemorySpanExporter(), service_name="kit", max_spans=0)


def test_a_real_endpoint_receives_protobuf(stack: ExitStack) -> None:
    url, found = stack.enter_context(open_collector())
    sink = open_otel_span_sink(url, ParallelState(), service_name="engine-1")
    sink.send(span("r1", SAMPLED, is_error=True))
    sink.close()
    assert sink.stats() == SpanStats(exported=1)
    (resource,) = found
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "engine-1"
    (received,) = resource.scope_spans[0].spans
    assert (received.name, received.kind, received.status.code) == (SPAN_NAME, Span.SPAN_KIND_SERVER, 2)
    assert (received.trace_id.hex(), received.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (received.start_time_unix_nano, received.end_time_unix_nano) == (1_000, 2_000)
    values = {each.key: each.value for each in received.attributes}
    assert values["gen_ai.request.id"].string_value == "r1"
    assert values["gen_ai.latency.e2e"].double_value == 0.5
    assert [each.string_value for each in values["gen_ai.response.finish_reasons"].array_value.values] == ["stop"]


def test_an_endpoint_that_is_gone_costs_its_spans(free_ports: Callable[[int], int]) -> None:
    sink = open_otel_span_sink(f"http://127.0.0.1:{free_ports(1)}/v1/traces", ParallelState())
    sink.send(span())
    sink.close()
    assert sink.stats() == SpanStats(dropped=1)
