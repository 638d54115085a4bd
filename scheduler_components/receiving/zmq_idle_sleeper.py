"""IdleSleeper: wait for input on the sockets of a rank without work."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import zmq

__all__ = ["IdleSleeper"]


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
