"""IdleSleeper: a rank without work waits for its sockets, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import zmq

__all__ = ["IdleSleeper"]


class IdleSleeper:
    """Polls sockets and descriptors while a scheduler is idle; it has no timer and no thread, and one poller for all.

    SGLang's wakes every second. This one wakes when something has come, or at the time at which its caller has
    something to do, and says what it was.

    Args:
        sockets: what may bring work: PULL, DEALER, SUB or ROUTER.
        descriptors: file descriptors to watch too, such as the read end of a pipe that ends with the parent.

    Attributes:
        num_sleeps: calls of ``sleep``.
        num_timeouts: how many of them ended because the caller's time was up: wake-ups without news.
    """

    __slots__ = ("_poller", "num_sleeps", "num_timeouts")

    def __init__(self, sockets: Iterable[zmq.Socket[bytes]], descriptors: Iterable[int] = ()) -> None:
        self.num_sleeps = self.num_timeouts = 0
        self._poller = zmq.Poller()
        for watched in (*sockets, *descriptors):
            self._poller.register(watched, zmq.POLLIN)

    def sleep(self, timeout_s: float | None = None) -> frozenset[zmq.Socket[bytes] | int]:
        """Wait until something can be read, and return what can; nothing when ``timeout_s`` went by first.

        Args:
            timeout_s: until the caller has something to do; None to wait for input alone, 0 to look.
        """
        self.num_sleeps += 1
        ready = self._poller.poll(None if timeout_s is None else ceil(timeout_s * 1000))
        if not ready:
            self.num_timeouts += 1
        return frozenset(each for each, _ in ready)

    def __repr__(self) -> str:
        return f"<IdleSleeper: {self.num_sleeps} sleeps, {self.num_timeouts} of them without news>"
