"""The load gauge over ZMQ: a PUB socket per rank, and a reader that returns only new samples.

Samples for a slow reader queue in four places: libzmq's queue for it, the kernel buffers of both sides, and its own
queue. The sink keeps the first two as small as the system allows, so that a sample after a stall is not queued behind
seconds of old ones. The comment above ``ZmqLoadReader`` explains the other two.

Source of the frames ``(topic, sequence, payload)``: SGLang 0.5.23.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

import zmq

from scheduler_components._internal.fork_hook import ForkGuard
from scheduler_components._internal.validators import check_number
from scheduler_components.errors import ConfigError, DecodeError, StartError
from scheduler_components.kv_events import CurveClientKeys, CurveServerKeys, Endpoint
from scheduler_components.kv_events.zmq_auth import apply_curve_client_keys
from scheduler_components.kv_events.zmq_sockets import lock_ipc_path, receive_queued
from scheduler_components.load.load_stat import (
    LOAD_HEARTBEAT_S,
    LOAD_TOPIC,
    MAX_LOAD_STAT_BYTES,
    LoadStat,
    LoadView,
    decode_load_stat,
    encode_load_stat,
    to_load_stat,
)
from scheduler_components.values import LoadSnapshot

__all__ = [
    "ZmqLoadSink",
    "check_load_endpoint",
    "open_zmq_load_sink",
    "ZmqLoadReader",
    "open_zmq_load_reader",
]

_QUEUED_SAMPLES = 2
"""Per reader: one sample in transit and the newest. With 1, readers would lose a sample directly after another."""

_KERNEL_BUFFER_BYTES = 4096
"""The minimum of the system, about 30 samples. By default, hours of samples queue for a stalled reader."""

_MAX_INCOMING_BYTES = 1024
_HANDSHAKE_MS = 2_000


class ZmqLoadSink:
    """A ``LoadSink`` for dispatchers on the network. ``open_zmq_load_sink`` creates it; one thread uses and closes it.

    Attributes:
        endpoint: the bound address, with port 0 resolved.
        sent: number of samples sent, which is the sequence of the next one.
    """

    __slots__ = ("_epoch", "_fork_guard", "_release", "_socket", "endpoint", "sent")
    wants_load = True

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, epoch: int, release: Callable[[], None]) -> None:
        self._socket = socket
        self._epoch = epoch
        self._release = release
        self.endpoint = endpoint
        self.sent = 0
        self._fork_guard = ForkGuard()

    def send(self, load: LoadSnapshot) -> None:
        """Send one sample to every reader with room in its queue; PUB drops it for the others and never blocks.

        Raises:
            ZMQError: the sink is closed.
            ForkedPublisherError: this process is a child of the one that opened the sink.
        """
        self._fork_guard.check()
        payload = encode_load_stat(to_load_stat(load, sequence=self.sent, epoch=self._epoch))
        frames = [LOAD_TOPIC, self.sent.to_bytes(8, "big"), payload]
        self._socket.send_multipart(frames, zmq.DONTWAIT)
        self.sent += 1

    def close(self) -> None:
        """Close the socket and release its address; does nothing in a forked child. Safe to call twice."""
        if not self._fork_guard.is_forked:
            self._release()

    def __repr__(self) -> str:
        return f"<ZmqLoadSink {self.endpoint}: {self.sent} sent>"


def check_load_endpoint(endpoint: Endpoint) -> None:
    """Check that dispatchers in other processes can reach the address.

    Raises:
        ConfigError: it is an inproc address.
    """
    if endpoint.transport == "inproc":
        raise ConfigError("load_endpoint", str(endpoint), "does not leave the process", "give a tcp or ipc address")


def open_zmq_load_sink(endpoint: Endpoint, *, access: CurveServerKeys | None = None) -> ZmqLoadSink:
    """Bind the PUB socket of one stream's load gauge. Readers connect to it.

    The ZMQ context is private, so no ``destroy()`` of another component closes the gauge.

    Args:
        endpoint: this stream's address; the system chooses a port for port 0.
        access: keys of the clients that may connect; None for any client.

    Raises:
        ConfigError: it is an inproc address.
        StartError: the address is in use, or not an address of this machine; nothing stays open.
    """
    check_load_endpoint(endpoint)
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
            _bind(socket, endpoint, access)
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            hint = "choose a free address of this machine, or stop the process that uses it"
            raise StartError(str(endpoint), f"cannot bind the load gauge: {error.strerror}", hint) from error
        return ZmqLoadSink(socket, bound, secrets.randbits(63), undo.pop_all().close)


def _bind(socket: zmq.Socket[bytes], endpoint: Endpoint, access: CurveServerKeys | None) -> None:
    socket.ipv6 = endpoint.is_ipv6
    socket.sndhwm = _QUEUED_SAMPLES
    socket.sndbuf = _KERNEL_BUFFER_BYTES
    socket.maxmsgsize = _MAX_INCOMING_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    if access is not None:
        access.apply_server_keys(socket)
    socket.bind(str(endpoint))


# The reader returns the newest samples even after it has stalled.
#
# Samples that arrive while the reader does not read fill the buffers, and further ones are dropped: after a stall the
# buffers contain only old samples. So the reader receives all queued samples and keeps the newest. If it has not polled
# for longer than a heartbeat, it closes its connections with everything queued in them, and connects again.

_MAX_MESSAGES_PER_READ = 10_000
"""More than 100 ranks send in 5 s. A read does not wait for publishers that send more."""


class _Connections(NamedTuple):
    """The parameters of the connections to all ranks."""

    context: zmq.Context[zmq.Socket[bytes]]
    endpoints: tuple[Endpoint, ...]
    keys: CurveClientKeys | None

    def dial(self) -> zmq.Socket[bytes]:
        """Return a new socket that is connected to all ranks."""
        socket = self.context.socket(zmq.SUB)
        socket.linger = 0
        socket.ipv6 = any(endpoint.is_ipv6 for endpoint in self.endpoints)
        socket.maxmsgsize = MAX_LOAD_STAT_BYTES
        if self.keys is not None:
            apply_curve_client_keys(socket, self.keys)
        socket.subscribe(LOAD_TOPIC)
        for endpoint in self.endpoints:
            socket.connect(str(endpoint))
        return socket


class ZmqLoadReader:
    """Reads the load gauges of one engine. ``open_zmq_load_reader`` creates it; one thread uses and closes it.

    Attributes:
        view: the newest sample of each rank.
        received: messages received.
        bad: messages that were not samples, and were skipped.
        reconnects: reconnections after a stall.
    """

    __slots__ = ("view", "received", "bad", "reconnects", "_clock", "_connections", "_polled_s", "_socket", "_stall_s")

    def __init__(
        self,
        connections: _Connections,
        socket: zmq.Socket[bytes],
        *,
        dialed_s: float,
        stall_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.view = LoadView()
        self.received = self.bad = self.reconnects = 0
        self._connections = connections
        self._socket = socket
        self._stall_s = stall_s
        self._clock = clock
        self._polled_s = dialed_s  # from before connecting, because the process may be suspended directly after it

    def read(self, timeout_s: float = 0.0) -> LoadView:
        """Receive the queued samples, wait up to ``timeout_s`` for a first one, and return ``view``.

        Call it at least once per heartbeat. After a longer pause it discards the queued samples.
        """
        deadline_s = self._clock() + timeout_s
        self._redial_after_stall(self._stall_s)
        while True:
            # Wait in short intervals: one that takes much longer shows that the process was suspended.
            wait_s = min(max(0.0, deadline_s - self._clock()), self._stall_s / 2)
            self._socket.poll(math.ceil(wait_s * 1000), zmq.POLLIN)
            messages = self._receive_all()
            if not self._redial_after_stall(wait_s + self._stall_s) and self._update_view(messages):
                return self.view
            if self._clock() >= deadline_s:
                return self.view

    def _redial_after_stall(self, allowed_s: float) -> bool:
        """Record this poll; connect again if the last one was longer ago than ``allowed_s``."""
        now = self._clock()
        stalled = now - self._polled_s > allowed_s
        self._polled_s = now
        if stalled:
            self.reconnects += 1
            self._socket.close(linger=0)
            self._socket = self._connections.dial()
        return stalled

    def _receive_all(self) -> list[list[bytes]]:
        messages = list(receive_queued(self._socket, _MAX_MESSAGES_PER_READ))
        self.received += len(messages)
        return messages

    def _update_view(self, messages: list[list[bytes]]) -> bool:
        """Add samples to the view; return whether one was new."""
        is_new = False
        for frames in messages:
            try:
                # The time of the poll and not of this line: the process may be suspended between the two.
                is_new |= self.view.update(_stat_in(frames), self._polled_s)
            except DecodeError:
                self.bad += 1
        return is_new

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self._socket.close(linger=0)
        self._connections.context.term()

    def __repr__(self) -> str:
        return f"<ZmqLoadReader: {len(self.view.samples)} ranks, {self.received} received, {self.bad} bad>"


def _stat_in(frames: list[bytes]) -> LoadStat:
    if len(frames) != 3 or frames[0] != LOAD_TOPIC:
        raise DecodeError(f"a load sample in {len(frames)} frames, it is topic, sequence and payload")
    return decode_load_stat(frames[2])


def open_zmq_load_reader(
    endpoints: Iterable[str],
    *,
    keys: CurveClientKeys | None = None,
    stall_s: float = LOAD_HEARTBEAT_S,
    clock: Callable[[], float] = time.monotonic,
) -> ZmqLoadReader:
    """Connect to the load gauges of all ranks of one engine; publishers may start later.

    Args:
        endpoints: one address per rank, as advertised (base port + rank), with a host that can be dialled.
        keys: for streams that authenticate clients.
        stall_s: heartbeat of the publishers; after a longer pause the queued samples are too old.
        clock: seconds from any origin.

    Raises:
        ConfigError: an address cannot be dialled, there is none, or ``stall_s`` is not a time span.
        StartError: the system refused a socket.
    """
    addresses = tuple(Endpoint.parse(text, field="load_endpoint") for text in endpoints)
    if not addresses:
        raise ConfigError("load_endpoint", "", "names no rank", "give the address of each rank's load gauge")
    check_number("stall_s", stall_s)
    for address in addresses:
        if address.transport == "inproc":
            raise ConfigError("load_endpoint", str(address), "is of another context", "give a tcp or ipc address")
        address.resolve_bind(False, field="load_endpoint")
    connections = _Connections(zmq.Context(), addresses, keys)
    dialed_s = clock()
    try:
        socket = connections.dial()
    except zmq.ZMQError as error:
        connections.context.destroy(linger=0)
        hint = "give addresses that this machine can dial"
        raise StartError(str(addresses[0]), f"cannot dial the load gauges: {error.strerror}", hint) from error
    return ZmqLoadReader(connections, socket, dialed_s=dialed_s, stall_s=stall_s, clock=clock)
