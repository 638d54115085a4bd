"""Input over ZeroMQ: messages from a PULL socket, and what the leading rank relays over one PUSH socket per rank.

One way: the leading rank sends and goes on, at most a high-water mark ahead of the slowest rank, so no rank waits for
one that is not the leading one. Sockets are given, open, and belong to whoever opened them until ``close``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import zmq

from scheduler_components.errors import DecodeError
from scheduler_components.values import RelayedInput

__all__ = ["StopRequestedError", "WaitForSocket", "ZmqFollowerRelay", "ZmqInputSource", "ZmqLeaderRelay"]

_SEND_RETRY_MS = 100

WaitForSocket: TypeAlias = Callable[["zmq.Socket[bytes]", int, "int | None"], bool]
"""Wait for a socket's event up to a time in ms or for less; False when the engine stops."""


class StopRequestedError(Exception):
    """The engine stops while this rank waits for others, who may have stopped already."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RelayedInput).decode


@dataclass(slots=True, kw_only=True)
class ZmqInputSource:
    """An ``InputSource`` over a PULL or DEALER socket."""

    socket: zmq.Socket[bytes]

    def poll(self, most: int) -> Sequence[bytes]:
        frames = list[bytes]()
        # In most steps nothing has come: to ask costs a third of an exception.
        while len(frames) < most and zmq.zmq_poll([(self.socket, zmq.POLLIN)], 0):
            frames.append(self.socket.recv(zmq.DONTWAIT))
        return frames


@dataclass(slots=True, kw_only=True)
class ZmqLeaderRelay:
    """The leading rank's end of an ``InputRelay``.

    Attributes:
        followers: one PUSH socket per other rank, with a high-water mark: how far the leading rank may be ahead.
        wait_for: waits for room, and hears the order to stop.
    """

    followers: Sequence[zmq.Socket[bytes]]
    wait_for: WaitForSocket

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        if self.followers:
            frame = _encode(own)
            for follower in self.followers:
                self._send(follower, frame)
        return own

    def close(self) -> None:
        for socket in self.followers:
            socket.close(linger=0)

    def _send(self, follower: zmq.Socket[bytes], frame: bytes) -> None:
        while True:
            try:
                follower.send(frame, zmq.DONTWAIT)
                return
            except zmq.Again:
                if not self.wait_for(follower, zmq.POLLOUT, _SEND_RETRY_MS):
                    raise StopRequestedError from None


@dataclass(slots=True, kw_only=True)
class ZmqFollowerRelay:
    """Another rank's end of an ``InputRelay``.

    Attributes:
        steps: PULL, from the leading rank.
        wait_for: waits for it, and hears the order to stop.
    """

    steps: zmq.Socket[bytes]
    wait_for: WaitForSocket

    def broadcast(self, own: RelayedInput) -> RelayedInput:  # noqa: ARG002 - whoever asked compares the two
        while True:
            try:
                return _read(self.steps.recv(zmq.DONTWAIT))
            except zmq.Again:
                if not self.wait_for(self.steps, zmq.POLLIN, None):
                    raise StopRequestedError from None

    def close(self) -> None:
        self.steps.close(linger=0)


def _read(frame: bytes) -> RelayedInput:
    try:
        return _decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not what a leading rank relays: {error}") from error
