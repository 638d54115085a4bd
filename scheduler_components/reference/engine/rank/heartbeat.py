"""The heartbeat of a rank process, and the pipe that stops it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import zmq

from scheduler_components.reference.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    RankHeartbeat,
)
from scheduler_components.reference.engine.rank.frontend_sinks import ZmqReportSender

__all__ = [
    "StopPipe",
    "HeartbeatSender",
]


class StopPipe:
    """The order to stop: the end of standard input, which comes by itself when the parent process dies.

    Args:
        descriptor: file descriptor to watch beside the sockets.
    """

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        """Wait until ``socket`` is ready for ``event`` or time is up; False when the order to stop came."""
        poller = zmq.Poller()
        poller.register(socket, event)
        poller.register(self.descriptor, zmq.POLLIN)
        return all(ready != self.descriptor for ready, _ in poller.poll(timeout_ms))


@dataclass(slots=True, kw_only=True)
class HeartbeatSender:
    """Tells the front that this rank runs. Who waits for another rank says it too: otherwise all that wait for a silent
    rank were as silent as it, and chance would name one of them.

    Attributes:
        alive: what is said.
        reports: the way to the front.
        stop: the order to stop, which every wait hears.
        clock: monotonic seconds.
    """

    alive: RankHeartbeat
    reports: ZmqReportSender
    stop: StopPipe
    clock: Callable[[], float] = time.monotonic
    _due_s: float = field(default=0.0, init=False)

    def send_if_due(self) -> bool:
        """Say it, unless it was said lately; True when it was said now."""
        now_s = self.clock()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + HEARTBEAT_INTERVAL_S
        self.reports.send(self.alive)
        return True

    @property
    def due_in_s(self) -> float:
        """When it is to be said next."""
        return max(0.0, self._due_s - self.clock())

    def wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        """Do what ``StopPipe.wait`` does, until this is to be said next at most: whoever still waits calls again."""
        self.send_if_due()
        due_ms = ceil(self.due_in_s * 1000)
        return self.stop.wait(socket, event, due_ms if timeout_ms is None else min(timeout_ms, due_ms))
