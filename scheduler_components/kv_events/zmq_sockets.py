"""Opening the publisher's two sockets: locks of ipc paths, options, keys, counters of peers."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from scheduler_components.errors import StartError
from scheduler_components.file_lock import FileLock, acquire_file_lock
from scheduler_components.kv_events.endpoints import Endpoint
from scheduler_components.kv_events.zmq_auth import CurveServerKeys

__all__ = [
    "IpcPathLock",
    "lock_ipc_path",
    "PeerCounter",
    "open_peer_counter",
    "Context",
    "Socket",
    "StreamSockets",
    "open_stream_sockets",
]

# One publisher per ipc path: libzmq alone would unlink whatever is there, a living publisher's socket included.


class IpcPathLock:
    """A lock file beside an ipc path, held for as long as the path is bound; made by ``lock_ipc_path``."""

    __slots__ = ("_lock", "_path")

    def __init__(self, path: str, lock: FileLock) -> None:
        self._path = path
        self._lock = lock

    def release(self) -> None:
        """Remove the socket's file, which libzmq leaves there, and unlock. Safe to call twice.

        Call it when the socket is closed, down to libzmq's own thread. In a forked child it does nothing.
        """
        if self._lock.is_open:
            with suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108 - a plain path, no Path needed
            self._lock.remove()


def lock_ipc_path(path: str) -> IpcPathLock | None:
    """Take ``path`` for this process; None in Linux's abstract namespace, which has a lock of its own.

    What a dead process left there is left to libzmq, which replaces it.

    Raises:
        StartError: another publisher or process has the path, or it is not a socket's.
    """
    if path.startswith("@"):
        return None
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
        f"ipc://{path}", "another publisher is bound there", "stop that one, or give each publisher a path of its own"
    )


def _refuse_unless_stale(path: str) -> None:
    """Also publishers that take no lock are not to be unlinked, nor are a person's files."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"ipc://{path}", "is there and is not a socket", "give a path of its own")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass  # somebody listens, and is busy
        except OSError as error:
            hint = "remove it, or give another path"
            raise StartError(f"ipc://{path}", f"cannot be asked who listens ({error.strerror})", hint) from error
    raise _taken(path)


# Counting the peers of a socket from libzmq's own reports of handshakes.

_REPORTS_PER_COUNT = 16
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class PeerCounter:
    """Counts completed and refused handshakes of one socket; made by ``open_peer_counter``, used by its owner.

    libzmq tells a PUB socket's owner nothing else about its subscribers: not what they subscribe to, nor what was
    dropped for them.

    Attributes:
        num_connected: handshakes completed since the socket was opened.
        num_refused: handshakes that failed: no key, a wrong key, or no ZeroMQ peer at all.
    """

    __slots__ = ("_monitor", "num_connected", "num_refused")

    def __init__(self, monitor: zmq.Socket[bytes]) -> None:
        self._monitor = monitor
        self.num_connected = self.num_refused = 0

    @property
    def wakeup_fd(self) -> int:
        """Becomes readable when a peer came."""
        return int(self._monitor.getsockopt(zmq.FD))

    def poll_events(self) -> bool:
        """Take a bounded number of reports; True while there may be more."""
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
    """Begin to count the peers of ``socket``."""
    address = f"inproc://peers-{id(socket)}"
    socket.monitor(address, _WATCHED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    # libzmq's own thread would wait, with all traffic, for room in a queue that is bounded.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    counter = PeerCounter(monitor)
    # libzmq wakes a reader only once it has looked and found nothing.
    counter.poll_events()
    return counter


Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_MAX_INCOMING_BYTES = 1024
"""Subscriptions and replay requests are tens of bytes; anything larger is not a peer of ours."""

_HANDSHAKE_MS = 2_000
"""A client that does not finish its handshake must not hold a connection for libzmq's default of 30 s."""

_REPLAY_HWM = 64
"""Answers queued for one replay client; a reader that never reads costs at most this many batches."""

_REQUEST_HWM = 16
"""Requests queued of one replay client, who needs one."""


class StreamSockets(NamedTuple):
    """The open sockets of one stream, and where they really are.

    Attributes:
        pub: the PUB socket of live batches.
        replay: the ROUTER of replays, None without replay.
        endpoint: where ``pub`` listens or connects, with the port that the system chose.
        replay_endpoint: where ``replay`` listens.
        peers: what counts the peers of ``pub``, and of ``replay`` where there is one; none for inproc.
        release: lets go of everything; waits for what closed sockets linger for. Safe to call twice.
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
    """Open a stream's PUB socket, and its replay ROUTER, which always binds because clients come to it.

    Args:
        events_at: where PUB is.
        replay_at: where ROUTER is, None for no replay.
        hwm: batches queued for one slow subscriber.
        bind: whether PUB binds.
        access: who may connect; None for everybody.
        inproc_context: where inproc peers are, by default pyzmq's ``Context.instance()``. Every other transport gets
            a context of its own, which nobody else's ``destroy()`` reaches.

    Raises:
        StartError: an address is in use or not one of this machine; nothing stays open.
    """
    with ExitStack() as undo:
        for endpoint, binds in ((events_at, bind), (replay_at, True)):
            lock = lock_ipc_path(endpoint.path) if endpoint and endpoint.transport == "ipc" and binds else None
            if lock is not None:
                undo.callback(lock.release)
        try:
            own: Context = zmq.Context()
            # Waits for what its sockets linger for; libzmq has removed its ipc files then.
            undo.callback(own.term)
            if access is not None:
                undo.callback(access.start_authenticator(own).stop)
            opening = _Opening(own, inproc_context, access, undo)
            pub, pub_peers = opening.open(zmq.PUB, events_at, {zmq.SNDHWM: hwm}, bind=bind)
            replay, replay_peers = opening.open_replay(replay_at)
        except (zmq.ZMQError, OSError, RuntimeError) as error:
            hint = "raise the limits of open files and threads, or stop what uses them up"
            raise StartError(str(events_at), f"cannot open sockets ({error})", hint) from error
        return StreamSockets(
            pub=pub,
            replay=replay,
            endpoint=_address(pub) if bind else str(events_at),
            replay_endpoint=_address(replay) if replay else None,
            peers=(pub_peers, replay_peers),
            release=undo.pop_all().close,
        )


class _Opening(NamedTuple):
    """What all sockets of one stream are opened with."""

    own: Context
    inproc: Context | None
    access: CurveServerKeys | None
    undo: ExitStack

    def open_replay(self, endpoint: Endpoint | None) -> tuple[Socket | None, PeerCounter | None]:
        if endpoint is None:
            return None, None
        # Without MANDATORY a send to a client that is gone, or whose queue is full, vanishes without an error.
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
