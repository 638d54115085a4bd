"""Opening the publisher's two sockets. What a socket of this kit always has, it gets here."""

from __future__ import annotations

from typing import NamedTuple

import zmq

from scheduler_components.errors import StartError
from scheduler_components.kv_events.endpoint import Endpoint

__all__ = ["Context", "Socket", "StreamSockets", "open_stream_sockets"]

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_MAX_INCOMING_BYTES = 1024
"""Subscriptions and replay requests are tens of bytes; anything larger is not a peer of ours."""

_HANDSHAKE_MS = 2_000
"""A client that does not finish its handshake must not hold a connection for libzmq's default of 30 s."""

_REPLAY_HWM = 64
"""Answers queued for one replay client; a reader that never reads costs at most this many batches."""


class StreamSockets(NamedTuple):
    """The open sockets of one stream, and where they really are.

    Attributes:
        own_context: the private context to terminate at the end; None when the context is shared.
        pub: the PUB socket of live batches.
        replay: the ROUTER of replays, None without replay.
        endpoint: where ``pub`` listens or connects, with the port that the system chose.
        replay_endpoint: where ``replay`` listens.
    """

    own_context: Context | None
    pub: Socket
    replay: Socket | None
    endpoint: str
    replay_endpoint: str | None


def open_stream_sockets(
    events_at: Endpoint, replay_at: Endpoint | None, *, hwm: int, bind: bool, context: Context | None = None
) -> StreamSockets:
    """Open a stream's PUB socket, and its replay ROUTER, which always binds because clients come to it.

    Raises:
        StartError: an address is in use or not one of this machine; nothing stays open.
    """
    # inproc reaches only peers of the same context; every other stream is safer from others' destroy() in its own.
    shared = context or (zmq.Context.instance() if events_at.transport == "inproc" else None)
    used = shared or zmq.Context()
    opened: list[Socket] = []
    try:
        opened.append(_open(used, zmq.PUB, events_at, hwm=hwm, bind=bind))
        if replay_at:
            opened.append(_open(used, zmq.ROUTER, replay_at, hwm=_REPLAY_HWM, bind=True))
            # Without this a send to a client that is gone, or whose queue is full, vanishes without an error.
            opened[1].setsockopt(zmq.ROUTER_MANDATORY, 1)
    except StartError:
        for socket in opened:
            socket.close(linger=0)
        if shared is None:
            used.term()
        raise
    replay = opened[1] if replay_at else None
    return StreamSockets(
        own_context=None if shared else used,
        pub=opened[0],
        replay=replay,
        endpoint=_address(opened[0]) if bind else str(events_at),
        replay_endpoint=_address(replay) if replay else None,
    )


def _open(context: Context, kind: int, endpoint: Endpoint, *, hwm: int, bind: bool) -> Socket:
    socket: Socket = context.socket(kind)
    try:
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if endpoint.is_ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        if bind:
            socket.bind(str(endpoint))
        else:
            socket.connect(str(endpoint))
    except zmq.ZMQError as error:
        socket.close(linger=0)
        verb = "bind" if bind else "connect"
        mend = (
            "choose a free port, or stop the process that holds it"
            if error.errno == zmq.EADDRINUSE
            else "check that the address belongs to this machine, or set bind to say which end listens"
        )
        raise StartError(str(endpoint), f"cannot {verb}: {error.strerror}", mend) from error
    return socket


def _address(socket: Socket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
