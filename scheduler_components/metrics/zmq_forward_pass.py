"""Forward-pass metrics over ZMQ: a PUB socket per replica, and a reader that counts what it missed.

Source of the frames ``("", counter_id, payload)``: SGLang 0.5.23, and Dynamo's relay, which accepts exactly three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import zmq

from scheduler_components._internal.fork_hook import ForkGuard
from scheduler_components.errors import ConfigError, DecodeError, StartError
from scheduler_components.kv_events import Endpoint
from scheduler_components.kv_events.zmq_sockets import lock_ipc_path, receive_queued
from scheduler_components.metrics.forward_pass_metrics import (
    MAX_FORWARD_PASS_BYTES,
    decode_forward_pass,
    encode_forward_pass,
    forward_pass_endpoint,
    parse_forward_pass_endpoint,
)
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import ForwardPassSink, NullForwardPassSink
from scheduler_components.values import ForwardPassMetrics

__all__ = [
    "ZmqForwardPassReader",
    "ZmqForwardPassSink",
    "open_zmq_forward_pass_reader",
    "open_zmq_forward_pass_sink",
]

_TOPIC = b""

_HIGH_WATER_MARK = 1000
"""Messages queued for a slow reader, half a megabyte; libzmq's default, which SGLang's socket has."""

_MAX_INCOMING_BYTES = 1024
_HANDSHAKE_MS = 2_000
_MAX_WORKERS = 4096
"""Workers whose numbers a reader remembers; beyond them it counts no gaps."""


class ZmqForwardPassSink:
    """The sink of one replica. ``open_zmq_forward_pass_sink`` creates it; one thread uses and closes it.

    Attributes:
        endpoint: the bound address, with port 0 resolved.
    """

    __slots__ = ("_fork_guard", "_release", "_socket", "endpoint")
    wants_forward_passes = True

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, release: Callable[[], None]) -> None:
        self._socket = socket
        self._release = release
        self.endpoint = endpoint
        self._fork_guard = ForkGuard()

    def send(self, metrics: ForwardPassMetrics) -> None:
        """Send one message to every reader with room in its queue; PUB drops it for the others and never blocks.

        Raises:
            ZMQError: the sink is closed.
            ForkedPublisherError: this process is a child of the one that opened the sink.
        """
        self._fork_guard.check()
        number, payload = metrics.counter_id.to_bytes(8, "big"), encode_forward_pass(metrics)
        # Both may raise, which between two frames would join this message with the next one.
        self._socket.send_multipart((_TOPIC, number, payload), zmq.DONTWAIT)

    def close(self) -> None:
        """Close the socket and release its address; does nothing in a forked child. Safe to call twice."""
        if not self._fork_guard.is_forked:
            self._release()

    def __repr__(self) -> str:
        return f"<ZmqForwardPassSink {self.endpoint}>"


def open_zmq_forward_pass_sink(endpoint: str, parallel: ParallelState) -> ForwardPassSink:
    """Bind the PUB socket of this rank's replica. A rank that reports no metrics opens nothing.

    Replica r binds port + r of a tcp address, or the path with the suffix ``.r`` of an ipc address. These are the
    addresses to which Dynamo's relays connect. Every rank checks the address, also one that opens nothing.

    Args:
        endpoint: the engine's base address; with port 0 the system chooses a port for each replica.
        parallel: decides whether this rank sends, and for which replica.

    Raises:
        ConfigError: the address is not one that other processes can reach.
        StartError: the address is in use, or not one of this machine; nothing stays open.
    """
    base = parse_forward_pass_endpoint(endpoint, num_ranks=parallel.kv_stream_count)
    if not parallel.reports_metrics:
        return NullForwardPassSink()
    address = forward_pass_endpoint(base, parallel.kv_stream_index)
    with ExitStack() as undo:
        lock = lock_ipc_path(address.path) if address.transport == "ipc" else None
        if lock is not None:
            undo.callback(lock.release)
        try:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(context.term)
            socket = context.socket(zmq.PUB)
            undo.callback(socket.close, linger=0)
            socket.ipv6 = address.is_ipv6
            socket.sndhwm = _HIGH_WATER_MARK
            socket.maxmsgsize = _MAX_INCOMING_BYTES
            socket.handshake_ivl = _HANDSHAKE_MS
            socket.bind(str(address))
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            hint = "choose a free address of this machine, or stop the process that uses it"
            raise StartError(str(address), f"cannot bind the forward-pass metrics: {error.strerror}", hint) from error
        return ZmqForwardPassSink(socket, bound, undo.pop_all().close)


class ZmqForwardPassReader:
    """Reads the forward-pass metrics of one or several engines. One thread uses and closes it.

    ``open_zmq_forward_pass_reader`` creates it. It reads messages of this kit, of SGLang and of Dynamo.

    Attributes:
        received: messages received and decoded.
        missed: messages that their numbers show to be lost; those before the first message of a worker do not count.
        bad: messages that were not forward-pass metrics, and were skipped.
    """

    __slots__ = ("_context", "_next_of", "_socket", "bad", "missed", "received")

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self._context = context
        self._socket = socket
        self._next_of: dict[tuple[str, int], int] = {}
        self.received = self.missed = self.bad = 0

    def receive(self, timeout_s: float = 0.0, limit: int = 1000) -> list[ForwardPassMetrics]:
        """Return at most ``limit`` messages, oldest first; wait up to ``timeout_s`` for the first one.

        A bad message is counted in ``bad`` and skipped.
        """
        found: list[ForwardPassMetrics] = []
        if not self._socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            return found
        for frames in receive_queued(self._socket, limit):
            try:
                found.append(_metrics_in(frames))
            except DecodeError:
                self.bad += 1
        for metrics in found:
            self._count_gap(metrics)
        self.received += len(found)
        return found

    def _count_gap(self, metrics: ForwardPassMetrics) -> None:
        """Count the messages between the last one of this replica and ``metrics``. A restarted engine counts from 0."""
        key, number = (metrics.worker_id, metrics.dp_rank), metrics.counter_id
        if key in self._next_of or len(self._next_of) < _MAX_WORKERS:
            self.missed += max(0, number - self._next_of.get(key, number))
            self._next_of[key] = number + 1

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self._context.destroy(linger=0)

    def __repr__(self) -> str:
        return f"<ZmqForwardPassReader: {self.received} received, {self.missed} missed, {self.bad} bad>"


def _metrics_in(frames: list[bytes]) -> ForwardPassMetrics:
    if len(frames) != 3:
        raise DecodeError(f"forward-pass metrics in {len(frames)} frames, they are topic, number and payload")
    metrics = decode_forward_pass(frames[2])
    if int.from_bytes(frames[1], "big") != metrics.counter_id:
        raise DecodeError(f"the frame's number {frames[1].hex()} is not that of the message, {metrics.counter_id}")
    return metrics


def open_zmq_forward_pass_reader(endpoints: Iterable[str]) -> ZmqForwardPassReader:
    """Connect to the addresses of all replicas; publishers may start later.

    Args:
        endpoints: one address per replica, with a host that can be dialled. ``/server_info`` lists them.

    Raises:
        ConfigError: an address cannot be dialled, or there is none.
        StartError: the system refused a socket.
    """
    addresses = [Endpoint.parse(text, field="forward_pass_endpoint") for text in endpoints]
    if not addresses:
        raise ConfigError("forward_pass_endpoint", "", "names no replica", "give the address of each replica")
    for address in addresses:
        if address.transport == "inproc":
            raise ConfigError(
                "forward_pass_endpoint", str(address), "is of another context", "give a tcp or ipc address"
            )
        address.resolve_bind(False, field="forward_pass_endpoint")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.ipv6 = any(address.is_ipv6 for address in addresses)
        socket.rcvhwm = _HIGH_WATER_MARK
        socket.maxmsgsize = MAX_FORWARD_PASS_BYTES
        socket.subscribe(_TOPIC)
        for address in addresses:
            socket.connect(str(address))
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        hint = "give addresses that this machine can dial"
        raise StartError(str(addresses[0]), f"cannot dial the forward-pass metrics: {error.strerror}", hint) from error
    return ZmqForwardPassReader(context, socket)
