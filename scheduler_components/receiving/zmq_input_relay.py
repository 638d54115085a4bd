"""Input over ZeroMQ: receive on a PULL socket, relay over one PUSH socket per rank, and sleep while there is no work.

The relay is one-way. The leading rank sends and continues, at most one high-water mark ahead of the slowest rank, so no
rank waits for a rank other than the leading one. The caller opens the sockets and passes them; `close` closes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

import msgspec
import zmq

from scheduler_components.errors import DecodeError
from scheduler_components.values import RelayedInput

__all__ = ["IdleSleeper", "StopRequestedError", "WaitForSocket", "ZmqFollowerRelay", "ZmqInputSource", "ZmqLeaderRelay"]

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


class IdleSleeper:
    """Polls sockets and file descriptors while a scheduler is idle. It has one poller, and no timer or thread.

    SGLang's idle sleeper wakes every second. This one wakes when input arrives, or at the time that its caller gives,
    and returns what became readable.

    Args:
        sockets: sockets that may bring work: PULL, DEALER, SUB or ROUTER.
        descriptors: further file descriptors, such as the read end of a pipe that closes with the parent process.

    Attributes:
        num_sleeps: calls of `sleep`.
        num_timeouts: calls that ended without input.
    """

    __slots__ = ("_poller", "num_sleeps", "num_timeouts")

    def __init__(self, sockets: Iterable[zmq.Socket[bytes]], descriptors: Iterable[int] = ()) -> None:
        self.num_sleeps = self.num_timeouts = 0
        self._poller = zmq.Poller()
        for watched in (*sockets, *descriptors):
            self._poller.register(watched, zmq.POLLIN)

    def sleep(self, timeout_s: float | None = None) -> frozenset[zmq.Socket[bytes] | int]:
        """Wait until something is readable and return it; return nothing after `timeout_s`.

        Args:
            timeout_s: seconds until the caller has other work; None to wait for input only, 0 or less to check once.
        """
        self.num_sleeps += 1
        ready = self._poller.poll(None if timeout_s is None else ceil(max(0.0, timeout_s) * 1000))
        if not ready:
            self.num_timeouts += 1
        return frozenset(each for each, _ in ready)

    def __repr__(self) -> str:
        return f"<IdleSleeper: {self.num_sleeps} sleeps, {self.num_timeouts} of them without input>"
