"""Over real sockets: a dispatcher reads the newest load or none, never an outdated one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq

from scheduler_components.kv_events import Endpoint
from scheduler_components.load import open_zmq_load_reader, open_zmq_load_sink
from scheduler_components.load.load_stat import decode_load_stat
from scheduler_components.load.zmq_load import ZmqLoadReader
from scheduler_components.metrics import ZmqReportSink
from scheduler_components.testing import VirtualClock
from scheduler_components.values import LoadSnapshot

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

Eventually = Callable[[Callable[[], object]], None]
LoadSink = ZmqReportSink[LoadSnapshot]


@pytest.fixture(params=["tcp", "ipc"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoadSink]:
    text = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/load"
    sink = open_zmq_load_sink(Endpoint.parse(text))
    yield sink
    sink.close()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(0.0)


@pytest.fixture
def reader(sink: LoadSink, clock: VirtualClock) -> Iterator[ZmqLoadReader]:
    reader = open_zmq_load_reader([sink.endpoint], clock=clock)
    yield reader
    reader.close()


def connect(sink: LoadSink, reader: ZmqLoadReader, eventually: Eventually) -> None:
    def arrived() -> bool:
        sink.send(LoadSnapshot(num_running_reqs=1))
        return bool(reader.read().samples)

    eventually(arrived)


def newest(reader: ZmqLoadReader) -> int:
    return reader.view.samples[0].stat.sequence


def test_frames_are_those_that_routers_read(
    sink: LoadSink, subscribe: Callable[..., zmq.Socket[bytes]], eventually: Eventually
) -> None:
    socket = subscribe(sink.endpoint, b"load")

    def arrived() -> int:
        sink.send(LoadSnapshot(num_running_reqs=3, dp_rank=2))
        return socket.poll(1)

    eventually(arrived)
    topic, sequence, payload = socket.recv_multipart()
    stat = decode_load_stat(payload)
    assert topic == b"load"
    assert int.from_bytes(sequence, "big") == stat.sequence
    assert (stat.num_running_reqs, stat.attn_dp_rank) == (3, 2)


def test_the_newest_waiting_sample_is_read(sink: LoadSink, reader: ZmqLoadReader, eventually: Eventually) -> None:
    connect(sink, reader, eventually)
    for running in range(20):
        sink.send(LoadSnapshot(num_running_reqs=running))

    def read() -> bool:
        reader.read()
        if newest(reader) < sink.sent - 1:
            sink.send(LoadSnapshot(num_running_reqs=19))
        return newest(reader) >= 19

    eventually(read)
    assert reader.reconnects == 0


def test_after_a_stall_no_sample_from_the_stall_is_read(
    sink: LoadSink, reader: ZmqLoadReader, clock: VirtualClock, eventually: Eventually
) -> None:
    connect(sink, reader, eventually)
    for _ in range(5_000):  # far more than fits on the way
        sink.send(LoadSnapshot(num_running_reqs=7))
    before_stall, last_of_stall = newest(reader), sink.sent - 1
    clock.now_s += 30.0
    read: list[int] = []

    def first_after_stall() -> bool:
        reader.read()
        if newest(reader) != before_stall:
            read.append(newest(reader))
        else:
            sink.send(LoadSnapshot(num_running_reqs=8))
        return bool(read)

    eventually(first_after_stall)
    assert read[0] > last_of_stall
    assert reader.reconnects == 1


STALLING_READER = """
import sys
from scheduler_components.load.zmq_load import open_zmq_load_reader
reader = open_zmq_load_reader([sys.argv[1]], stall_s=0.5)
while True:
    for sample in reader.read(timeout_s=5.0).samples.values():
        print(sample.stat.sequence, sample.received_s, flush=True)
"""


@dataclass
class Printed:
    """What a process has printed so far: (sequence, time of reading) a line."""

    descriptor: int
    text: bytes = b""
    samples: list[tuple[int, float]] = field(default_factory=list)

    def read(self) -> list[tuple[int, float]]:
        try:
            self.text += os.read(self.descriptor, 65536)
        except BlockingIOError:
            return self.samples
        *lines, self.text = self.text.split(b"\n")
        self.samples.extend((int(line.split()[0]), float(line.split()[1])) for line in lines)
        return self.samples


def test_a_stopped_process_continues_with_the_newest_sample(sink: LoadSink, eventually: Eventually) -> None:
    def send_until(condition: Callable[[], object]) -> None:
        def step() -> object:
            sink.send(LoadSnapshot(num_running_reqs=1))
            return condition()

        eventually(step)

    with subprocess.Popen([sys.executable, "-c", STALLING_READER, sink.endpoint], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        printed = Printed(process.stdout.fileno())
        send_until(lambda: len(printed.read()) > 5)
        os.kill(process.pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        send_until(lambda: time.monotonic() - stopped_s > 1.5)
        last_of_stall, continued_s = sink.sent - 1, time.monotonic()
        os.kill(process.pid, signal.SIGCONT)
        send_until(lambda: printed.read()[-1][1] > continued_s)
        process.kill()
    assert min(sequence for sequence, read_s in printed.samples if read_s > continued_s) > last_of_stall


def test_a_reader_that_never_reads_delays_no_other(
    sink: LoadSink, reader: ZmqLoadReader, subscribe: Callable[..., zmq.Socket[bytes]], eventually: Eventually
) -> None:
    subscribe(sink.endpoint)
    connect(sink, reader, eventually)
    for _ in range(20_000):
        sink.send(LoadSnapshot())
    connect_at = sink.sent

    def reads_on() -> bool:
        sink.send(LoadSnapshot())
        reader.read()
        return newest(reader) >= connect_at

    eventually(reads_on)


def test_invalid_messages_are_dropped_alone(tmp_path: Path, eventually: Eventually) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hostile = context.socket(zmq.PUB)
    hostile.bind(f"ipc://{tmp_path}/hostile")
    reader = open_zmq_load_reader([f"ipc://{tmp_path}/hostile"])

    def refused() -> bool:
        hostile.send(b"load")
        hostile.send_multipart([b"load", b"", b"\xc1"])
        hostile.send_multipart([b"loader", b"", b""])
        reader.read(0.01)
        return reader.reports.bad > 5

    eventually(refused)
    assert not reader.view.samples
    reader.close()
    context.destroy(linger=0)


def test_a_restarted_publisher_is_followed_immediately(
    tmp_path: Path, eventually: Eventually, clock: VirtualClock
) -> None:
    endpoint = Endpoint.parse(f"ipc://{tmp_path}/load")
    first = open_zmq_load_sink(endpoint)
    reader = open_zmq_load_reader([str(endpoint)], clock=clock)
    for _ in range(100):
        first.send(LoadSnapshot())
    connect(first, reader, eventually)
    first.close()
    second = open_zmq_load_sink(endpoint)

    def follows() -> bool:
        second.send(LoadSnapshot(num_running_reqs=42))
        return reader.read().samples[0].stat.num_running_reqs == 42

    eventually(follows)
    second.close()
    reader.close()
