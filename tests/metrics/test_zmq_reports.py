"""Over real sockets: reports of every kind arrive whole and in order, and no side blocks the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from kit.waiting import wait_until

from scheduler_components import ConfigError, ParallelState, StartError
from scheduler_components.kv_events import Endpoint
from scheduler_components.load import open_zmq_load_reader, open_zmq_load_sink
from scheduler_components.metrics import (
    ZmqReportReader,
    ZmqReportSink,
    open_zmq_forward_pass_reader,
    open_zmq_forward_pass_sink,
    open_zmq_kv_metrics_receiver,
)
from scheduler_components.metrics.forward_pass_metrics import encode_forward_pass
from scheduler_components.metrics.zmq_kv_metrics import encode_kv_metrics, open_zmq_kv_metrics_sink
from scheduler_components.values import ForwardPassMetrics, KvMetrics, LoadSnapshot

pytestmark = pytest.mark.sockets

ADDRESSES = ("tcp://127.0.0.1:0", "ipc://{}/reports")

BINDERS: dict[str, Callable[[str], Any]] = {
    "load": lambda text: open_zmq_load_sink(Endpoint.parse(text)),
    "forward passes": lambda text: open_zmq_forward_pass_sink(text.removesuffix(".0"), ParallelState()),
    "KV metrics": open_zmq_kv_metrics_receiver,
}
"""What binds an address of each kind of reports."""

binders = pytest.mark.parametrize("kind", BINDERS)
addresses = pytest.mark.parametrize("address", ADDRESSES)


@pytest.fixture(params=ADDRESSES)
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZmqReportReader[KvMetrics]]:
    receiver = open_zmq_kv_metrics_receiver(request.param.format(tmp_path))
    yield receiver
    receiver.close()


@pytest.fixture
def pusher(receiver: ZmqReportReader[KvMetrics]) -> Iterator[ZmqReportSink[KvMetrics]]:
    """A sink whose connection is there."""
    sink = open_zmq_kv_metrics_sink(receiver.endpoint)
    wait_until(lambda: sink.sent, poll=lambda: sink.send(KvMetrics()))
    yield sink
    sink.close()


@pytest.fixture(params=ADDRESSES)
def publisher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZmqReportSink[ForwardPassMetrics]]:
    sink = open_zmq_forward_pass_sink(request.param.format(tmp_path), ParallelState(dp_size=3, dp_rank=2))
    assert isinstance(sink, ZmqReportSink)
    yield sink
    sink.close()


@pytest.fixture
def reader(publisher: ZmqReportSink[ForwardPassMetrics]) -> Iterator[ZmqReportReader[ForwardPassMetrics]]:
    """A reader whose subscription has arrived."""
    reader = open_zmq_forward_pass_reader([publisher.endpoint])
    wait_until(reader.receive, poll=lambda: publisher.send(ForwardPassMetrics(worker_id="probe")))
    while reader.receive(0.05):
        pass
    yield reader
    reader.close()


def test_a_reader_receives_every_published_report_in_order(
    publisher: ZmqReportSink[ForwardPassMetrics], reader: ZmqReportReader[ForwardPassMetrics]
) -> None:
    sent = [ForwardPassMetrics(worker_id="w", dp_rank=2, counter_id=number, wall_time=0.5) for number in range(50)]
    for metrics in sent:
        publisher.send(metrics)
    found: list[ForwardPassMetrics] = []
    wait_until(lambda: len(found) == 50, poll=lambda: found.extend(reader.receive(0.05, limit=7)))
    assert found == sent
    assert (reader.missed, reader.bad) == (0, 0)


def test_gaps_count_per_sender_and_a_restart_is_none(
    publisher: ZmqReportSink[ForwardPassMetrics], reader: ZmqReportReader[ForwardPassMetrics]
) -> None:
    for dp_rank, number in [(2, 10), (1, 4), (2, 13), (1, 5), (2, 0), (2, 1)]:
        publisher.send(ForwardPassMetrics(dp_rank=dp_rank, counter_id=number))
    received = reader.received
    wait_until(lambda: reader.received == received + 6, poll=lambda: reader.receive(0.05))
    assert reader.missed == 2


def test_a_receiver_reads_every_pushed_report_and_at_most_its_limit_per_call(
    pusher: ZmqReportSink[KvMetrics], receiver: ZmqReportReader[KvMetrics]
) -> None:
    before = pusher.sent
    for slots in range(20):
        pusher.send(KvMetrics(request_active_slots=slots + 1, data_parallel_rank=3))
    assert pusher.sent == before + 20
    calls: list[list[KvMetrics]] = []
    wait_until(lambda: receiver.received == pusher.sent, poll=lambda: calls.append(receiver.receive(0.01, limit=3)))
    assert max(map(len, calls)) <= 3
    arrived = [report for call in calls for report in call]
    assert arrived[-20:] == [KvMetrics(request_active_slots=slots + 1, data_parallel_rank=3) for slots in range(20)]


def test_without_a_receiver_every_report_is_dropped_and_counted(tmp_path: Path) -> None:
    sink = open_zmq_kv_metrics_sink(f"ipc://{tmp_path}/unread")
    for _ in range(5000):
        sink.send(KvMetrics())
    assert (sink.sent, sink.dropped) == (0, 5000)
    sink.close()


def test_the_queue_of_a_receiver_that_never_reads_is_bounded(pusher: ZmqReportSink[KvMetrics]) -> None:
    for _ in range(50_000):
        pusher.send(KvMetrics())
    assert pusher.dropped > 25_000


_PASS, _SLOTS = encode_forward_pass(ForwardPassMetrics()), encode_kv_metrics(KvMetrics())


def test_a_message_that_is_no_report_is_counted_and_skipped(
    receiver: ZmqReportReader[KvMetrics], open_socket: Callable[[int], zmq.Socket[bytes]]
) -> None:
    push = open_socket(zmq.PUSH)
    push.connect(receiver.endpoint)
    for frames in ([b"\xc1 not msgpack"], [_SLOTS, _SLOTS], [_SLOTS]):
        push.send_multipart(frames)
    wait_until(lambda: receiver.receive(0.01))
    assert (receiver.received, receiver.bad) == (1, 2)

    publisher = open_socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    reader = open_zmq_forward_pass_reader([f"tcp://127.0.0.1:{port}"])
    wait_until(lambda: reader.receive(0.01), poll=lambda: publisher.send_multipart([b"", bytes(8), _PASS]))
    for frames in ([_PASS], [b"", bytes(8), b"\x90"], [b"", b"\1" * 8, _PASS], [b"", bytes(8), _PASS, b""]):
        publisher.send_multipart(frames)
    wait_until(lambda: reader.bad == 4, poll=lambda: reader.receive(0.01))
    reader.close()


@binders
@addresses
def test_an_address_in_use_is_refused_and_names_it(kind: str, address: str, tmp_path: Path) -> None:
    if kind == "KV metrics" and address.startswith("ipc"):
        pytest.skip("libzmq takes over the path")
    first = BINDERS[kind](address.format(tmp_path))
    with pytest.raises(StartError, match=r"127\.0\.0\.1|reports"):
        BINDERS[kind](first.endpoint)
    first.close()
    BINDERS[kind](first.endpoint).close()


@pytest.mark.parametrize("kind", ["load", "forward passes"])
def test_a_closed_sink_counts_reports_as_dropped_and_leaves_no_file(kind: str, tmp_path: Path) -> None:
    sink = BINDERS[kind](f"ipc://{tmp_path}/reports")
    pusher = open_zmq_kv_metrics_sink(f"ipc://{tmp_path}/unread")
    for each, report in ((sink, {"load": LoadSnapshot()}.get(kind, ForwardPassMetrics())), (pusher, KvMetrics())):
        each.close()
        each.close()
        each.send(report)
        assert (each.sent, each.dropped) == (0, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("endpoints", [[], ["tcp://*:5600"], ["tcp://127.0.0.1:0"], ["inproc://x"], ["nonsense"]])
def test_a_reader_needs_addresses_that_can_be_dialled(endpoints: list[str]) -> None:
    with pytest.raises(ConfigError, match="load_endpoint"):
        open_zmq_load_reader(endpoints)
    with pytest.raises(ConfigError, match="forward_pass_endpoint"):
        open_zmq_forward_pass_reader(endpoints)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://127.0.0.1:0", "inproc://x", "nonsense"])
def test_a_pusher_needs_an_address(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="metrics_endpoint"):
        open_zmq_kv_metrics_sink(endpoint)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["load", "forward passes"])
def test_a_forked_child_neither_sends_nor_closes(kind: str, tmp_path: Path) -> None:
    script = """
import os, sys
from scheduler_components import ForkedPublisherError, ParallelState
from scheduler_components.kv_events import Endpoint
from scheduler_components.load import open_zmq_load_sink
from scheduler_components.metrics import open_zmq_forward_pass_sink
from scheduler_components.values import ForwardPassMetrics, LoadSnapshot

kind, address = sys.argv[1:]
if kind == "load":
    sink, report, path = open_zmq_load_sink(Endpoint.parse(f"ipc://{address}")), LoadSnapshot(), address
else:
    sink, report = open_zmq_forward_pass_sink(f"ipc://{address}", ParallelState()), ForwardPassMetrics()
    path = f"{address}.0"
child = os.fork()
if child == 0:
    try:
        sink.send(report)
    except ForkedPublisherError:
        sink.close()
        os._exit(0)
    os._exit(1)
raised = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
sink.send(report)
bound = os.path.exists(path)
sink.close()
sys.exit(0 if raised and bound else 1)
"""
    subprocess.run([sys.executable, "-c", script, kind, f"{tmp_path}/reports"], check=True, timeout=60)
