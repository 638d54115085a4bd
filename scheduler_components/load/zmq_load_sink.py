"""The load gauge's PUB socket: a reader gets the newest samples, or none.

A slow reader's samples wait in four places: libzmq's queue for it, the kernel's buffer here, the one on its side, and
its own queue. The first two are kept as small as the system allows, so that what is sent after a stall is not
behind seconds of old samples. What a reader must do about the other two stands in ``zmq_load_reader``.

Source of the frames ``(topic, sequence, payload)``: SGLang 0.5.23.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack

import zmq

from scheduler_components.errors import ConfigError, ForkedPublisherError, StartError
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.kv_events.file_ipc_lock import lock_ipc_path
from scheduler_components.kv_events.zmq_access import StreamAccess
from scheduler_components.load.load_stat import LOAD_TOPIC, encode_load_stat, load_stat_from
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["ZmqLoadSink", "check_load_endpoint", "open_zmq_load_sink"]

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

    __slots__ = ("_life", "_pid", "_release", "_socket", "endpoint", "sent")

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, life: int, release: Callable[[], None]) -> None:
        self._socket = socket
        self._life = life
        self._pid = os.getpid()
        self._release = release
        self.endpoint = endpoint
        self.sent = 0

    def send(self, load: LoadSnapshot) -> None:
        """Send one sample to every reader that has room for it; PUB drops it for the others and never blocks.

        Raises:
            ZMQError: the sink is closed.
            ForkedPublisherError: this is a child of the process that opened the sink.
        """
        if os.getpid() != self._pid:
            raise ForkedPublisherError(self._pid)
        payload = encode_load_stat(load_stat_from(load, sequence=self.sent, life=self._life))
        frames = [LOAD_TOPIC, self.sent.to_bytes(8, "big"), payload]
        self._socket.send_multipart(frames, zmq.DONTWAIT)
        self.sent += 1

    def close(self) -> None:
        """Let go of the socket and its address, unless in a forked child, whose they are not. Safe to call twice."""
        if os.getpid() == self._pid:
            self._release()

    def __repr__(self) -> str:
        return f"<ZmqLoadSink {self.endpoint}: {self.sent} sent>"


def check_load_endpoint(endpoint: Endpoint) -> None:
    """Refuse an address that no dispatcher in another process could reach.

    Raises:
        ConfigError: it is an inproc address.
    """
    if endpoint.transport == "inproc":
        raise ConfigError("load_endpoint", str(endpoint), "does not leave the process", "give a tcp or ipc address")


def open_zmq_load_sink(endpoint: Endpoint, *, access: StreamAccess | None = None) -> ZmqLoadSink:
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
                undo.callback(access.open_gate(context).stop)
            socket = context.socket(zmq.PUB)
            undo.callback(socket.close, linger=0)
            _bind(socket, endpoint, access)
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            mend = "choose a free address of this machine, or stop the process that holds it"
            raise StartError(str(endpoint), f"cannot bind the load gauge: {error.strerror}", mend) from error
        return ZmqLoadSink(socket, bound, secrets.randbits(63), undo.pop_all().close)


def _bind(socket: zmq.Socket[bytes], endpoint: Endpoint, access: StreamAccess | None) -> None:
    socket.ipv6 = endpoint.is_ipv6
    socket.sndhwm = _QUEUED_SAMPLES
    socket.sndbuf = _KERNEL_BUFFER_BYTES
    socket.maxmsgsize = _MAX_INCOMING_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    if access is not None:
        access.guard(socket)
    socket.bind(str(endpoint))
