"""The PUSH and PULL sockets between the engine's process and its ranks."""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

from scheduler_components.errors import StartError

SocketT = TypeVar("SocketT", bound=zmq.Socket[Any])


def bind_pull(context: zmq.Context[SocketT], address: str, *, high_water_mark: int) -> SocketT:
    """Bind a PULL socket.

    Raises:
        StartError: the address cannot be bound.
    """
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = high_water_mark
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        hint = "set TMPDIR to a short path to a writable directory"
        raise StartError(address, str(error), hint) from error
    return socket


def connect_push(context: zmq.Context[SocketT], address: str, *, high_water_mark: int = 0) -> SocketT:
    """Connect a PUSH socket, whose peer may bind later. With a high-water mark of 0 sending never blocks."""
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = high_water_mark
    socket.connect(address)
    return socket
