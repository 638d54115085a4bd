"""Measure a relay between a publisher and a reader process: the delay that it adds, and its memory per block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import zmq

from benchmarks.measure import Goal, Measurement, Scale, percentile
from benchmarks.processes import start_child
from benchmarks.workloads import SHAPES, Shape
from scheduler_components import BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher

NAME = "relay"
_BATCHES_PER_S = 2_000
_SECONDS = 10
_STANDING = 4_000
"""Batches whose blocks are cached. Blocks of older batches are removed, as in a full cache."""

_BLOCKS = 400_000
_WINDOW = 1_000
_POLL_S = 0.05
_READY_S = 60.0


class _Relayed:
    """An engine's publisher in this process and its relay in another."""

    def __init__(self, directory: str) -> None:
        self.engine = ZmqEventPublisher(
            0, f"ipc://{directory}/engine", f"ipc://{directory}/engine_replay", _WINDOW, config=KVEventsConfig()
        )
        config = {"endpoint": f"ipc://{directory}/relay", "replay_endpoint": f"ipc://{directory}/relay_replay"}
        config |= {"buffer_steps": _WINDOW}  # type: ignore[dict-item]
        source = f"{self.engine.endpoint},{self.engine.replay_endpoint}"
        command = [sys.executable, "-m", "scheduler_components", "relay", source, "--kv-events-config"]
        self.process = subprocess.Popen([*command, json.dumps(config)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        self.url = words[words.index("says") - 1].removesuffix("/health")
        self.endpoint = config["endpoint"]

    def wait_for(self, sequence: int) -> None:
        """Wait until the relay has published the engine's batch ``sequence`` and all before it."""
        deadline_s = time.monotonic() + _READY_S
        while self._number("kv_stream_last_sequence") < sequence or not self._number("kv_relay_is_whole"):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the relay is at {self._number('kv_stream_last_sequence')}, not {sequence}")
            time.sleep(_POLL_S)

    def _number(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return next((float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{")), -1.0)

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.engine.close(5.0)


@contextmanager
def _relayed() -> Iterator[_Relayed]:
    with TemporaryDirectory() as directory:
        relayed = _Relayed(directory)
        try:
            yield relayed
        finally:
            relayed.close()


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peer relays
    """Measure the added delay at 2,000 batches per second, and the memory of a live block."""
    return [*_delay_rows(scale), *_memory_rows(scale)]


def _delay_rows(scale: Scale) -> list[Measurement]:
    rows = []
    for name in ("1 block", "16 events"):
        found = [_added_delays_ms(SHAPES[name], scale.of(_SECONDS)) for _ in range(scale.turns)]
        for percent, goal in ((50, None), (99, Goal(2.0))):
            what = f"added delay p{percent}, {_BATCHES_PER_S:,} batches/s of {name}"
            ours = [percentile([through - direct for direct, through in each], percent) for each in found]
            direct = [percentile([direct for direct, _ in each], percent) for each in found]
            rows.append(Measurement(NAME, what, "ms", ours, {"direct": direct}, goal))
    return rows


def _added_delays_ms(shape: Shape, seconds: int) -> list[tuple[float, float]]:
    """Return each batch's delay in milliseconds, from the engine and through the relay."""
    with _relayed() as relayed:
        count = seconds * _BATCHES_PER_S
        arguments = {"endpoints": [relayed.engine.endpoint, relayed.endpoint], "expected": count}
        with start_child("bench_relay", msgspec.json.encode(arguments)) as reader:
            assert reader.stdout is not None
            step = 0
            while not _is_ready(reader):
                relayed.engine.publish(KVEventBatch(0.0, _stored(shape, step)))
                relayed.engine.idle()
                step += 1
                time.sleep(_POLL_S)
            _publish_evenly(relayed.engine, shape, step, count)
            output, _ = reader.communicate(timeout=_READY_S)
        return msgspec.msgpack.decode(output, type=list[tuple[float, float]])


def _is_ready(reader: subprocess.Popen[bytes]) -> bool:
    assert reader.stdout is not None
    os.set_blocking(reader.stdout.fileno(), False)
    try:
        return reader.stdout.readline() == b"ready\n"
    finally:
        os.set_blocking(reader.stdout.fileno(), True)


def _publish_evenly(engine: ZmqEventPublisher, shape: Shape, first: int, count: int) -> None:
    begun_s = time.monotonic()
    for number in range(count):
        step = first + number
        events: tuple[BlockStored | BlockRemoved, ...] = _stored(shape, step)
        if number > _STANDING:
            gone = tuple(each for event in _stored(shape, step - _STANDING) for each in event.block_hashes)
            events = (*events, BlockRemoved(gone, "GPU"))
        due_in_s = begun_s + number / _BATCHES_PER_S - time.monotonic()
        if due_in_s > 0:
            time.sleep(due_in_s)
        engine.publish(KVEventBatch(time.time(), events))
        engine.idle()


def _stored(shape: Shape, step: int) -> tuple[BlockStored, ...]:
    return tuple(BlockStored(**fields) for fields in shape.fields(step, tuple))


def _memory_rows(scale: Scale) -> list[Measurement]:
    if not Path("/proc/self/statm").is_file():
        return []
    shapes = (Shape("32 blocks per event", 1, 32), Shape("1 block per event", 1, 1))
    rows = []
    for shape, goal in zip(shapes, (Goal(250.0), None), strict=True):
        found = [_bytes_per_block(shape, scale.of(_BLOCKS)) for _ in range(max(1, scale.turns // 2))]
        rows.append(Measurement(NAME, f"memory, {shape.name}", "bytes a live block", found, {}, goal))
    return rows


def _bytes_per_block(shape: Shape, num_blocks: int) -> float:
    """Return the growth of the relay's process per block, after its replay buffer and libraries are warm."""
    num_steps = num_blocks // shape.blocks_per_event
    with _relayed() as relayed:
        step = 0
        before = 0
        for count in (max(2 * _WINDOW, num_steps // 4), num_steps):
            before = relayed.resident_bytes() if step else 0
            for _ in range(count):
                relayed.engine.publish(KVEventBatch(time.time(), _stored(shape, step)))
                relayed.engine.idle()
                step += 1
                if step % _WINDOW == 0:  # no faster than the relay, because waiting batches are no cost of a block
                    relayed.wait_for(relayed.engine.stats().last_sequence)
            relayed.wait_for(relayed.engine.stats().last_sequence)
        return (relayed.resident_bytes() - before) / (num_steps * shape.blocks_per_event)


# --- the process that reads the stream ---


_SILENCE_MS = 10_000


class _Arguments(msgspec.Struct, frozen=True):
    endpoints: tuple[str, str]
    expected: int


def _receive(sockets: list[zmq.Socket[bytes]], expected: int) -> list[tuple[float, float]]:
    """Return the delays from a batch's timestamp in milliseconds, per stream. A relay keeps the timestamp."""
    read_time = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, Any]).decode
    delays: list[dict[float, float]] = [{}, {}]
    heard = [False, False]
    is_ready = False
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    while min(map(len, delays)) < expected:
        ready = dict(poller.poll(_SILENCE_MS))
        if not ready:
            break
        for number, socket in enumerate(sockets):
            while socket in ready:
                try:
                    payload = socket.recv_multipart(zmq.NOBLOCK)[-1]
                except zmq.Again:
                    break
                arrived_s = time.time()
                sent_s = read_time(payload)[0]
                heard[number] = True
                if sent_s:
                    delays[number][sent_s] = 1e3 * (arrived_s - sent_s)
        if all(heard) and not is_ready:
            is_ready = True
            sys.stdout.buffer.write(b"ready\n")
            sys.stdout.flush()
    direct, through = delays
    return [(delay, through[sent_s]) for sent_s, delay in direct.items() if sent_s in through]


def main() -> None:
    """Subscribe to the streams of the command line."""
    arguments = msgspec.json.decode(sys.argv[1], type=_Arguments)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for endpoint in arguments.endpoints:
        socket = context.socket(zmq.SUB)
        socket.rcvhwm = 0
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(endpoint)
        sockets.append(socket)
    found = _receive(sockets, arguments.expected)
    context.destroy()
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
