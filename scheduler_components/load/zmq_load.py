"""The two ends of the load gauge on the network: a reader gets the newest samples, or none.

A slow reader's samples wait in four places: libzmq's queue for it, the kernel's buffer here, the one on its side, and
its own queue. The first two are kept as small as the system allows, so that what is sent after a stall is not
behind seconds of old samples. What a reader does about the other two stands above ``ZmqLoadReader``.

Source of the frames ``(topic, sequence, payload)``: SGLang 0.5.23.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

import zmq

from scheduler_components.errors import ConfigError, DecodeError, ForkedPublisherError, StartError
from scheduler_components.fork_hook import register_for_fork
from scheduler_components.kv_events import CurveClientKeys, CurveServerKeys, Endpoint
from scheduler_components.kv_events.zmq_auth import apply_curve_client_keys
from scheduler_components.kv_events.zmq_sockets import lock_ipc_path
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
from scheduler_components.validators import check_number
from scheduler_components.values import LoadSnapshot

__all__ = [
    "ZmqLoadSink",
    "check_load_endpoint",
    "open_zmq_load_sink",
    "ZmqLoadReader",
    "open_zmq_load_reader",
]

_QUEUED_SAMPLES = 2
"""For each reader: one on its way and the newest. With 1, a sample right after another would be lost to all."""

_KERNEL_BUFFER_BYTES = 4096
"""The system's least, some 30 samples. Left to itself it lets hours of samples pile up before a stalled reader."""

_MAX_INCOMING_BYTES = 1024
_HANDSHAKE_MS = 2_000


class ZmqLoadSink:
    """A ``LoadSink`` for dispatchers on the network. Made by ``open_zmq_load_sink``; used and closed on one thread.

    Attributes:
        endpoint: the address that was really bound, port 0 resolved.
        sent: samples handed to the socket, which is the number of the next one.
    """

    __slots__ = ("__weakref__", "_is_forked", "_epoch", "_pid", "_release", "_socket", "endpoint", "sent")
    wants_load = True

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, epoch: int, release: Callable[[], None]) -> None:
        self._socket = socket
        self._epoch = epoch
        self._pid = os.getpid()
        self._release = release
        self.endpoint = endpoint
        self.sent = 0
        self._is_forked = False
        register_for_fork(self)

    def send(self, load: LoadSnapshot) -> None:
        """Send one sample to every reader that has room for it; PUB drops it for the others and never blocks.

        Raises:
            ZMQError: the sink is closed.
            ForkedPublisherError: this is a child of the process that opened the sink.
        """
        if self._is_forked:
            raise ForkedPublisherError(self._pid)
        payload = encode_load_stat(to_load_stat(load, sequence=self.sent, epoch=self._epoch))
        frames = [LOAD_TOPIC, self.sent.to_bytes(8, "big"), payload]
        self._socket.send_multipart(frames, zmq.DONTWAIT)
        self.sent += 1

    def close(self) -> None:
        """Let go of the socket and its address; does nothing in a forked child. Safe to call twice."""
        if not self._is_forked:
            self._release()

    def after_fork_in_child(self) -> None:
        """In a forked child: the socket is the parent's, and every ``send`` says so."""
        self._is_forked = True

    def __repr__(self) -> str:
        return f"<ZmqLoadSink {self.endpoint}: {self.sent} sent>"


def check_load_endpoint(endpoint: Endpoint) -> None:
    """Refuse an address that no dispatcher in another process could reach.

    Raises:
        ConfigError: it is an inproc address.
    """
    if endpoint.transport == "inproc":
        raise ConfigError("load_endpoint", str(endpoint), "does not leave the process", "give a tcp or ipc address")


def open_zmq_load_sink(endpoint: Endpoint, *, access: CurveServerKeys | None = None) -> ZmqLoadSink:
    """Bind the PUB socket of one stream's load gauge; readers come to it, as they come to replays.

    The ZMQ context is private: nobody else's ``destroy()`` reaches the gauge.

    Args:
        endpoint: this stream's address; port 0 lets the system choose.
        access: who may connect; None for everybody.

    Raises:
        ConfigError: it is an inproc address.
        StartError: the address is taken, or not one of this machine; nothing stays open.
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
            hint = "choose a free address of this machine, or stop the process that holds it"
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


# A dispatcher's end of the load gauges: always the newest samples, also after it has stood still.
#
# What arrives while nobody reads waits in buffers until they are full, and from then on newer samples are dropped: who
# reads on after a stall reads the past. This reader takes everything that waits and keeps the newest. Where it has not
# looked for longer than a heartbeat, it drops its connections, with all that waits in them, and dials anew.

_MESSAGES_A_READ = 10_000
"""More than 100 ranks send in 5 s. Publishers that send still more are not waited for."""


class _Connections(NamedTuple):
    """What it takes to dial all ranks, once and again."""

    context: zmq.Context[zmq.Socket[bytes]]
    endpoints: tuple[Endpoint, ...]
    keys: CurveClientKeys | None

    def dial(self) -> zmq.Socket[bytes]:
        """Give a socket that nothing has waited in."""
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
    """Reads the load gauges of one engine. Made by ``open_zmq_load_reader``; used and closed on one thread.

    Attributes:
        view: the newest sample of each rank.
        received: messages read.
        bad: messages that were no sample; each cost itself.
        reconnects: how often the connections were made anew after a stall.
    """

    __slots__ = ("view", "received", "bad", "reconnects", "_clock", "_connections", "_looked_s", "_socket", "_stall_s")

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
        self._looked_s = dialed_s  # from before the dialing: a process may be stopped right after it

    def read(self, timeout_s: float = 0.0) -> LoadView:
        """Take in what has arrived, waiting up to ``timeout_s`` for a first sample; returns ``view``.

        Call it at least once per heartbeat: after a longer pause only what arrives from now on counts.
        """
        deadline_s = self._clock() + timeout_s
        self._redial_after_stall(self._stall_s)
        while True:
            # Short waits: one that took much longer than asked shows that the whole process stood still.
            wait_s = min(max(0.0, deadline_s - self._clock()), self._stall_s / 2)
            self._socket.poll(math.ceil(wait_s * 1000), zmq.POLLIN)
            messages = self._receive_all()
            if not self._redial_after_stall(wait_s + self._stall_s) and self._update_view(messages):
                return self.view
            if self._clock() >= deadline_s:
                return self.view

    def _redial_after_stall(self, allowed_s: float) -> bool:
        """Note that somebody looks; dial anew when nobody has for longer than ``allowed_s``."""
        now = self._clock()
        stalled = now - self._looked_s > allowed_s
        self._looked_s = now
        if stalled:
            self.reconnects += 1
            self._socket.close(linger=0)
            self._socket = self._connections.dial()
        return stalled

    def _receive_all(self) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        while len(messages) < _MESSAGES_A_READ:
            try:
                messages.append(self._socket.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
        self.received += len(messages)
        return messages

    def _update_view(self, messages: list[list[bytes]]) -> bool:
        """Take samples into the view; True when one was new."""
        took = False
        for frames in messages:
            try:
                # The time of the look, not of this line: a process may be stopped between the two.
                took |= self.view.update(_stat_in(frames), self._looked_s)
            except DecodeError:
                self.bad += 1
        return took

    def close(self) -> None:
        """Let go of the connections. Safe to call twice."""
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
    """Dial the load gauges of all ranks of one engine; publishers may start later.

    Args:
        endpoints: one address per rank, as advertised (base port + rank), with a host that can be dialled.
        keys: of a stream that demands them.
        stall_s: the publishers' heartbeat: after a pause as long as this, what has waited is too old.
        clock: seconds from any origin.

    Raises:
        ConfigError: an address cannot be dialled, there is none, or ``stall_s`` is no time span.
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
