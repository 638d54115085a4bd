"""Open the publisher's two sockets: locks of ipc paths, socket options, keys, counters of peers, and sending."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.backend.cython import _zmq
from zmq.utils.monitor import recv_monitor_message

from scheduler_components.errors import StartError
from scheduler_components.kv_events.endpoints import Endpoint

if TYPE_CHECKING:
    from scheduler_components._internal.file_lock import FileLock
    from scheduler_components.kv_events.zmq_auth import CurveServerKeys

__all__ = [
    "IpcPathLock",
    "lock_ipc_path",
    "PeerCounter",
    "open_peer_counter",
    "Context",
    "Socket",
    "MessageSender",
    "StreamSockets",
    "open_stream_sockets",
    "receive_message",
    "receive_queued",
]


def receive_message(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return the frames of the oldest message that a socket has received. Never wait.

    ``recv_multipart`` asks the socket after each frame whether another one follows, which takes a third of its time.

    Raises:
        zmq.Again: no message has come.
    """
    frame = socket.recv(zmq.DONTWAIT, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        frames.append(frame.bytes)
    return frames


def receive_queued(socket: zmq.Socket[bytes], limit: int) -> Iterator[list[bytes]]:
    """Yield the messages that a socket has received, oldest first, at most ``limit``. Never wait."""
    for _ in range(limit):
        try:
            frames = receive_message(socket)
        except zmq.Again:
            return
        yield frames


# One publisher per ipc path. libzmq alone would unlink any file there, including the socket of a running publisher.


class IpcPathLock:
    """A lock file next to an ipc path, held while the path is bound. Opened by ``lock_ipc_path``."""

    __slots__ = ("_lock", "_path")

    def __init__(self, path: str, lock: FileLock) -> None:
        self._path = path
        self._lock = lock

    def release(self) -> None:
        """Remove the socket's file, which libzmq leaves, and unlock. Safe to call twice.

        Call it after the socket is closed, including in libzmq's own thread. In a forked child it does nothing.
        """
        if self._lock.is_open:
            with suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108 - a plain path, no Path needed
            self._lock.remove()


def lock_ipc_path(path: str) -> IpcPathLock | None:
    """Lock ``path`` for this process; None in Linux's abstract namespace, which has its own lock.

    libzmq replaces the socket of a dead process.

    Raises:
        StartError: another publisher or process uses the path, or the file there is not a socket.
    """
    if path.startswith("@"):
        return None
    from scheduler_components._internal.file_lock import acquire_file_lock

    try:
        lock = acquire_file_lock(Path(f"{path}.lock"))
    except BlockingIOError as error:
        raise _taken(path) from error
    except OSError as error:
        hint = "give a path in a directory that this process may write to"
        raise StartError(f"ipc://{path}", f"cannot lock {path}.lock ({error.strerror})", hint) from error
    try:
        _refuse_unless_stale(path)
    except StartError:
        lock.remove()
        raise
    return IpcPathLock(path, lock)


def _taken(path: str) -> StartError:
    return StartError(
        f"ipc://{path}", "another publisher is bound there", "stop that one, or give each publisher its own path"
    )


def _refuse_unless_stale(path: str) -> None:
    """Refuse the path of a publisher without a lock, and of a file that is not a socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"ipc://{path}", "exists and is not a socket", "give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass  # a busy process listens
        except OSError as error:
            hint = "remove it, or give another path"
            raise StartError(f"ipc://{path}", f"cannot be probed for a listener ({error.strerror})", hint) from error
    raise _taken(path)


# Count the peers of a socket by libzmq's reports of handshakes.

_REPORTS_PER_COUNT = 16
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class PeerCounter:
    """Count completed and refused handshakes of one socket.

    ``open_peer_counter`` opens it, and the socket's owner uses it. libzmq reports nothing else about the subscribers of
    a PUB socket: neither their subscriptions nor their lost messages.

    Attributes:
        num_connected: handshakes completed since the socket was opened.
        num_refused: failed handshakes: no key, a wrong key, or a peer that is not ZeroMQ.
    """

    __slots__ = ("_monitor", "num_connected", "num_refused")

    def __init__(self, monitor: zmq.Socket[bytes]) -> None:
        self._monitor = monitor
        self.num_connected = self.num_refused = 0

    @property
    def wakeup_fd(self) -> int:
        """File descriptor that becomes readable when a peer connects."""
        return int(self._monitor.getsockopt(zmq.FD))

    def poll_events(self) -> bool:
        """Receive a bounded number of reports. Return True while there may be more."""
        for _ in range(_REPORTS_PER_COUNT):
            if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            if recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_connected += 1
            else:
                self.num_refused += 1
        return True

    def close(self) -> None:
        """Close the monitor, before or after its socket."""
        self._monitor.close(linger=0)


def open_peer_counter(socket: zmq.Socket[bytes]) -> PeerCounter:
    """Start to count the peers of ``socket``."""
    address = f"inproc://peers-{id(socket)}"
    socket.monitor(address, _WATCHED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    # With a bounded queue, libzmq's own thread would stop all traffic while the queue is full.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    counter = PeerCounter(monitor)
    # libzmq wakes a reader only after the reader has polled and found nothing.
    counter.poll_events()
    return counter


Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

# Send a message without releasing the GIL.
#
# pyzmq releases the GIL in each send, once per frame. CPython then gives it to any waiting thread, and the sender gets
# it back when that thread waits, or 5 ms later; each short system call of the other thread starts the 5 ms again. A
# thread that sends to a scheduler's readers would keep the sockets all that time. So frames go to libzmq in one call
# that keeps the GIL. It never blocks, so it takes microseconds. A signal handler runs before or after a message, and
# never between two frames of it.


class _Frame(ctypes.Structure):
    """A ``struct iovec``. The entry keeps its bytes alive until the next message."""

    _fields_ = (("base", ctypes.c_char_p), ("length", ctypes.c_size_t))


_MAX_FRAMES = 5
_FLAGS = ctypes.c_int(zmq.SNDMORE | zmq.DONTWAIT)  # libzmq clears SNDMORE for the last frame
_COUNTS = tuple(map(ctypes.c_size_t, range(_MAX_FRAMES + 1)))

# dlsym finds libzmq's functions through the extension that links it.
_zmq_sendiov = ctypes.PyDLL(_zmq.__file__, use_errno=True).zmq_sendiov


class MessageSender:
    """Send messages on one socket: all frames or none, without waiting and without releasing the GIL.

    Args:
        socket: the socket, which the caller owns.
    """

    __slots__ = ("_address", "_entries", "_frames", "_handle", "_socket")

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._handle = ctypes.c_void_p(socket.underlying)
        entries = (_Frame * _MAX_FRAMES)()
        self._address = ctypes.c_void_p(ctypes.addressof(entries))
        self._entries = tuple(entries)
        self._frames: list[bytes | None] = [None] * _MAX_FRAMES

    def send(self, message: tuple[bytes, ...]) -> None:
        """Send one message of at most five frames.

        Raises:
            zmq.Again: the peer's queue is full; nothing was sent.
            zmq.ZMQError: the peer is gone, or the socket is closed; nothing was sent.
        """
        if self._socket.closed:  # by code that destroyed a shared context
            raise zmq.ZMQError(zmq.ENOTSOCK)
        frames = self._frames
        for index, frame in enumerate(message):
            if frame is not frames[index]:  # most frames are those of the last message; setting one costs 0.4 us
                entry = self._entries[index]
                frames[index] = None  # unknown, if a signal handler raises before the entry is complete
                entry.base, entry.length = frame, len(frame)
                frames[index] = frame
        if _zmq_sendiov(self._handle, self._address, _COUNTS[len(message)], _FLAGS) < 0:
            error = ctypes.get_errno()
            raise zmq.Again(error) if error == zmq.EAGAIN else zmq.ZMQError(error)


# Open the sockets.

_MAX_INCOMING_BYTES = 1024
"""Subscriptions and replay requests have tens of bytes. A larger message comes from another kind of peer."""

_HANDSHAKE_MS = 2_000
"""A client that does not complete its handshake must not occupy a connection for libzmq's default of 30 s."""

_REPLAY_HWM = 64
"""Answers queued for one replay client: a reader that never reads costs at most this many batches."""

_REQUEST_HWM = 16
"""Requests queued of one replay client, which needs one."""


class StreamSockets(NamedTuple):
    """The open sockets of one stream and their actual addresses.

    Attributes:
        pub: the PUB socket of live batches.
        replay: the ROUTER of replays, None without replay.
        endpoint: where ``pub`` listens or connects, with the port that the system chose.
        replay_endpoint: where ``replay`` listens.
        peers: the peer counters of ``pub`` and of ``replay``; None without a socket, and for inproc.
        release: closes everything and waits until closed sockets have lingered. Safe to call twice.
    """

    pub: Socket
    replay: Socket | None
    endpoint: str
    replay_endpoint: str | None
    peers: tuple[PeerCounter | None, PeerCounter | None]
    release: Callable[[], None]


def open_stream_sockets(
    events_at: Endpoint,
    replay_at: Endpoint | None,
    *,
    hwm: int,
    bind: bool,
    access: CurveServerKeys | None = None,
    inproc_context: Context | None = None,
) -> StreamSockets:
    """Open a stream's PUB socket and its replay ROUTER, which always binds.

    Args:
        events_at: address of PUB.
        replay_at: address of ROUTER, None for no replay.
        hwm: batches queued for one slow subscriber.
        bind: whether PUB binds.
        access: the clients that may connect; None for all.
        inproc_context: the context of inproc peers, by default pyzmq's ``Context.instance()``. Every other transport
            gets its own context, which the ``destroy()`` of other code does not reach.

    Raises:
        StartError: an address is in use or does not belong to this machine; nothing stays open.
    """
    with ExitStack() as undo:
        for endpoint, binds in ((events_at, bind), (replay_at, True)):
            lock = lock_ipc_path(endpoint.path) if endpoint and endpoint.transport == "ipc" and binds else None
            if lock is not None:
                undo.callback(lock.release)
        try:
            own: Context = zmq.Context()
            # Waits until its sockets have lingered; by then libzmq has removed its ipc files.
            undo.callback(own.term)
            if access is not None:
                undo.callback(access.start_authenticator(own).stop)
            opening = _SocketOpener(own, inproc_context, access, undo)
            pub, pub_peers = opening.open(zmq.PUB, events_at, {zmq.SNDHWM: hwm}, bind=bind)
            replay, replay_peers = opening.open_replay(replay_at)
        except (zmq.ZMQError, OSError, RuntimeError) as error:
            hint = "raise the limits of open files and threads, or stop the processes that use them"
            raise StartError(str(events_at), f"cannot open sockets ({error})", hint) from error
        return StreamSockets(
            pub=pub,
            replay=replay,
            endpoint=_address(pub) if bind else str(events_at),
            replay_endpoint=_address(replay) if replay else None,
            peers=(pub_peers, replay_peers),
            release=undo.pop_all().close,
        )


class _SocketOpener(NamedTuple):
    """The arguments that all sockets of one stream share."""

    own: Context
    inproc: Context | None
    access: CurveServerKeys | None
    undo: ExitStack

    def open_replay(self, endpoint: Endpoint | None) -> tuple[Socket | None, PeerCounter | None]:
        if endpoint is None:
            return None, None
        # Without MANDATORY, a message to a client that is gone, or whose queue is full, is lost without an error.
        options = {zmq.SNDHWM: _REPLAY_HWM, zmq.RCVHWM: _REQUEST_HWM, zmq.ROUTER_MANDATORY: 1}
        return self.open(zmq.ROUTER, endpoint, options, bind=True)

    def open(
        self, kind: int, endpoint: Endpoint, options: dict[zmq.SocketOption, int], *, bind: bool
    ) -> tuple[Socket, PeerCounter | None]:
        is_inproc = endpoint.transport == "inproc"
        context = (self.inproc or zmq.Context.instance()) if is_inproc else self.own  # noqa: SCH007 inproc peers share one
        socket: Socket = context.socket(kind)
        self.undo.callback(socket.close, linger=0)
        common = {zmq.MAXMSGSIZE: _MAX_INCOMING_BYTES, zmq.HANDSHAKE_IVL: _HANDSHAKE_MS, zmq.IPV6: endpoint.is_ipv6}
        for option, value in (common | options).items():
            socket.setsockopt(option, value)
        if self.access is not None:
            self.access.apply_server_keys(socket)
        peers = None if is_inproc else open_peer_counter(socket)
        if peers is not None:
            self.undo.callback(peers.close)
        try:
            if bind:
                socket.bind(str(endpoint))
            else:
                socket.connect(str(endpoint))
        except zmq.ZMQError as error:
            raise _start_error(endpoint, error, bind=bind) from error
        return socket, peers


def _start_error(endpoint: Endpoint, error: zmq.ZMQError, *, bind: bool) -> StartError:
    verb = "bind" if bind else "connect"
    hint = (
        "choose a free port, or stop the process that holds it"
        if error.errno == zmq.EADDRINUSE
        else "check that the address belongs to this machine, or set bind to say which end listens"
    )
    return StartError(str(endpoint), f"cannot {verb}: {error.strerror}", hint)


def _address(socket: Socket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
