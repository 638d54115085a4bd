"""Over real sockets: planners receive every forward pass, and know of those that they missed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from kit.waiting import wait_until

from scheduler_components import ConfigError, ParallelState, StartError
from scheduler_components.metrics import (
    ZmqForwardPassReader,
    ZmqForwardPassSink,
    open_zmq_forward_pass_reader,
    open_zmq_forward_pass_sink,
)
from scheduler_components.metrics.forward_pass_metrics import encode_forward_pass
from scheduler_components.ports import NullForwardPassSink
from scheduler_components.testing.golden import forward_pass_vectors
from scheduler_components.values import ForwardPassMetrics

pytestmark = pytest.mark.sockets

PROBE = ForwardPassMetrics(worker_id="probe")


def opened(endpoint: str, **parallel: int) -> ZmqForwardPassSink:
    sink = open_zmq_forward_pass_sink(endpoint, ParallelState(**parallel))
    assert isinstance(sink, ZmqForwardPassSink)
    return sink


@pytest.fixture(params=["tcp", "ipc"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZmqForwardPassSink]:
    sink = opened("tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/fpm", dp_size=3, dp_rank=2)
    yield sink
    sink.close()


@pytest.fixture
def reader(sink: ZmqForwardPassSink) -> Iterator[ZmqForwardPassReader]:
    """A reader whose subscription has arrived."""
    reader = open_zmq_forward_pass_reader([sink.endpoint])
    wait_until(reader.receive, poll=lambda: sink.send(PROBE))
    while reader.receive(0.05):
        pass
    yield reader
    reader.close()


def test_the_reader_receives_every_pass_in_order(sink: ZmqForwardPassSink, reader: ZmqForwardPassReader) -> None:
    sent = [ForwardPassMetrics(worker_id="w", dp_rank=2, counter_id=number, wall_time=0.5) for number in range(50)]
    for metrics in sent:
        sink.send(metrics)
    found: list[ForwardPassMetrics] = []
    wait_until(lambda: len(found) == 50, poll=lambda: found.extend(reader.receive(0.05, limit=7)))
    assert found == sent
    assert (reader.missed, reader.bad) == (0, 0)


def test_gaps_count_per_replica_and_a_restart_is_none(sink: ZmqForwardPassSink, reader: ZmqForwardPassReader) -> None:
    for dp_rank, number in [(2, 10), (1, 4), (2, 13), (1, 5), (2, 0), (2, 1)]:
        sink.send(ForwardPassMetrics(dp_rank=dp_rank, counter_id=number))
    received = reader.received
    wait_until(lambda: reader.received == received + 6, poll=lambda: reader.receive(0.05))
    assert reader.missed == 2


def test_the_frames_are_those_of_sglang(sink: ZmqForwardPassSink, subscribe: Callable[..., zmq.Socket[bytes]]) -> None:
    socket = subscribe(sink.endpoint)
    wait_until(lambda: socket.poll(1), poll=lambda: sink.send(PROBE))
    vector = forward_pass_vectors()[0]
    sink.send(vector.metrics)
    while (frames := socket.recv_multipart())[2] == encode_forward_pass(PROBE):
        pass
    assert frames == [b"", vector.metrics.counter_id.to_bytes(8, "big"), vector.payload]


def test_a_message_that_is_not_one_is_counted_and_skipped(open_socket: Callable[[int], zmq.Socket[bytes]]) -> None:
    publisher = open_socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    reader = open_zmq_forward_pass_reader([f"tcp://127.0.0.1:{port}"])
    payload = encode_forward_pass(PROBE)
    try:
        wait_until(lambda: reader.receive(0.01), poll=lambda: publisher.send_multipart([b"", bytes(8), payload]))
        for frames in ([payload], [b"", bytes(8), b"\x90"], [b"", b"\1" * 8, payload], [b"", bytes(8), payload, b""]):
            publisher.send_multipart(frames)
        wait_until(lambda: reader.bad == 4, poll=lambda: reader.receive(0.01))
    finally:
        reader.close()


def test_a_replica_binds_at_its_own_offset(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    port = free_ports(2)
    for base, address in (
        (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"),
        (f"ipc://{tmp_path}/fpm", f"ipc://{tmp_path}/fpm.1"),
    ):
        sink = opened(base, dp_size=2, dp_rank=1)
        assert sink.endpoint == address
        sink.close()
        sink.close()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_reports_nothing_opens_nothing_but_checks_the_address(free_ports: Callable[[int], int]) -> None:
    parallel = ParallelState.from_tp_rank(1, tp_size=2)
    endpoint = f"tcp://127.0.0.1:{free_ports(1)}"
    assert isinstance(open_zmq_forward_pass_sink(endpoint, parallel), NullForwardPassSink)
    opened(endpoint).close()
    with pytest.raises(ConfigError, match="forward_pass_endpoint"):
        open_zmq_forward_pass_sink("inproc://fpm", parallel)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_an_address_in_use_is_refused_and_names_it(transport: str, tmp_path: Path) -> None:
    first = opened("tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{tmp_path}/fpm")
    base = first.endpoint.removesuffix(".0")
    with pytest.raises(StartError, match=r"bound there|cannot bind the forward-pass metrics"):
        open_zmq_forward_pass_sink(base, ParallelState())
    first.close()
    opened(base).close()


@pytest.mark.parametrize("endpoints", [[], ["inproc://fpm"], ["tcp://*:20380"], ["tcp://127.0.0.1:0"]])
def test_an_address_that_cannot_be_dialled_is_refused(endpoints: list[str]) -> None:
    with pytest.raises(ConfigError, match="forward_pass_endpoint"):
        open_zmq_forward_pass_reader(endpoints)


def test_a_closed_sink_raises() -> None:
    sink = opened("tcp://127.0.0.1:0")
    sink.close()
    with pytest.raises(zmq.ZMQError):
        sink.send(PROBE)


@pytest.mark.processes
def test_a_forked_child_neither_sends_nor_closes(tmp_path: Path) -> None:
    script = """
import os, sys
from scheduler_components import ForkedPublisherError, ParallelState
from scheduler_components.metrics import open_zmq_forward_pass_sink
from scheduler_components.values import ForwardPassMetrics

sink = open_zmq_forward_pass_sink(f"ipc://{sys.argv[1]}/fpm", ParallelState())
child = os.fork()
if child == 0:
    try:
        sink.send(ForwardPassMetrics())
    except ForkedPublisherError:
        sink.close()
        os._exit(0)
    os._exit(1)
raised = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
sink.send(ForwardPassMetrics())
bound = os.path.exists(f"{sys.argv[1]}/fpm.0")
sink.close()
sys.exit(0 if raised and bound else 1)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
