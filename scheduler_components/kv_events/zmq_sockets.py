"""Opening the publisher's two sockets. What a socket of this kit always has, it gets here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import zmq

from scheduler_components.errors import StartError
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.kv_events.file_ipc_lock import lock_ipc_path
from scheduler_components.kv_events.zmq_access import StreamAccess
from scheduler_components.kv_events.zmq_peers import PeerCounter, open_peer_counter

__all__ = ["Context", "Socket", "StreamSockets", "open_stream_sockets"]

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
    access: StreamAccess | None = None,
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
                undo.callback(access.open_gate(own).stop)
            opening = _Opening(own, inproc_context, access, undo)
            pub, pub_peers = opening.open(zmq.PUB, events_at, {zmq.SNDHWM: hwm}, bind=bind)
            replay, replay_peers = opening.open_replay(replay_at)
        except (zmq.ZMQError, OSError, RuntimeError) as error:
            mend = "raise the limits of open files and threads, or stop what uses them up"
            raise StartError(str(events_at), f"cannot open sockets ({error})", mend) from error
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
    access: StreamAccess | None
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
        context = (self.inproc or zmq.Context.instance()) if is_inproc else self.own
        socket: Socket = context.socket(kind)
        self.undo.callback(socket.close, linger=0)
        common = {zmq.MAXMSGSIZE: _MAX_INCOMING_BYTES, zmq.HANDSHAKE_IVL: _HANDSHAKE_MS, zmq.IPV6: endpoint.is_ipv6}
        for option, value in (common | options).items():
            socket.setsockopt(option, value)
        if self.access is not None:
            self.access.guard(socket)
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
    mend = (
        "choose a free port, or stop the process that holds it"
        if error.errno == zmq.EADDRINUSE
        else "check that the address belongs to this machine, or set bind to say which end listens"
    )
    return StartError(str(endpoint), f"cannot {verb}: {error.strerror}", mend)


def _address(socket: Socket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
