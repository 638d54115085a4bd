"""The heartbeat of a rank process, and the pipe that stops it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import zmq

from scheduler_components.receiving.zmq_input_relay import StopRequestedError
from scheduler_engine.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    RankHeartbeat,
)
from scheduler_engine.engine.rank.frontend_sinks import ZmqReportSender


class StopPipe:
    """The signal to stop: the end of standard input, which also comes when the parent process dies.

    Args:
        descriptor: file descriptor of standard input.
    """

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        """Wait until ``socket`` is ready for ``event`` or the time is up. Return False if the rank must stop."""
        poller = zmq.Poller()
        poller.register(socket, event)
        poller.register(self.descriptor, zmq.POLLIN)
        return all(ready != self.descriptor for ready, _ in poller.poll(timeout_ms))

    @property
    def is_requested(self) -> bool:
        """True if the rank must stop. A poll without a wait."""
        return bool(zmq.zmq_poll([(self.descriptor, zmq.POLLIN)], 0))


@dataclass(slots=True, kw_only=True)
class HeartbeatSender:
    """Sends heartbeats to the frontend, also while the rank waits for another rank.

    If a waiting rank sent none, it would look as dead as the rank that it waits for, and the frontend could not tell
    which of them is stopped.

    Attributes:
        alive: the message.
        reports: the socket to the frontend.
        stop: the signal to stop, which ends every wait.
        clock: monotonic seconds.
    """

    alive: RankHeartbeat
    reports: ZmqReportSender
    stop: StopPipe
    clock: Callable[[], float] = time.monotonic
    _due_s: float = field(default=0.0, init=False)

    def send_if_due(self) -> bool:
        """Send a heartbeat if ``HEARTBEAT_INTERVAL_S`` has passed since the last one. Return True if it was sent."""
        now_s = self.clock()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + HEARTBEAT_INTERVAL_S
        self.reports.send(self.alive)
        return True

    def keep_alive(self) -> None:
        """Send a heartbeat if one is due. For waits outside sockets, such as a sum over gloo.

        Raises:
            StopRequestedError: the rank must stop.
        """
        self.send_if_due()
        if self.stop.is_requested:
            raise StopRequestedError

    @property
    def due_in_s(self) -> float:
        """Seconds until the next heartbeat is due."""
        return max(0.0, self._due_s - self.clock())

    def wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        """Wait as ``StopPipe.wait`` does, at most until the next heartbeat is due. The caller repeats the call."""
        self.send_if_due()
        due_ms = ceil(self.due_in_s * 1000)
        return self.stop.wait(socket, event, due_ms if timeout_ms is None else min(timeout_ms, due_ms))
