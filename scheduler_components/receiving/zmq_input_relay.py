"""Input over ZeroMQ: receive messages on a PULL socket, and relay them over one PUSH socket per rank.

The relay is one-way. The leading rank sends and continues, at most one high-water mark ahead of the slowest rank, so no
rank waits for a rank other than the leading one. The caller opens the sockets and passes them; `close` closes them.
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
"""Wait for an event of a socket, at most the given ms (None: no limit); return False when the engine stops."""


class StopRequestedError(BaseException):
    """The engine stops while this rank waits for other ranks, which may have stopped already.

    Like ``KeyboardInterrupt`` it is no ``Exception``: it may come out of a sum of the model, and must not end requests.
    """


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RelayedInput).decode


@dataclass(slots=True, kw_only=True)
class ZmqInputSource:
    """An `InputSource` over a PULL or DEALER socket."""

    socket: zmq.Socket[bytes]

    def poll(self, most: int) -> Sequence[bytes]:
        frames = list[bytes]()
        # Usually there is no message, and a poll costs a third of the exception that recv would raise.
        while len(frames) < most and zmq.zmq_poll([(self.socket, zmq.POLLIN)], 0):
            frames.append(self.socket.recv(zmq.DONTWAIT))
        return frames


@dataclass(slots=True, kw_only=True)
class ZmqLeaderRelay:
    """The leading rank's end of an `InputRelay`.

    Attributes:
        followers: one PUSH socket per other rank. Its high-water mark limits how far the leading rank may be ahead.
        wait_for: waits until a socket accepts more, or until the engine stops.
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
    """Another rank's end of an `InputRelay`.

    Attributes:
        steps: PULL socket from the leading rank.
        wait_for: waits for input on it, or until the engine stops.
    """

    steps: zmq.Socket[bytes]
    wait_for: WaitForSocket

    def broadcast(self, own: RelayedInput) -> RelayedInput:  # the receiver compares the two
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
        raise DecodeError(f"the frame is no relayed input: {error}") from error
