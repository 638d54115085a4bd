"""KvMetrics over ZMQ: schedulers push one msgpack map per report, the serving process pulls them.

Source: SGLang 0.5.x, where every scheduler pushes its ``KvMetrics`` to the serving process over an ipc socket. Here the
payload is msgpack and not pickle, and queues on both sides are bounded.
"""

from __future__ import annotations

import math

import msgspec
import zmq

from scheduler_components._internal.fork_hook import ForkGuard
from scheduler_components.errors import ConfigError, DecodeError, StartError
from scheduler_components.kv_events import Endpoint
from scheduler_components.kv_events.zmq_sockets import receive_queued
from scheduler_components.values import KvMetrics

__all__ = [
    "MAX_KV_METRICS_BYTES",
    "decode_kv_metrics",
    "encode_kv_metrics",
    "parse_kv_metrics_endpoint",
    "ZmqKvMetricsReceiver",
    "ZmqKvMetricsSink",
    "open_zmq_kv_metrics_receiver",
    "open_zmq_kv_metrics_sink",
]

MAX_KV_METRICS_BYTES = 4096
"""Eight numbers with their names take about 250 bytes; the rest is reserved for fields of later versions."""

encode_kv_metrics = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KvMetrics).decode


def decode_kv_metrics(payload: bytes) -> KvMetrics:
    """Decode one report. Unknown fields are skipped, missing ones are 0.

    Raises:
        DecodeError: the payload is not such a map, is too long, or has a negative or infinite number.
    """
    if len(payload) > MAX_KV_METRICS_BYTES:
        raise DecodeError(f"KvMetrics of {len(payload)} bytes, at most {MAX_KV_METRICS_BYTES} are read")
    try:
        metrics = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not KvMetrics: {error}") from error
    for name in KvMetrics.__struct_fields__:
        value = getattr(metrics, name)
        if not 0 <= value < math.inf:
            raise DecodeError(f"KvMetrics.{name} is {value!r}, a count or a share is not")
    return metrics


def parse_kv_metrics_endpoint(endpoint: str, *, bind: bool) -> Endpoint:
    """Parse the address that the serving process binds and schedulers connect to.

    Raises:
        ConfigError: it is not an address, is inproc, or is a wildcard or port 0 to connect to.
    """
    address = Endpoint.parse(endpoint, field="metrics_endpoint")
    if address.transport == "inproc":
        raise ConfigError(
            "metrics_endpoint", endpoint, "does not leave the process", "give an ipc:// or tcp:// address"
        )
    address.resolve_bind(bind, field="metrics_endpoint")
    return address


_HIGH_WATER_MARK = 64
"""Reports to queue on each side. A report replaces the one before it, so a late reader misses little."""

_KERNEL_BUFFER_BYTES = 32 * 1024
"""About 100 reports. By default, megabytes of old reports queue for a reader that stalls."""


class ZmqKvMetricsSink:
    """The sink of a scheduler. ``open_zmq_kv_metrics_sink`` creates it; one thread uses and closes it.

    Attributes:
        sent: reports sent.
        dropped: reports dropped: no receiver, a full queue, or a closed sink.
    """

    __slots__ = ("_context", "_fork_guard", "_socket", "dropped", "sent")
    wants_metrics = True

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self._context = context
        self._socket = socket
        self.sent = 0
        self.dropped = 0
        self._fork_guard = ForkGuard()

    def send(self, metrics: KvMetrics) -> None:
        """Send one report; never blocks.

        Raises:
            ForkedPublisherError: this process is a child of the one that opened the sink.
        """
        self._fork_guard.check()
        try:
            self._socket.send(encode_kv_metrics(metrics), zmq.DONTWAIT)
        except zmq.ZMQError:
            self.dropped += 1
        else:
            self.sent += 1

    def close(self) -> None:
        """Close the socket and discard queued reports, which are outdated. Safe to call twice.

        Does nothing in a forked child, which does not own the socket.
        """
        if not self._fork_guard.is_forked:
            self._context.destroy(linger=0)

    def __repr__(self) -> str:
        return f"<ZmqKvMetricsSink: {self.sent} sent, {self.dropped} dropped>"


class ZmqKvMetricsReceiver:
    """The receiver in the serving process. ``open_zmq_kv_metrics_receiver`` creates it; one thread uses and closes it.

    Attributes:
        endpoint: the bound address, with port 0 resolved.
        received: reports received.
        refused: payloads that were not ``KvMetrics``, and were skipped.
    """

    __slots__ = ("_context", "_socket", "endpoint", "received", "refused")

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], endpoint: str) -> None:
        self._context = context
        self._socket = socket
        self.endpoint = endpoint
        self.received = 0
        self.refused = 0

    def receive(self, timeout_s: float = 0.0, limit: int = 1000) -> list[KvMetrics]:
        """Return at most ``limit`` reports, oldest first; wait up to ``timeout_s`` for the first one.

        A bad payload is counted in ``refused`` and skipped.
        """
        reports: list[KvMetrics] = []
        if not self._socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            return reports
        for frames in receive_queued(self._socket, limit):
            try:
                reports.append(_report_in(frames))
            except DecodeError:
                self.refused += 1
        self.received += len(reports)
        return reports

    def close(self) -> None:
        """Close the socket and release its address. Safe to call twice."""
        self._context.destroy(linger=0)

    def __repr__(self) -> str:
        return f"<ZmqKvMetricsReceiver {self.endpoint}: {self.received} received, {self.refused} refused>"


def _report_in(frames: list[bytes]) -> KvMetrics:
    if len(frames) != 1:
        raise DecodeError(f"KvMetrics in {len(frames)} frames, a report is one")
    return decode_kv_metrics(frames[0])


def open_zmq_kv_metrics_sink(endpoint: str) -> ZmqKvMetricsSink:
    """Connect a PUSH socket to the serving process, which may start later.

    Without a receiver, nothing is queued and every report counts as dropped, so a restarted receiver reads no old
    reports. The ZMQ context is private, so no ``destroy()`` of another component closes the sink.

    Raises:
        ConfigError: the endpoint is not an address of another process.
        StartError: the system refused the socket.
    """
    address = parse_kv_metrics_endpoint(endpoint, bind=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.ipv6 = address.is_ipv6
        socket.sndhwm = _HIGH_WATER_MARK
        socket.sndbuf = _KERNEL_BUFFER_BYTES
        socket.immediate = True
        socket.connect(str(address))
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise StartError(str(address), str(error), "give the address that the serving process binds") from error
    return ZmqKvMetricsSink(context, socket)


def open_zmq_kv_metrics_receiver(endpoint: str) -> ZmqKvMetricsReceiver:
    """Bind a PULL socket for the reports of all ranks; the system chooses a port for port 0.

    Raises:
        ConfigError: the endpoint is not an address that another process can reach.
        StartError: the address is in use, or the system refused the socket.
    """
    address = parse_kv_metrics_endpoint(endpoint, bind=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.PULL)
        socket.ipv6 = address.is_ipv6
        socket.rcvhwm = _HIGH_WATER_MARK
        socket.rcvbuf = _KERNEL_BUFFER_BYTES
        socket.maxmsgsize = MAX_KV_METRICS_BYTES
        socket.bind(str(address))
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise StartError(
            str(address), str(error), "stop the process that uses the address, or give another one"
        ) from error
    return ZmqKvMetricsReceiver(context, socket, bound)
