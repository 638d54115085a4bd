"""Reports over ZMQ: a sender that never blocks, and a reader that returns what has arrived.

A ``ReportWire`` describes one kind of reports. Its publishers bind PUB sockets and readers connect to them, or a reader
binds a PULL socket and senders connect PUSH sockets. Queues on both sides are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import zmq

from scheduler_components._internal.fork_hook import ForkGuard
from scheduler_components.errors import ConfigError, DecodeError, StartError
from scheduler_components.kv_events import CurveClientKeys, CurveServerKeys, Endpoint
from scheduler_components.kv_events.zmq_auth import apply_curve_client_keys
from scheduler_components.kv_events.zmq_sockets import lock_ipc_path, receive_queued

__all__ = [
    "ReportWire",
    "ZmqReportReader",
    "ZmqReportSink",
    "open_report_publisher",
    "open_report_pusher",
    "open_report_reader",
    "parse_report_endpoints",
]

Sent = TypeVar("Sent")
Received = TypeVar("Received")

_MAX_INCOMING_BYTES = 1024
_HANDSHAKE_MS = 2_000
_MAX_SENDERS = 4096
"""Senders whose numbers a reader remembers; beyond them it counts no gaps."""


@attrs.frozen(kw_only=True)
class ReportWire(Generic[Sent, Received]):
    """The format of one kind of reports, and the limits of its sockets.

    Attributes:
        subject: content of the reports, for messages.
        field: option with the address, for messages.
        encode: returns the frames of a report; the second argument is the number of reports sent before it.
        decode: returns the report in frames. Raises DecodeError if they are not one.
        max_bytes: size of the largest message that a reader accepts.
        topic: first frame of a published message; None for a wire that pushes.
        max_queued: messages that each side queues.
        buffer_bytes: size of the kernel's buffers; None for the default of the system.
        number_of: returns the sender of a report and its number, so that a reader counts what it missed.
    """

    subject: str
    field: str
    encode: Callable[[Sent, int], tuple[bytes, ...]]  # noqa: SCH005 one format: encode and decode belong together
    decode: Callable[[list[bytes]], Received]
    max_bytes: int
    topic: bytes | None = None
    max_queued: int = 1000
    buffer_bytes: int | None = None
    number_of: Callable[[Received], tuple[Hashable, int]] | None = None


class ZmqReportSink(Generic[Sent]):
    """A ``ReportSink`` over a socket. ``open_report_publisher`` and ``open_report_pusher`` open one.

    One thread uses and closes it.

    Attributes:
        endpoint: the bound or connected address, with port 0 resolved.
        sent: reports sent, which is the number of the next one.
        dropped: reports dropped: a closed sink, or where reports are pushed no receiver or a full queue.
    """

    __slots__ = ("_encode", "_fork_guard", "_release", "_socket", "dropped", "endpoint", "sent")
    wants_reports = True

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        encode: Callable[[Sent, int], tuple[bytes, ...]],
        endpoint: str,
        release: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._encode = encode
        self._release = release
        self.endpoint = endpoint
        self.sent = self.dropped = 0
        self._fork_guard = ForkGuard()

    def send(self, report: Sent) -> None:
        """Send one report; never blocks. PUB drops it for a reader whose queue is full.

        Raises:
            ForkedPublisherError: this process is a child of the one that opened the sink.
        """
        self._fork_guard.check()
        *heads, payload = self._encode(report, self.sent)
        try:
            for frame in heads:
                self._socket.send(frame, zmq.DONTWAIT | zmq.SNDMORE)
            self._socket.send(payload, zmq.DONTWAIT)
        except zmq.ZMQError:
            self.dropped += 1
        else:
            self.sent += 1

    def close(self) -> None:
        """Close the socket, discard queued reports and release the address. Safe to call twice.

        Does nothing in a forked child, which does not own the socket.
        """
        if not self._fork_guard.is_forked:
            self._release()

    def __repr__(self) -> str:
        return f"<ZmqReportSink {self.endpoint}: {self.sent} sent, {self.dropped} dropped>"


class ZmqReportReader(Generic[Received]):
    """Reads the reports of one or several senders. ``open_report_reader`` opens one; one thread uses and closes it.

    Attributes:
        endpoint: the bound address, with port 0 resolved.
        received: reports received.
        missed: reports that the numbers of their senders show to be lost; those before the first of a sender do not
            count. 0 for reports without numbers.
        bad: messages that were not reports, and were skipped.
    """

    __slots__ = (
        "_context", "_decode", "_next_of", "_number_of", "_open", "_socket", "bad", "endpoint", "missed", "received",
    )  # fmt: skip

    def __init__(
        self,
        wire: ReportWire[Any, Received],
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        open_socket: Callable[[], zmq.Socket[bytes]],
    ) -> None:
        self._decode = wire.decode
        self._number_of = wire.number_of
        self._context = context
        self._socket = socket
        self._open = open_socket
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._next_of: dict[Hashable, int] = {}
        self.received = self.missed = self.bad = 0

    def receive(self, timeout_s: float = 0.0, limit: int = 1000) -> list[Received]:
        """Return at most ``limit`` reports, oldest first; wait up to ``timeout_s`` for the first one.

        A bad message is counted in ``bad`` and skipped.
        """
        reports: list[Received] = []
        if not self._socket.poll(math.ceil(timeout_s * 1000), zmq.POLLIN):
            return reports
        for frames in receive_queued(self._socket, limit):
            try:
                reports.append(self._decode(frames))
            except DecodeError:
                self.bad += 1
        self.received += len(reports)
        if self._number_of is not None:
            for report in reports:
                self._count_gap(*self._number_of(report))
        return reports

    def _count_gap(self, sender: Hashable, number: int) -> None:
        """Count the reports between the last one of this sender and ``number``. A restarted sender counts from 0."""
        if sender in self._next_of or len(self._next_of) < _MAX_SENDERS:
            self.missed += max(0, number - self._next_of.get(sender, number))
            self._next_of[sender] = number + 1

    def reopen(self) -> None:
        """Close the connections with everything that is queued in them, and connect again."""
        self._socket.close(linger=0)
        self._socket = self._open()

    def close(self) -> None:
        """Close the sockets and release their addresses. Safe to call twice."""
        self._context.destroy(linger=0)

    def __repr__(self) -> str:
        return f"<ZmqReportReader: {self.received} received, {self.missed} missed, {self.bad} bad>"


def parse_report_endpoints(texts: Iterable[str], wire: ReportWire[Any, Any]) -> tuple[Endpoint, ...]:
    """Parse the addresses of publishers, with hosts that can be dialled.

    Raises:
        ConfigError: an address cannot be dialled, or there is none.
    """
    endpoints = tuple(Endpoint.parse(text, field=wire.field) for text in texts)
    if not endpoints:
        raise ConfigError(wire.field, "", "names no publisher", "give the address of each rank")
    for endpoint in endpoints:
        endpoint.check_leaves_process(field=wire.field)
        endpoint.resolve_bind(False, field=wire.field)
    return endpoints


def open_report_publisher(
    wire: ReportWire[Sent, Any], endpoint: Endpoint, *, access: CurveServerKeys | None = None
) -> ZmqReportSink[Sent]:
    """Bind the PUB socket of one stream's reports. Readers connect to it.

    The ZMQ context is private, so no ``destroy()`` of another component closes the sink.

    Args:
        wire: kind of the reports.
        endpoint: this stream's address; the system chooses a port for port 0.
        access: keys of the clients that may connect; None for any client.

    Raises:
        ConfigError: it is an inproc address.
        StartError: the address is in use, or not an address of this machine; nothing stays open.
    """
    endpoint.check_leaves_process(field=wire.field)
    with ExitStack() as undo:
        lock = lock_ipc_path(endpoint.path) if endpoint.transport == "ipc" else None
        if lock is not None:
            undo.callback(lock.release)
        try:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(context.term)
            if access is not None:
                undo.callback(access.start_authenticator(context).stop)
            socket = context.socket(zmq.PUB)
            undo.callback(socket.close, linger=0)
            _limit_sender(socket, wire, endpoint)
            socket.maxmsgsize = _MAX_INCOMING_BYTES
            socket.handshake_ivl = _HANDSHAKE_MS
            if access is not None:
                access.apply_server_keys(socket)
            socket.bind(str(endpoint))
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            hint = "choose a free address of this machine, or stop the process that uses it"
            raise StartError(str(endpoint), f"cannot bind the {wire.subject}: {error.strerror}", hint) from error
        return ZmqReportSink(socket, wire.encode, bound, undo.pop_all().close)


def open_report_pusher(wire: ReportWire[Sent, Any], endpoint: Endpoint) -> ZmqReportSink[Sent]:
    """Connect a PUSH socket to a receiver, which may start later.

    Without a receiver, nothing is queued and every report counts as dropped, so a restarted receiver reads no old
    reports. The ZMQ context is private, so no ``destroy()`` of another component closes the sink.

    Raises:
        StartError: the system refused the socket.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        _limit_sender(socket, wire, endpoint)
        socket.immediate = True
        socket.connect(str(endpoint))
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise StartError(str(endpoint), str(error), "give the address that the receiver binds") from error
    return ZmqReportSink(socket, wire.encode, str(endpoint), context.destroy)


def _limit_sender(socket: zmq.Socket[bytes], wire: ReportWire[Any, Any], endpoint: Endpoint) -> None:
    socket.ipv6 = endpoint.is_ipv6
    socket.sndhwm = wire.max_queued
    if wire.buffer_bytes is not None:
        socket.sndbuf = wire.buffer_bytes


def open_report_reader(
    wire: ReportWire[Any, Received], endpoints: tuple[Endpoint, ...], *, keys: CurveClientKeys | None = None
) -> ZmqReportReader[Received]:
    """Connect a SUB socket to publishers, which may start later, or bind a PULL socket for senders that push.

    Args:
        wire: kind of the reports.
        endpoints: addresses of all publishers, or the one to bind.
        keys: for publishers that authenticate their readers.

    Raises:
        StartError: the address is in use, or the system refused a socket.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    open_socket = partial(_open_receiver, context, wire, endpoints, keys)
    try:
        return ZmqReportReader(wire, context, open_socket(), open_socket)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        act, hint = "dial", "give addresses that this machine can dial"
        if wire.topic is None:
            act, hint = "bind", "stop the process that uses the address, or give another one"
        raise StartError(str(endpoints[0]), f"cannot {act} the {wire.subject}: {error.strerror}", hint) from error


def _open_receiver(
    context: zmq.Context[zmq.Socket[bytes]],
    wire: ReportWire[Any, Any],
    endpoints: tuple[Endpoint, ...],
    keys: CurveClientKeys | None,
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL if wire.topic is None else zmq.SUB)
    socket.linger = 0
    socket.ipv6 = any(endpoint.is_ipv6 for endpoint in endpoints)
    socket.maxmsgsize = wire.max_bytes
    if wire.topic is None:
        socket.rcvhwm = wire.max_queued
        if wire.buffer_bytes is not None:
            socket.rcvbuf = wire.buffer_bytes
        socket.bind(str(endpoints[0]))
        return socket
    if keys is not None:
        apply_curve_client_keys(socket, keys)
    socket.subscribe(wire.topic)
    for endpoint in endpoints:
        socket.connect(str(endpoint))
    return socket
