"""The doctor finds each way in which a worker can be wrong, and nothing on a sound one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import pytest
import zmq

from observability import DoctorOptions, check_worker
from observability.doctor import CheckResult, Severity, diagnose_stream, exit_code, render_report_json
from observability.kv_stream import StreamState, StreamStats
from scheduler_components import BlockStored, ConfigError, KVEventBatch
from scheduler_components.kv_events import Endpoint, KVEventsConfig, StreamAddress, ZmqEventPublisher
from scheduler_components.load import open_zmq_load_sink
from scheduler_components.values import LoadSnapshot

pytestmark = pytest.mark.sockets

Serve = Callable[[dict[str, tuple[int, bytes]]], str]

QUICK = DoctorOptions(timeout_s=0.5, listen_s=1.5)
PAGES = {
    "/health": (200, b"ok"),
    "/v1/loads": (200, b'{"loads": [{"dp_rank": 0}]}'),
    "/metrics": (200, b"sglang:num_running_reqs 0\n"),
}


def open_publisher(stack: ExitStack, rank: int = 0, **options: object) -> ZmqEventPublisher:
    """A publisher of ``rank`` with one batch out; the batch names that rank."""
    defaults = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv", "bind": True}
    publisher = ZmqEventPublisher(rank, config=KVEventsConfig(**(defaults | options)))
    stack.callback(publisher.shutdown)
    publisher.publish(KVEventBatch(ts=time.time(), events=(BlockStored((1,), None, (1, 2), 2, None),)))
    return publisher


def port(endpoint: str | None) -> int | None:
    return urlsplit(endpoint).port if endpoint else None


def described(publisher: ZmqEventPublisher, **change: object) -> dict[str, tuple[int, bytes]]:
    """The pages of a worker that advertises ``publisher``, with one lie or none."""
    kv_events = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": port(publisher.endpoint),
        "replay_endpoint_port_base": port(publisher.replay_endpoint),
        "topic": "kv",
        "block_size": 2,
        "dp_size": 1,
    }
    return PAGES | {"/server_info": (200, json.dumps({"kv_events": kv_events | change}).encode())}


def troubles(report: list[CheckResult]) -> list[CheckResult]:
    return [result for result in report if result.severity is not Severity.OK]


def the_trouble(report: list[CheckResult]) -> CheckResult:
    (trouble,) = troubles(report)
    assert trouble.hint
    assert str(trouble).count("\n") == 1
    return trouble


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken and does not listen, so that no other process can listen on it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_a_sound_worker_has_nothing_wrong(serve: Serve, stack: ExitStack) -> None:
    report = check_worker(serve(described(open_publisher(stack))), QUICK)
    assert not troubles(report)
    assert exit_code(report) == 0
    assert any("live at batch 0, 1 blocks held" in result.what for result in report)


def test_nobody_at_the_url(closed_port: int) -> None:
    trouble = the_trouble(check_worker(f"http://127.0.0.1:{closed_port}", QUICK))
    assert trouble.severity is Severity.ERROR
    assert "server_info" in trouble.what
    assert (trouble.is_unreachable, exit_code([trouble])) == (True, 3)


def test_who_answers_with_something_else_is_wrong_and_not_unreachable(serve: Serve) -> None:
    report = check_worker(serve({}), QUICK)
    assert exit_code(report) == 1
    report_json = json.loads(render_report_json("http://worker", report))
    assert (report_json["works"], report_json["exit_code"], report_json["checks"][0]["severity"]) == (False, 1, "error")


def test_another_server_at_the_url(serve: Serve) -> None:
    assert "answers 404" in the_trouble(check_worker(serve({}), QUICK)).what
    assert "not JSON" in the_trouble(check_worker(serve({"/server_info": (200, b"<html>")}), QUICK)).what


def test_no_streams_repeats_the_workers_reason(serve: Serve) -> None:
    body = json.dumps({"kv_events": None, "kv_events_error": "endpoint has no port"}).encode()
    report = check_worker(serve(PAGES | {"/server_info": (200, body)}), QUICK)
    assert "endpoint has no port" in the_trouble(report).what
    assert exit_code(report) == 1


def test_a_malformed_descriptor_names_its_field(serve: Serve) -> None:
    body = json.dumps({"kv_events": {"endpoint_host": "*", "endpoint_port_base": 99_999}}).encode()
    assert "endpoint_port_base" in the_trouble(check_worker(serve(PAGES | {"/server_info": (200, body)}), QUICK)).what


def test_a_warning_of_the_worker_is_repeated(serve: Serve, stack: ExitStack) -> None:
    pages = described(open_publisher(stack))
    info = json.loads(pages["/server_info"][1]) | {"kv_events_warning": "the publisher connects"}
    report = check_worker(serve(pages | {"/server_info": (200, json.dumps(info).encode())}), QUICK)
    (trouble,) = troubles(report)
    assert trouble == CheckResult(Severity.WARNING, "the worker warns: the publisher connects")


def test_a_closed_port_is_named(serve: Serve, stack: ExitStack, closed_port: int) -> None:
    publisher = open_publisher(stack)
    trouble = the_trouble(check_worker(serve(described(publisher, endpoint_port_base=closed_port)), QUICK))
    assert trouble.what == f"rank 0: events port tcp://127.0.0.1:{closed_port}: Connection refused"
    report = check_worker(serve(described(publisher, replay_endpoint_port_base=closed_port)), QUICK)
    assert any("replay port" in result.what and result.severity is Severity.ERROR for result in troubles(report))
    trouble = the_trouble(check_worker(serve(described(publisher, load_endpoint_port_base=closed_port)), QUICK))
    assert (trouble.severity, "load port" in trouble.what) == (Severity.WARNING, True)


class Gauge:
    """A worker's load gauge, on a thread of its own until the test ends."""

    def __init__(self, stack: ExitStack, samples: Iterable[LoadSnapshot]) -> None:
        sink = stack.enter_context(closing(open_zmq_load_sink(Endpoint.parse("tcp://127.0.0.1:0"))))
        self.port = port(sink.endpoint)
        ended = threading.Event()

        def publish_on() -> None:
            while not ended.wait(0.01):
                for sample in samples:
                    sink.send(sample)

        thread = threading.Thread(target=publish_on)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)


def test_what_a_load_gauge_says_is_repeated(serve: Serve, stack: ExitStack) -> None:
    gauge = Gauge(stack, [LoadSnapshot(num_running_reqs=3, num_used_tokens=40, max_total_num_tokens=64)])
    report = check_worker(serve(described(open_publisher(stack), load_endpoint_port_base=gauge.port)), QUICK)
    assert not troubles(report)
    assert any("3 running, 0 waiting, 40 of 64 tokens" in result.what for result in report)


def test_a_load_gauge_that_is_silent_is_a_warning(serve: Serve, stack: ExitStack) -> None:
    gauge = Gauge(stack, [])
    report = check_worker(serve(described(open_publisher(stack), load_endpoint_port_base=gauge.port)), QUICK)
    assert "sends nothing in 0.5 s" in the_trouble(report).what
    assert exit_code(report) == 0


def test_what_is_no_load_on_a_load_port_is_a_warning(serve: Serve, stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    stranger = stack.enter_context(context.socket(zmq.XPUB))
    stranger.bind("tcp://127.0.0.1:*")
    bound = port(stranger.getsockopt_string(zmq.LAST_ENDPOINT))

    def answer_the_subscriber() -> None:
        if stranger.poll(20_000):
            stranger.send_multipart([b"load", b"", b"no sample"])

    thread = threading.Thread(target=answer_the_subscriber)
    thread.start()
    report = check_worker(serve(described(open_publisher(stack), load_endpoint_port_base=bound)), QUICK)
    thread.join()
    assert [result.what.split(":")[0] for result in troubles(report)] == [
        "rank 0",
        "1 messages of the load gauges are no LoadStat",
    ]


def test_every_rank_is_dialled(serve: Serve, stack: ExitStack, closed_port: int) -> None:
    pages = described(open_publisher(stack), endpoint_port_base=closed_port - 1, dp_size=2)
    refused = [result.what for result in troubles(check_worker(serve(pages), QUICK))]
    assert any(what.startswith(f"rank 1: events port tcp://127.0.0.1:{closed_port}") for what in refused)
    assert any("/v1/loads has 1 ranks and 2 streams" in what for what in refused)


def test_a_port_of_another_protocol(serve: Serve, stack: ExitStack) -> None:
    url = serve({})
    pages = described(open_publisher(stack), endpoint_port_base=port(url))
    assert "no ZeroMQ publisher" in the_trouble(check_worker(serve(pages), QUICK)).what


def test_a_replay_channel_that_never_ends(serve: Serve, stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    router = stack.enter_context(context.socket(zmq.ROUTER))
    router.bind("tcp://127.0.0.1:*")
    silent = port(router.getsockopt_string(zmq.LAST_ENDPOINT))
    report = check_worker(serve(described(open_publisher(stack), replay_endpoint_port_base=silent)), QUICK)
    assert any("no end marker" in result.what for result in troubles(report))
    assert exit_code(report) == 1


def test_another_block_size_than_advertised(serve: Serve, stack: ExitStack) -> None:
    trouble = the_trouble(check_worker(serve(described(open_publisher(stack), block_size=16)), QUICK))
    assert "blocks of 2 tokens, 16 are advertised" in trouble.what


def test_another_rank_than_the_ports(serve: Serve, stack: ExitStack) -> None:
    trouble = the_trouble(check_worker(serve(described(open_publisher(stack, rank=3))), QUICK))
    assert "name another rank" in trouble.what


@pytest.mark.parametrize("advertised", ["events", "kv"])  # "kv" begins like it, which is not enough
def test_another_topic_than_advertised(serve: Serve, stack: ExitStack, advertised: str) -> None:
    publisher = open_publisher(stack, topic="kv-of-old")
    examined = threading.Event()

    def publish_on() -> None:
        while not examined.wait(0.01):
            publisher.publish(KVEventBatch(ts=time.time(), events=()))

    thread = threading.Thread(target=publish_on)
    thread.start()
    try:
        report = check_worker(serve(described(publisher, topic=advertised)), QUICK)
    finally:
        examined.set()
        thread.join()
    assert "'kv-of-old'" in the_trouble(report).what


def test_no_replay_is_a_warning(serve: Serve, stack: ExitStack) -> None:
    publisher = open_publisher(stack, replay_endpoint=None)
    report = check_worker(serve(described(publisher)), QUICK)
    assert "a late joiner can never get the whole state" in the_trouble(report).what
    assert exit_code(report) == 0


def test_pages_that_are_missing_are_warnings(serve: Serve, stack: ExitStack) -> None:
    pages = described(open_publisher(stack))
    report = check_worker(serve({"/server_info": pages["/server_info"], "/metrics": (200, b"up 1\n")}), QUICK)
    assert [result.what.split(":")[0].split()[0] for result in troubles(report)] == [
        "/health",
        "/v1/loads",
        "/metrics",
    ]
    assert exit_code(report) == 0


@pytest.mark.parametrize(
    ("text", "openmetrics", "said"),
    [
        ("", "# EOF\n", "is empty"),
        ("# TYPE sglang:num_running_reqs gauge\n", "# EOF\n", "is empty"),
        ("up 1\n", "up 1\n# EOF\n", "has no num_running_reqs"),
        ("num_running_reqs_max 1\n", "# EOF\n", "has no num_running_reqs"),
        (
            '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{tp_rank="0"} 1\n',
            '# TYPE sglang:num_running_reqs gauge\nsglang_num_running_reqs{tp_rank="0"} 1\n# EOF\n',
            "has sglang:num_running_reqs as text, and sglang_num_running_reqs in the form",
        ),
        ("sglang:num_running_reqs 1\n", "# EOF\n", "and no num_running_reqs in the form"),
        ("sglang_num_running_reqs 1\n", "sglang_num_running_reqs 1\n# EOF\n", "stores sglang_num_running_reqs"),
        ("sglang:num_running_reqs 1\n", "sglang:num_running_reqs 1\n# EOF\n", "stores sglang:num_running_reqs"),
    ],
)
def test_what_a_prometheus_would_store_is_judged(serve: Serve, text: str, openmetrics: str, said: str) -> None:
    pages = {"/metrics": (200, text.encode()), "/metrics in OpenMetrics": (200, openmetrics.encode())}
    findings = check_worker(serve(PAGES | pages | {"/server_info": (200, b"{}")}), QUICK)
    (finding,) = [finding for finding in findings if finding.what.startswith("/metrics")]
    assert said in finding.what
    assert finding.severity is (Severity.OK if "stores" in said else Severity.WARNING)


def test_a_text_that_is_no_url_is_the_persons_mistake() -> None:
    with pytest.raises(ConfigError):
        check_worker("worker:30000")


@pytest.mark.parametrize("state", [StreamState.SYNCING, StreamState.LIVE, StreamState.PARTIAL])
def test_a_late_joiner_without_replay_is_warned_of_whatever_the_stream_shows(state: StreamState) -> None:
    report = diagnose_stream(
        attrs.evolve(ADDRESS, replay=None), StreamStats(rank=0, endpoint="tcp://h:1", state=state), {16}
    )
    [warning] = troubles(report)
    assert (warning.severity, "never get the whole state" in warning.what) == (Severity.WARNING, True)


ADDRESS = StreamAddress(
    rank=0,
    events=Endpoint.parse("tcp://127.0.0.1:5557"),
    replay=Endpoint.parse("tcp://127.0.0.1:5657"),
    block_size=16,
)


@pytest.mark.parametrize(
    ("facts", "severity", "words"),
    [
        ({"state": StreamState.SYNCING}, Severity.OK, "nothing was published"),
        ({"state": StreamState.PARTIAL}, Severity.WARNING, "replay window is gone"),
        ({"state": StreamState.RECOVERING}, Severity.WARNING, "still recovering"),
        ({"state": StreamState.LIVE, "decode_errors": 2, "last_error": "nil"}, Severity.ERROR, "unreadable (nil)"),
        ({"state": StreamState.LIVE, "bad_frames": 2}, Severity.ERROR, "not the frames"),
        ({"state": StreamState.LIVE, "unknown_media": 2}, Severity.WARNING, "medium"),
        ({"state": StreamState.LIVE, "gaps": 1, "losses": 1}, Severity.WARNING, "gaps"),
        ({"state": StreamState.LIVE, "lag_s": 900.0}, Severity.WARNING, "stamped 900 s"),
    ],
)
def test_what_a_stream_shows_is_judged(facts: dict[str, object], severity: Severity, words: str) -> None:
    stats = StreamStats(rank=0, endpoint="tcp://127.0.0.1:5557", **facts)
    report = diagnose_stream(ADDRESS, stats, {16})
    assert (report[-1].severity, words in report[-1].what) == (severity, True)


# --- relays and bare endpoints ---


def test_a_relay_that_does_not_know_its_source_is_warned_of(serve: Serve, stack: ExitStack) -> None:
    info = json.loads(described(open_publisher(stack))["/server_info"][1]) | {"relay": {"sources": []}}
    pages = {"/health": (503, b"stream 0 is dead"), "/server_info": (200, json.dumps(info).encode())}
    report = check_worker(serve(pages), QUICK)
    assert [result.what.split(":")[0] for result in troubles(report)] == ["/health", "/metrics"]


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_bare_endpoint_is_checked_without_pages(stack: ExitStack, tmp_path: Path, transport: str) -> None:
    at = {} if transport == "tcp" else {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    publisher = open_publisher(stack, **at)
    report = check_worker(
        publisher.endpoint or "", attrs.evolve(QUICK, replay_endpoint=publisher.replay_endpoint, topic="kv")
    )
    assert [result.severity for result in report] == [Severity.OK] * 4
    assert [result.what.split(" ")[2] for result in report[:2]] == ["events", "replay"]
    assert "live at batch 0, 1 blocks held" in report[-1].what


def test_a_bare_endpoint_without_replay_is_a_warning(stack: ExitStack) -> None:
    report = check_worker(open_publisher(stack).endpoint or "", attrs.evolve(QUICK, listen_s=0.3))
    assert "a late joiner can never get the whole state" in the_trouble(report).what


def test_a_bare_endpoint_of_another_topic_is_an_error(stack: ExitStack) -> None:
    publisher = open_publisher(stack)
    ended = threading.Event()

    def publish_on() -> None:
        while not ended.wait(0.01):
            publisher.publish(KVEventBatch(ts=time.time(), events=()))

    thread = threading.Thread(target=publish_on)
    thread.start()
    try:
        options = attrs.evolve(QUICK, topic="events", replay_endpoint=publisher.replay_endpoint)
        report = check_worker(publisher.endpoint or "", options)
    finally:
        ended.set()
        thread.join()
    assert "it publishes under 'kv'" in the_trouble(report).what


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_bare_endpoint_that_does_not_answer_is_unreachable(closed_port: int, tmp_path: Path, transport: str) -> None:
    target = f"tcp://127.0.0.1:{closed_port}" if transport == "tcp" else f"ipc://{tmp_path}/none"
    trouble = the_trouble(check_worker(target, QUICK))
    assert (trouble.severity, exit_code([trouble])) == (Severity.ERROR, 3)


def test_a_closed_replay_port_of_a_bare_endpoint_is_an_error(stack: ExitStack, closed_port: int) -> None:
    options = attrs.evolve(QUICK, replay_endpoint=f"tcp://127.0.0.1:{closed_port}")
    report = check_worker(open_publisher(stack).endpoint or "", options)
    assert exit_code(report) == 1
    assert any("replay port" in result.what and result.severity is Severity.ERROR for result in report)


@pytest.mark.parametrize("option", [{"topic": "kv"}, {"replay_endpoint": "tcp://127.0.0.1:1"}])
def test_an_option_of_a_bare_endpoint_is_refused_for_a_url(option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="belongs to a bare endpoint"):
        check_worker("http://worker:1", attrs.evolve(QUICK, **option))
