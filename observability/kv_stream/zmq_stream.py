"""The sockets of one stream: live channel, its monitor, and replay channel.

A SUB socket serves one connection. When that is lost, the stream reads the messages left in the socket and opens a new
SUB. libzmq's own reconnecting would mix the batches of two epochs of a publisher in one queue.
"""

from __future__ import annotations

import math

import attrs
import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from observability.kv_stream.follower import StreamFollower
from observability.kv_stream.frames import END_SEQ_NUMBER, FrameParser
from observability.kv_stream.instructions import SendReplayRequest
from observability.kv_stream.reopen_pauses import ReopenPauses
from observability.kv_stream.stream_stats import StreamPosition, StreamStats
from observability.kv_stream.thread_fair_rlock import FairRLock
from scheduler_components.kv_events import CurveClientKeys, Endpoint, StreamAddress
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES
from scheduler_components.kv_events.zmq_auth import apply_curve_client_keys
from scheduler_components.kv_events.zmq_sockets import receive_message

__all__ = ["Socket", "SocketFactory", "ZmqReplayChannel", "ZmqStream"]

Socket = zmq.Socket[bytes]

_RECEIVE_HWM = 10_000
"""Batches that may wait in the socket during a replay: some seconds of a busy scheduler."""

_SLICE = 256
"""Messages read from one socket before the other streams get their turn."""

_HEARTBEAT_MS = 5_000
"""A stopped or unreachable peer is detected after two of these, a closed one immediately."""

_NEVER_MS = 3_600_000
"""Before libzmq would reconnect a SUB. -1 means never, but then libzmq also drops the messages in the socket."""

_FAILED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED


@attrs.frozen
class SocketFactory:
    """Opens a subscriber's sockets in its own context, with its CURVE keys if it has any."""

    context: zmq.Context[Socket]
    keys: CurveClientKeys | None = None

    def open(self, kind: int, endpoint: Endpoint) -> Socket:
        """Return a socket that is ready to connect to ``endpoint``."""
        socket: Socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
        if endpoint.is_ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        if self.keys is not None:
            apply_curve_client_keys(socket, self.keys)
        return socket


class ZmqReplayChannel:
    """Sends requests to one publisher's ROUTER, with one DEALER per request.

    It reads both answer framings: number and payload are the last two frames in either.
    """

    __slots__ = ("_endpoint", "_request_id", "_socket_factory", "socket")

    def __init__(self, socket_factory: SocketFactory, endpoint: Endpoint | None) -> None:
        self._socket_factory = socket_factory
        self._endpoint = endpoint
        self._request_id = 0
        self.socket: Socket | None = None

    def send(self, request: SendReplayRequest) -> None:
        self.cancel()
        if self._endpoint is None:
            return
        self._request_id = request.request_id
        self.socket = self._socket_factory.open(zmq.DEALER, self._endpoint)
        self.socket.connect(str(self._endpoint))
        self.socket.send_multipart((b"", request.request.encode()))

    def cancel(self) -> None:
        """Close the connection of the open request, if any."""
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None

    def read(self) -> tuple[int, list[bytes]] | None:
        """Return the number of the open request and the next message of its answer; None when no message has come."""
        if self.socket is None:
            return None
        try:
            return self._request_id, receive_message(self.socket)
        except zmq.Again:
            return None


class ZmqStream:
    """One stream's sockets and follower. Opened, used and closed on one thread.

    Args:
        socket_factory: opens the sockets.
        address: of the stream.
        follower: receives the messages; its channel is ``channel``.
        channel: the replay channel.
        lock: held by the caller of ``drain``, which admits other threads between two messages.
    """

    __slots__ = (
        "_is_connected",
        "_lock",
        "_monitor",
        "_reopen_at_s",
        "_reopen_pauses",
        "_socket_factory",
        "_sub",
        "address",
        "channel",
        "disconnects",
        "follower",
        "frames",
    )

    def __init__(
        self,
        socket_factory: SocketFactory,
        address: StreamAddress,
        follower: StreamFollower,
        channel: ZmqReplayChannel,
        lock: FairRLock,
    ) -> None:
        self.address = address
        self.follower = follower
        self.channel = channel
        self.frames = FrameParser(address.topic.encode())
        self.disconnects = 0
        self._socket_factory = socket_factory
        self._lock = lock
        self._is_connected = False
        self._sub: Socket | None = None
        self._monitor: Socket | None = None
        self._reopen_at_s = -math.inf
        self._reopen_pauses = ReopenPauses()

    def open(self) -> None:
        """Open the live channel. Return without waiting for the connection."""
        endpoint = self.address.events
        self._reopen_at_s = math.inf
        self._sub = self._socket_factory.open(zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, self.address.topic)
        self._monitor = self._sub.get_monitor_socket(_WATCHED)
        self._sub.connect(str(endpoint))

    def close(self) -> None:
        """Close every socket. Safe to call twice."""
        self.channel.cancel()
        self._close_live()

    def _close_live(self) -> None:
        if self._sub is None:
            return
        if self._monitor is not None:
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._sub.close(linger=0)
        self._sub = None

    @property
    def position(self) -> StreamPosition:
        return self.follower.position

    def stats(self) -> StreamStats:
        """Return state and counters, including those of the sockets."""
        return msgspec.structs.replace(
            self.follower.stats(str(self.address.events)),
            is_extended=self.follower.cursor.is_extended,
            disconnects=self.disconnects,
            bad_frames=self.frames.bad_frames,
            other_topics=self.frames.other_topics,
        )

    @property
    def next_deadline_s(self) -> float:
        """The latest time for the next ``drain``."""
        return min(self.follower.next_deadline_s, self._reopen_at_s)

    def sockets(self) -> list[Socket]:
        """Return the sockets to poll for input; without the SUB while the cursor would drop its batches."""
        sockets = [socket for socket in (self._monitor, self.channel.socket) if socket is not None]
        if self._sub is not None and self.follower.cursor.is_accepting_live:
            sockets.append(self._sub)
        return sockets

    def drain(self, now_s: float) -> None:
        """Read the waiting messages, up to a slice from each socket, and handle the deadlines."""
        if now_s >= self._reopen_at_s:
            self.open()
        is_lost = self._read_monitor(now_s)
        self._read_replay(now_s)
        self._read_live(now_s, limit=_RECEIVE_HWM if is_lost else _SLICE)
        if is_lost:
            self._reopen_later(now_s)
        self.follower.tick(now_s)

    def _read_monitor(self, now_s: float) -> bool:
        """Read the connection's events; return True when it was lost or could not be made."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return False
            if event & _FAILED:
                return True
            self._is_connected = True
            self.follower.on_connected(now_s)
        return False

    def _reopen_later(self, now_s: float) -> None:
        self._close_live()
        if self._is_connected:
            self._is_connected = False
            self.disconnects += 1
            self.follower.on_disconnected(now_s)
        self._reopen_at_s = now_s + self._reopen_pauses.take()

    def _read_replay(self, now_s: float) -> None:
        for _ in range(_SLICE):
            self._lock.yield_to_waiters()
            message = self.channel.read()
            if message is None:
                return
            request_id, frames = message
            frame = self.frames.parse_replay(frames)
            if frame is None:
                continue
            seq, payload = frame
            if seq == END_SEQ_NUMBER:
                for _ in self.follower.prepare_swap(payload):
                    self._lock.yield_to_waiters()
                self.frames.bad_frames += not self.follower.on_replay_marker(request_id, payload, now_s)
            else:
                self.follower.on_replay_batch(request_id, seq, payload, now_s)

    def _read_live(self, now_s: float, *, limit: int) -> None:
        for _ in range(limit):
            if self._sub is None or not self.follower.cursor.is_accepting_live:
                return
            self._lock.yield_to_waiters()
            try:
                frames = receive_message(self._sub)
            except zmq.Again:
                return
            frame = self.frames.parse_live(frames)
            if frame is not None:
                self._reopen_pauses.reset()
                self.follower.on_live_batch(*frame, now_s)
