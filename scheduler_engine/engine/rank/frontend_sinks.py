"""The sinks of a rank that send to the frontend, over ZMQ PUSH sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from scheduler_components import WorkCounters
from scheduler_components.checks.thread_watchdog import log_stall
from scheduler_components.values import (
    InputMessage,
    LoadSnapshot,
    OutputBatch,
    RejectionReason,
    RequestRejection,
    StallReport,
)
from scheduler_engine.engine.messages import (
    FRONTEND_DISPATCHER,
    LoadReport,
    RankHeartbeat,
    RankReport,
    RankStalled,
    RequestRefused,
    SubmitRequest,
    encode,
    encode_outputs,
)


@dataclass(slots=True, kw_only=True)
class ZmqOutputSink:
    """An ``OutputSink`` over a connected PUSH socket with a high-water mark. Sending never blocks."""

    socket: zmq.Socket[bytes]

    def is_ready(self) -> bool:
        return bool(self.socket.poll(0, zmq.POLLOUT))

    def send(self, batch: OutputBatch) -> bool:
        try:
            self.socket.send(encode_outputs(batch), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=0)


_BUSY = frozenset({RejectionReason.TOO_MANY, RejectionReason.HELD_FULL, RejectionReason.DRAINING})


@dataclass(slots=True, kw_only=True)
class ZmqReportSender:
    """Sends reports over a connected PUSH socket without a high-water mark, so that sending never blocks."""

    socket: zmq.Socket[bytes]

    def send(self, report: RankReport) -> None:
        self.socket.send(encode(report))


@dataclass(slots=True, kw_only=True)
class FrontendLoadSink:
    """A ``ReportSink`` that sends the load to the frontend.

    Attributes:
        reports: the socket to the frontend, which the process closes.
    """

    reports: ZmqReportSender

    @property
    def wants_reports(self) -> bool:
        return True

    def send(self, load: LoadSnapshot) -> None:
        self.reports.send(LoadReport(load))

    def close(self) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class FrontendRefusalSink:
    """Its ``reject`` is for the ``InputBlocker`` of a leader: it reports each refused request.

    Attributes:
        reports: the socket to the frontend.
        work: counts dispatched requests, refused ones included.
    """

    reports: ZmqReportSender
    work: WorkCounters

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:
        if isinstance(incoming.message, SubmitRequest):
            self.work.on_request_received(FRONTEND_DISPATCHER, incoming.message.ticket)
        if refusal.reason is not RejectionReason.IN_USE:  # the first request with this id continues
            self.reports.send(RequestRefused(refusal.rid, refusal.text, refusal.reason in _BUSY))


def report_stalls_to(reports: ZmqReportSender, alive: RankHeartbeat) -> Callable[[StallReport], None]:
    """Return the ``sink`` of a watchdog that reports to the frontend and logs all stacks.

    Args:
        reports: a separate socket to the frontend, because a socket belongs to one thread: the watchdog's.
        alive: the heartbeat message of the watched rank.
    """

    def report(stall: StallReport) -> None:
        if not stall.is_resolved:  # afterwards the frontend sees the next heartbeat
            reports.send(RankStalled(alive, stall.place))
        log_stall(stall)

    return report
