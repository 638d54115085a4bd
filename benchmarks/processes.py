"""The processes of a benchmark: a scheduler loop, its subscriber, its replay clients, and a crowd of plain subscribers.

``python -m benchmarks.processes KIND ARGUMENT`` is one of them. It reads its argument as JSON and writes its result to
standard output. ``run_loop`` starts the loop, and the loop starts the others.
"""

from __future__ import annotations

import math
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from benchmarks.publishers import BenchmarkedPublisher, open_benchmarked_publisher
from benchmarks.workloads import SHAPES

_ROOT = Path(__file__).parent.parent


class LoopSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a loop process.

    Attributes:
        subject: a name of ``publishers.open_benchmarked_publisher``.
        shape: a name of ``workloads.SHAPES``.
        steps: measured steps, one batch per step.
        loop: what a step does besides its work: ``"waits"`` 1 ms for its device, where it calls ``idle()``;
            ``"releases the GIL"`` for 0.2 ms; or ``"holds the GIL"`` throughout.
        works: whether the loop does other work. Without other work it publishes prepared batches as fast as it can.
        subscribes: start a subscriber process.
        kept: batches published before the loop, for replays or to fill the replay buffer.
        buffer_steps: batches that the publisher keeps for replays.
        pool_steps: steps after which stored blocks are removed, as in a full pool; None for never, so that the pool
            and the publisher's snapshot grow.
        replay: the work of a replay client: ``"none"``, ``"prompt"``, ``"slow"``, ``"loop"`` or ``"last"``.
        num_clients: replay clients, one process per client.
    """

    subject: str
    shape: str
    steps: int
    loop: Literal["waits", "releases the GIL", "holds the GIL"] = "waits"
    works: bool = True
    subscribes: bool = True
    kept: int = 0
    buffer_steps: int = 10_000
    pool_steps: int | None = None
    replay: str = "none"
    num_clients: int = 1


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The measured batches as the subscriber process received them.

    Attributes:
        delays_s: seconds from the batch's timestamp to its arrival, in order of arrival.
        times_s: times of arrival on the wall clock.
    """

    delays_s: list[float]
    times_s: list[float]


class Replays(msgspec.Struct, frozen=True, kw_only=True):
    """The answers that the replay clients received, in order.

    Attributes:
        batches: batches per answer.
        ended: whether each answer reached its end marker.
        first_s: seconds from each request to the first frame of its answer.
        whole_s: seconds from each request to the end marker, or until the client's timeout.
    """

    batches: list[int]
    ended: list[bool]
    first_s: list[float]
    whole_s: list[float]


class LoopResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of the loop process.

    Attributes:
        publish_us, iteration_us: microseconds per step; an iteration excludes the time of making its batch.
        begun_s, ended_s: start and end of the loop on the wall clock.
        calls_cpu_s: processor time of the loop's thread in ``publish()`` and ``idle()``.
        threads_cpu_s: processor time of all other threads, from the first step to the last.
        cpu_to_delivery_s: processor time of the process until the subscriber had everything.
    """

    publish_us: list[float]
    iteration_us: list[float]
    begun_s: float
    ended_s: float
    calls_cpu_s: float = math.nan
    threads_cpu_s: float = math.nan
    cpu_to_delivery_s: float = math.nan
    deliveries: Delivery | None = None
    replays: Replays | None = None

    @property
    def num_undelivered(self) -> float:
        """Return the number of batches that had not arrived at the end of the loop's last step."""
        if self.deliveries is None:
            return math.nan
        return len(self.publish_us) - sum(time_s <= self.ended_s for time_s in self.deliveries.times_s)


def start_child(module: str, *arguments: str | bytes, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m benchmarks.<module> arguments`` with pipes for input and output."""
    words = [each if isinstance(each, str) else each.decode() for each in arguments]
    command = [sys.executable, "-m", f"benchmarks.{module}", *words]
    return subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **pipes)


def run_loop(spec: LoopSpec, *, timeout_s: float = 180.0) -> LoopResult:
    """Run one loop in a separate process, so that its processor time can be measured.

    Raises:
        subprocess.CalledProcessError: the loop failed; its traceback is on standard error.
    """
    with start_child("processes", "loop", msgspec.json.encode(spec)) as loop:
        try:
            output, _ = loop.communicate(timeout=timeout_s)
        finally:
            loop.kill()
    if loop.returncode:
        raise subprocess.CalledProcessError(loop.returncode, f"loop {spec}")
    return msgspec.msgpack.decode(output, type=LoopResult)


def free_endpoints(count: int) -> list[str]:
    """Return free TCP addresses on loopback. The peers cannot report a port that the system chose."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    endpoints = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    return endpoints


# --- the loop ---


_WORK_LOOPS = 4_000
"""About 200 microseconds of Python. A count instead of a time, so that a stolen GIL lengthens the step."""

_DEVICE_S = 0.001
_LET_GO_S = 0.0002
_BETWEEN_S = 0.002
_CHILD_TIMEOUT_S = 120
_SETTLE_S = 1.5
"""After this time the peers' threads have sent and buffered the batches published before."""

_SETTLES = 1_500

R = TypeVar("R")


class Child:
    """A subscriber or replay client. It prints ``ready``, then its result, and ends soon after its input does."""

    def __init__(self, kind: str, argument: object) -> None:
        self._process = start_child("processes", kind, msgspec.json.encode(argument))
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def wait_until_ready(self, meanwhile: Callable[[], None]) -> None:
        """Call ``meanwhile`` every few milliseconds until the child is ready."""
        while not select.select([self._output], [], [], _BETWEEN_S)[0]:
            meanwhile()
        if self._output.readline() != b"ready\n":
            raise RuntimeError("a benchmark's child did not get ready")

    def result(self, kind: type[R]) -> R:
        """Close the child's input and return its result."""
        with self._process:
            try:
                output, _ = self._process.communicate(timeout=_CHILD_TIMEOUT_S)
            finally:
                self._process.kill()
        return msgspec.msgpack.decode(output, type=kind)


def _work() -> int:
    total = 0
    for number in range(_WORK_LOOPS):
        total += number & 7
    return total


def make_batch(subject: BenchmarkedPublisher, spec: LoopSpec, step: int, ts: float) -> Any:
    evicted = None if spec.pool_steps is None or step < spec.pool_steps else step - spec.pool_steps
    return subject.make_batch(subject.make_events(step, evicted), ts)


def _warm_up(subject: BenchmarkedPublisher, spec: LoopSpec) -> None:
    subject.publish(make_batch(subject, spec, 0, 0.0))
    subject.idle()


def run_steps(subject: BenchmarkedPublisher, spec: LoopSpec) -> LoopResult:
    """Run the measured steps of a loop in this process."""
    publish_us, iteration_us = [], []
    clock, cpu, idle, publish = time.perf_counter, time.thread_time, subject.idle, subject.publish
    calls_cpu_s = 0.0
    cpu_before, own_cpu_before, begun_s = time.process_time(), cpu(), time.time()
    for step in range(spec.steps):
        begun = clock()
        _work()
        if spec.loop == "waits":
            device_done = clock() + _DEVICE_S
            cpu_at = cpu()
            idle()
            calls_cpu_s += cpu() - cpu_at
            time.sleep(max(0.0, device_done - clock()))
        elif spec.loop == "releases the GIL":
            time.sleep(_LET_GO_S)
        making = clock()
        batch = make_batch(subject, spec, spec.kept + step, time.time())
        cpu_at = cpu()
        made = clock()
        publish(batch)
        published = clock()
        calls_cpu_s += cpu() - cpu_at
        publish_us.append((published - made) * 1e6)
        iteration_us.append((published - begun - (made - making)) * 1e6)
    threads_cpu_s = time.process_time() - cpu_before - (cpu() - own_cpu_before)
    return LoopResult(
        publish_us=publish_us,
        iteration_us=iteration_us,
        begun_s=begun_s,
        ended_s=time.time(),
        calls_cpu_s=calls_cpu_s,
        threads_cpu_s=threads_cpu_s,
    )


def _publish_all(subject: BenchmarkedPublisher, batches: Sequence[Any]) -> LoopResult:
    begun_s = time.time()
    for batch in batches:
        subject.publish(batch)
    return LoopResult(publish_us=[], iteration_us=[], begun_s=begun_s, ended_s=time.time())


def _measure_loop(subject: BenchmarkedPublisher, spec: LoopSpec, endpoint: str, replay_endpoint: str) -> LoopResult:
    for step in range(spec.kept):
        subject.publish(make_batch(subject, spec, step, 0.0))
        subject.idle()
    time.sleep(_SETTLE_S * min(1.0, spec.kept / _SETTLES))
    subscriber = None
    if spec.subscribes:
        subscriber = Child("subscriber", {"endpoint": endpoint, "expected": spec.steps})
        subscriber.wait_until_ready(lambda: _warm_up(subject, spec))
    asks = {"endpoint": replay_endpoint, "asks": spec.replay, "kept": spec.kept}
    replayers = [Child("replay", asks) for _ in range(spec.num_clients if spec.replay != "none" else 0)]
    for replayer in replayers:
        replayer.wait_until_ready(subject.idle)
    steps = range(0 if spec.works else spec.steps)
    prebuilt = [subject.make_batch(subject.make_events(step), time.time()) for step in steps]
    cpu_before = time.process_time()
    result = run_steps(subject, spec) if spec.works else _publish_all(subject, prebuilt)
    deliveries = subscriber.result(Delivery) if subscriber else None
    cpu_s = time.process_time() - cpu_before
    replays = join_replays([each.result(Replays) for each in replayers])
    return msgspec.structs.replace(result, deliveries=deliveries, replays=replays, cpu_to_delivery_s=cpu_s)


def join_replays(found: Sequence[Replays]) -> Replays | None:
    if not found:
        return None
    return Replays(
        **{field: list(chain.from_iterable(getattr(each, field) for each in found)) for field in _REPLAY_FIELDS}
    )


_REPLAY_FIELDS = Replays.__struct_fields__


def run_loop_process(argument: str) -> None:
    """Run the loop of the command line."""
    spec = msgspec.json.decode(argument, type=LoopSpec)
    endpoint, replay_endpoint = free_endpoints(2)
    subject = open_benchmarked_publisher(spec.subject, SHAPES[spec.shape], endpoint, replay_endpoint, spec.buffer_steps)
    try:
        result = _measure_loop(subject, spec, endpoint, replay_endpoint)
    finally:
        subject.close()
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))


# --- a subscriber, which ends after the expected batches, or when its input has ended and the stream is silent ---


_SILENCE_MS = 3_000
_POLL_MS = 250


class _Subscription(msgspec.Struct, frozen=True):
    endpoint: str
    expected: int


def _receive(socket: zmq.Socket[bytes], expected: int) -> Delivery:
    # Decode the time only, because the subscriber shares the machine with the measured process.
    read_time = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, Any]).decode
    receive, now = super(zmq.Socket, socket).recv, time.time
    delays_s: list[float] = []
    times_s: list[float] = []
    is_ready = False
    while len(times_s) < expected and _wait_for_batch(socket):
        while len(times_s) < expected:
            try:
                receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            receive()
            payload = receive()
            arrived_s = now()
            sent_s = read_time(payload)[0]
            if sent_s:
                delays_s.append(arrived_s - sent_s)
                times_s.append(arrived_s)
            elif not is_ready:
                is_ready = True
                sys.stdout.buffer.write(b"ready\n")
                sys.stdout.flush()
    return Delivery(delays_s=delays_s, times_s=times_s)


def _wait_for_batch(socket: zmq.Socket[bytes]) -> bool:
    """Wait for a batch; return False if no more will arrive."""
    while not socket.poll(_POLL_MS):
        if select.select([sys.stdin], [], [], 0)[0]:
            return bool(socket.poll(_SILENCE_MS))
    return True


def run_subscriber(argument: str) -> None:
    """Subscribe to the stream of the command line."""
    arguments = msgspec.json.decode(argument, type=_Subscription)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.rcvhwm = 0
        socket.subscribe(b"")
        socket.connect(arguments.endpoint)
        found = _receive(socket, arguments.expected)
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


# --- a replay client: it reads promptly, stalls first, asks again until its input ends, or asks for the last batch ---


_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_STALL_S = 1.5
_ANSWER_TIMEOUT_MS = 6_000
_LAST_ASKS = 100
_BETWEEN_ASKS_S = 0.02


class _ReplayRequests(msgspec.Struct, frozen=True):
    endpoint: str
    asks: str
    kept: int


def _ask(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int, stall_s: float, found: Replays) -> None:
    """Request everything from ``start`` on a new connection, and record the answer."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvhwm = 1_000
        dealer.connect(endpoint)
        # An empty request first, so that connecting is not part of the measurement.
        dealer.send_multipart((b"", (1 << 62).to_bytes(8, "big")))
        if dealer.poll(_ANSWER_TIMEOUT_MS):
            dealer.recv_multipart()
        asked_s = time.perf_counter()
        dealer.send_multipart((b"", start.to_bytes(8, "big")))
        first_s, batches, ended = 0.0, 0, False
        time.sleep(stall_s)
        while not ended and dealer.poll(_ANSWER_TIMEOUT_MS):
            sequence, _ = dealer.recv_multipart()[-2:]
            first_s = first_s or time.perf_counter() - asked_s
            ended = sequence == _END_SEQ
            batches += not ended
        found.first_s.append(first_s)
        found.whole_s.append(time.perf_counter() - asked_s)
        found.batches.append(batches)
        found.ended.append(ended)


def run_replay_client(argument: str) -> None:
    """Send the requests of the command line."""
    arguments = msgspec.json.decode(argument, type=_ReplayRequests)
    found = Replays(batches=[], ended=[], first_s=[], whole_s=[])
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.flush()
    with zmq.Context() as context:
        if arguments.asks == "last":
            for _ in range(_LAST_ASKS):
                _ask(context, arguments.endpoint, arguments.kept - 1, 0.0, found)
                time.sleep(_BETWEEN_ASKS_S)
        elif arguments.asks == "loop":
            while not select.select([sys.stdin], [], [], 0)[0]:
                _ask(context, arguments.endpoint, 0, 0.0, found)
        else:
            _ask(context, arguments.endpoint, 0, _STALL_S if arguments.asks == "slow" else 0.0, found)
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


# --- a crowd of plain subscribers: bare TCP with ZMTP 3.0, read twenty times per second to use little time ---


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
_SUBSCRIBE = b"\x00\x01\x01"
_PAUSE_S = 0.05
_CHUNK = 1 << 18


class _Crowd(msgspec.Struct, frozen=True):
    host: str
    port: int
    count: int


def _subscribe_plainly(host: str, port: int) -> socket.socket:
    subscriber = socket.create_connection((host, port))
    subscriber.sendall(_GREETING)
    _read_exactly(subscriber, len(_GREETING))
    subscriber.sendall(b"\x04" + bytes((len(_READY),)) + _READY)
    _flags, size = _read_exactly(subscriber, 2)
    _read_exactly(subscriber, size)
    subscriber.sendall(_SUBSCRIBE)
    return subscriber


def _read_exactly(subscriber: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = subscriber.recv(count - len(data))
        if not part:
            raise ConnectionError("the publisher hung up in the handshake")
        data += part
    return data


def run_crowd(argument: str) -> None:
    """Open the subscriptions of the command line."""
    arguments = msgspec.json.decode(argument, type=_Crowd)
    crowd = [_subscribe_plainly(arguments.host, arguments.port) for _ in range(arguments.count)]
    for subscriber in crowd:
        subscriber.setblocking(False)
    print("ready", flush=True)
    num_bytes = 0
    while True:
        is_over = bool(select.select([sys.stdin], [], [], _PAUSE_S)[0])
        for subscriber in crowd:
            try:
                num_bytes += len(subscriber.recv(_CHUNK))
            except BlockingIOError:
                continue
        if is_over:
            break
    for subscriber in crowd:
        subscriber.close()
    print(num_bytes, flush=True)


KINDS: dict[str, Callable[[str], None]] = {
    "loop": run_loop_process,
    "subscriber": run_subscriber,
    "replay": run_replay_client,
    "crowd": run_crowd,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](sys.argv[2])
