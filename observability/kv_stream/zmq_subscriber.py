"""Following all streams of a worker over ZeroMQ: one object, polled by one thread, read by any.

A ``Subscriber`` owns one ``ZmqStream`` per rank. Each has a SUB for live batches with its monitor, a
``ZmqReplayChannel`` with one DEALER per replay question, and a ``StreamFollower``, which decides what a frame means.

A SUB lives for one connection. When that is lost, what is left in the socket is read, and a new SUB is opened.
libzmq's own reconnecting would mix the batches of two lives of a publisher in one queue.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from types import TracebackType

import attrs
import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from observability.kv_stream.cursor import StreamCursor
from observability.kv_stream.follower import (
    MAX_STREAMS,
    BatchApplier,
    FollowPolicy,
    FrameParser,
    NullStreamListener,
    PayloadDecoder,
    StreamFollower,
    StreamListener,
    StreamPosition,
    StreamStats,
)
from observability.kv_stream.instructions import SendReplayRequest
from observability.kv_stream.view import BlockView, RankSet
from scheduler_components import ConfigError
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchDecoder, CurveClientKeys, Endpoint, StreamAddress
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES
from scheduler_components.kv_events.zmq_auth import apply_curve_client_keys

__all__ = ["FairRLock", "Subscriber", "open_subscriber", "wait_any"]

Socket = zmq.Socket[bytes]

_END_SEQ = -1
_RECEIVE_HWM = 10_000
"""Batches that may wait in the socket during a replay: some seconds of a busy scheduler."""

_SLICE = 256
"""Messages read from one socket before the other streams are looked at."""

_HEARTBEAT_MS = 5_000
"""A peer that is stopped or cut off is noticed after two of these; a closed one at once."""

_SWEEP_PAUSE_S = 0.001
"""Between two slices of what clears left behind: others get the processor and the lock as often."""

_FIRST_REOPEN_S = 0.05
_LAST_REOPEN_S = 2.0
_NEVER_MS = 3_600_000
"""Before libzmq would reconnect a SUB. -1 means never, but it also drops what waits in the socket."""

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
    """Opens a subscriber's sockets: in its own context, with its keys where the publishers ask for some."""

    context: zmq.Context[Socket]
    keys: CurveClientKeys | None = None

    def open(self, kind: int, endpoint: Endpoint) -> Socket:
        """A socket that is ready to connect to ``endpoint``."""
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
    """Asks one publisher's ROUTER, with one DEALER per question.

    Reads both answer framings: the last two frames are sequence and payload in either.
    """

    __slots__ = ("_ask", "_socket_factory", "_endpoint", "socket")

    def __init__(self, socket_factory: SocketFactory, endpoint: Endpoint | None) -> None:
        self._socket_factory = socket_factory
        self._endpoint = endpoint
        self._ask = 0
        self.socket: Socket | None = None

    def send(self, question: SendReplayRequest) -> None:
        """Send the question; see ``ReplayChannel``."""
        self.cancel()
        if self._endpoint is None:
            return
        self._ask = question.ask
        self.socket = self._socket_factory.open(zmq.DEALER, self._endpoint)
        self.socket.connect(str(self._endpoint))
        self.socket.send_multipart((b"", question.request.encode()))

    def cancel(self) -> None:
        """Close the open question's connection, if any."""
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None

    def read(self) -> tuple[int, list[bytes]] | None:
        """The next message of the open answer with its question's number, None when none has come."""
        if self.socket is None:
            return None
        try:
            return self._ask, self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


class FairRLock:
    """A lock between the thread that polls and those that ask: who asks is let in before the next message.

    The polling thread holds it while it reads a slice of messages, and calls ``yield_to_waiters`` between two of them.
    Without
    that a slice would be one wait for everybody: who merely unlocks and locks again gets the lock back itself.

    Its holder may take it again, so that a listener, which is called under it, may ask too.
    """

    __slots__ = ("_depth", "_holder", "_lock", "_turn")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held while waiting for the lock, so that it goes to who waits
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder != me:  # only this thread ever writes this value
            with self._turn:
                self._lock.acquire()
            self._holder = me
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()

    @property
    def has_waiters(self) -> bool:
        """True while another thread waits."""
        return self._turn.locked()

    def yield_to_waiters(self) -> None:
        """Let somebody in who waits, and go on after them; for the thread that has entered once."""
        if self._turn.locked():
            self.__exit__(None, None, None)
            self.__enter__()


class ZmqStream:
    """One stream's sockets and follower. Opened, used and closed on one thread.

    Args:
        socket_factory: opens the sockets.
        address: where the stream is.
        follower: is told what comes; its channel is ``channel``.
        channel: the replay side.
        lock: held by whoever drains; others are let in between two messages.
    """

    __slots__ = (
        "_socket_factory",
        "_is_connected",
        "_lock",
        "_monitor",
        "_reopen_at_s",
        "_reopen_pause_s",
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
        self._reopen_pause_s = _FIRST_REOPEN_S

    def open(self) -> None:
        """SocketFactory the live channel. Returns at once; the connection comes when it comes."""
        endpoint = self.address.events
        self._reopen_at_s = math.inf
        self._sub = self._socket_factory.open(zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, self.address.topic)
        self._monitor = self._sub.get_monitor_socket(_WATCHED)
        self._sub.connect(str(endpoint))

    def close(self) -> None:
        """Close every socket; safe to call twice."""
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
    def next_deadline_s(self) -> float:
        """When ``drain`` must be called at the latest."""
        return min(self.follower.next_deadline_s, self._reopen_at_s)

    def sockets(self) -> list[Socket]:
        """What to poll for input now; the SUB is left alone while its batches could not be used."""
        sockets = [socket for socket in (self._monitor, self.channel.socket) if socket is not None]
        if self._sub is not None and self.follower.cursor.is_accepting_live:
            sockets.append(self._sub)
        return sockets

    def drain(self, now_s: float) -> None:
        """Read what has come, up to a slice from each socket, and do what is due."""
        if now_s >= self._reopen_at_s:
            self.open()
        lost = self._read_monitor(now_s)
        self._read_answers(now_s)
        self._read_live(now_s, limit=_RECEIVE_HWM if lost else _SLICE)
        if lost:
            self._reopen_later(now_s)
        self.follower.tick(now_s)

    def _read_monitor(self, now_s: float) -> bool:
        """Read the connection's events; True when it was lost or could not be made."""
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
        self._reopen_at_s = now_s + self._reopen_pause_s
        self._reopen_pause_s = min(_LAST_REOPEN_S, 2 * self._reopen_pause_s)

    def _read_answers(self, now_s: float) -> None:
        for _ in range(_SLICE):
            self._lock.yield_to_waiters()
            message = self.channel.read()
            if message is None:
                return
            ask, frames = message
            frame = self.frames.parse_replay(frames)
            if frame is None:
                continue
            seq, payload = frame
            if seq == _END_SEQ:
                for _ in self.follower.prepare_swap(payload):
                    self._lock.yield_to_waiters()
                self.frames.bad_frames += not self.follower.on_replay_marker(ask, payload, now_s)
            else:
                self.follower.on_replay_batch(ask, seq, payload, now_s)

    def _read_live(self, now_s: float, *, limit: int) -> None:
        for _ in range(limit):
            if self._sub is None or not self.follower.cursor.is_accepting_live:
                return
            self._lock.yield_to_waiters()
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self.frames.parse_live(frames)
            if frame is not None:
                self._reopen_pause_s = _FIRST_REOPEN_S
                self.follower.on_live_batch(*frame, now_s)


_SOCKETS_PER_STREAM = 4
"""SUB, its monitor's two ends, DEALER."""

_SPARE_SOCKETS = 64
"""A closed socket counts until libzmq has reaped it."""


class Subscriber:
    """Follows streams and keeps one view of them; made by ``open_subscriber``.

    ``poll`` and ``wait_until`` belong to one thread, which also closes. Queries and ``stats`` may be called from any
    thread, and by a listener: they wait for one message to be applied, not for a whole snapshot.
    """

    def __init__(
        self,
        streams: dict[int, ZmqStream],
        view: BlockView,
        context: zmq.Context[zmq.Socket[bytes]],
        lock: FairRLock,
        clock: Callable[[], float],
    ) -> None:
        self._streams = streams
        self._view = view
        self._context = context
        self._clock = clock
        self._lock = lock

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every socket; the view and the counters stay readable. Safe to call twice."""
        with self._lock:
            for stream in self._streams.values():
                stream.close()
        self._context.term()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` for input, then apply what has come. True when anything had."""
        has_input = wait_any((self,), timeout_s)
        self.drain()
        return has_input

    def sockets(self) -> list[Socket]:
        """What to wait for now."""
        return [socket for stream in self._streams.values() for socket in stream.sockets()]

    @property
    def due_in_s(self) -> float:
        """When ``drain`` must be called at the latest, in seconds from now."""
        due_in_s = min(stream.next_deadline_s for stream in self._streams.values()) - self._clock()
        return due_in_s if self._view.is_swept else min(due_in_s, _SWEEP_PAUSE_S)

    def drain(self) -> None:
        """Apply what has come, a slice of each stream, and do what is due."""
        now_s = self._clock()
        for stream in self._streams.values():
            with self._lock:
                stream.drain(now_s)
        if not self._view.is_swept:
            with self._lock:
                self._view.sweep()

    def wait_until(self, rank: int, seq: int, timeout_s: float) -> bool:
        """Poll until the view of ``rank`` has batch ``seq`` and no recovery is under way; False after ``timeout_s``.

        The stream is ``LIVE`` or ``PARTIAL`` then; ask ``stats`` which. ``seq`` -1 waits for the first contact, after
        which it may also be ``SYNCING``: nothing was published yet.
        """
        cursor = self._streams[rank].follower.cursor
        deadline_s = self._clock() + timeout_s
        while not (cursor.is_settled and cursor.last_seq >= seq):
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return False
            self.poll(left_s)
        return True

    def positions(self) -> dict[int, StreamPosition]:
        """Where the view of each stream stands, by rank."""
        with self._lock:
            cursors = {rank: stream.follower.cursor for rank, stream in self._streams.items()}
            return {
                rank: StreamPosition(rank, cursor.state, cursor.last_seq, cursor.is_settled)
                for rank, cursor in cursors.items()
            }

    def stats(self) -> dict[int, StreamStats]:
        """Each stream's state and counters, by rank."""
        with self._lock:
            return {rank: self._stats_of(stream) for rank, stream in self._streams.items()}

    def _stats_of(self, stream: ZmqStream) -> StreamStats:
        cursor, applier = stream.follower.cursor, stream.follower.applier
        return msgspec.structs.replace(
            applier.stats(cursor, endpoint=str(stream.address.events)),
            is_extended=cursor.is_extended,
            disconnects=stream.disconnects,
            bad_frames=stream.frames.bad_frames,
            other_topics=stream.frames.other_topics,
        )

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE, *, group_idx: int | None = None) -> Set[int]:
        """A copy of the hashes that ``rank`` holds on ``tier``; see ``BlockView.blocks``."""
        with self._lock:
            return self._view.blocks(rank, tier, group_idx=group_idx)

    def match_lengths(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> dict[int, int]:
        """How many of a prompt's leading blocks each rank holds; see ``BlockView.match_lengths``."""
        with self._lock:
            return self._view.match_lengths(hashes, tier, group_idx=group_idx)

    def best_ranks(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> tuple[int, RankSet]:
        """The longest prefix that any rank holds, and the ranks that do; see ``BlockView.best_ranks``."""
        with self._lock:
            return self._view.best_ranks(hashes, tier, group_idx=group_idx)

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """The ranks that hold one block on ``tier``."""
        with self._lock:
            return self._view.ranks_holding(block_hash, tier)


def wait_any(subscribers: Sequence[Subscriber], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` until any of ``subscribers`` has to be drained; True when there is input.

    For one thread that polls several subscribers: it drains each of them then.
    """
    waiting = [(socket, zmq.POLLIN) for subscriber in subscribers for socket in subscriber.sockets()]
    due_in_s = min((subscriber.due_in_s for subscriber in subscribers), default=timeout_s)
    # poll() cuts to whole milliseconds: one more, or it would return just before the deadline.
    wait_s = max(0.0, min(timeout_s, due_in_s + 0.001))
    if waiting:
        return bool(zmq.zmq_poll(waiting, int(1000 * wait_s)))
    time.sleep(wait_s)  # between two attempts to connect there is no socket, and zmq_poll() waits for none
    return False


def open_subscriber(
    addresses: Iterable[StreamAddress],
    *,
    policy: FollowPolicy | None = None,
    listener: StreamListener | None = None,
    keys: CurveClientKeys | None = None,
    view: BlockView | None = None,
    new_decoder: Callable[[], PayloadDecoder] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Subscriber:
    """SocketFactory all streams and return their subscriber; use it in a ``with`` block, or close it.

    This waits for nothing: a publisher that is not there yet is dialled until it is.

    Args:
        addresses: from ``discover``, or ``static_address``.
        policy: how long to wait for what.
        listener: is told of every batch and change of state. It may ask the subscriber; it must not wait for another
            thread that does.
        keys: for publishers that ask clients for keys (CURVE).
        view: an empty one to keep the blocks in; by default a ``BlockView``.
        new_decoder: makes what reads one stream's payloads; by default a ``BatchDecoder``, which reads tokens where
            there is a listener, and leaves them unread where there is a view alone.
        clock: monotonic seconds, for deadlines; wall_clock: seconds since the epoch, for the lag.

    Raises:
        ConfigError: no address, or two with one rank.
    """
    wanted = tuple(addresses)
    if not 0 < len(wanted) <= MAX_STREAMS:
        raise ConfigError("addresses", len(wanted), "is not a number of streams", f"give 1 to {MAX_STREAMS} addresses")
    ranks = [address.rank for address in wanted]
    if len(set(ranks)) != len(ranks):
        raise ConfigError("addresses", ranks, "name a rank twice", "give each stream its own rank")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _SPARE_SOCKETS + _SOCKETS_PER_STREAM * len(wanted))
    socket_factory = SocketFactory(context, keys)
    blocks = BlockView() if view is None else view
    streams: dict[int, ZmqStream] = {}
    lock = FairRLock()
    subscriber = Subscriber(streams, blocks, context, lock, clock)
    try:
        for address in wanted:
            channel = ZmqReplayChannel(socket_factory, address.replay)
            follower = StreamFollower(
                cursor=StreamCursor(has_replay=address.replay is not None),
                applier=BatchApplier(
                    rank=address.rank,
                    view=blocks,
                    decoder=BatchDecoder(decode_tokens=listener is not None) if new_decoder is None else new_decoder(),
                    listener=NullStreamListener() if listener is None else listener,
                    wall_clock=wall_clock,
                ),
                channel=channel,
                policy=FollowPolicy() if policy is None else policy,
            )
            follower.begin(clock())
            streams[address.rank] = ZmqStream(socket_factory, address, follower, channel, lock)
            streams[address.rank].open()
    except BaseException:
        subscriber.close()
        raise
    return subscriber
