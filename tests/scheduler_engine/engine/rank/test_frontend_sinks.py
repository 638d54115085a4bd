"""What a rank sends to the frontend: outputs that never block the step, loads, refusals and stalls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from scheduler_components import WorkCounters
from scheduler_components.values import (
    InputKind,
    InputMessage,
    LoadSnapshot,
    OutputBatch,
    RejectionReason,
    RequestRejection,
    StallReport,
)
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.messages import (
    FRONTEND_DISPATCHER,
    LoadReport,
    RankHeartbeat,
    RankReport,
    RankStalled,
    RequestRefused,
    SubmitRequest,
    decode_outputs,
    decode_report,
    pack_tokens,
)
from scheduler_engine.engine.rank.frontend_sinks import (
    FrontendLoadSink,
    FrontendRefusalSink,
    ZmqOutputSink,
    ZmqReportSender,
    report_stalls_to,
)

pytestmark = pytest.mark.sockets

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def open_pair(stack: ExitStack) -> Callable[[int], Pair]:
    """Open a PUSH with this high-water mark and the PULL that reads it, which has room for one message."""

    def start(high_water_mark: int) -> Pair:
        context = stack.enter_context(zmq.Context())
        push, pull = stack.enter_context(context.socket(zmq.PUSH)), stack.enter_context(context.socket(zmq.PULL))
        push.sndhwm, pull.rcvhwm, push.linger = high_water_mark, 1, 0
        pull.bind("inproc://frontend")
        push.connect("inproc://frontend")
        return push, pull

    return start


@pytest.fixture
def reports(open_pair: Callable[[int], Pair]) -> Iterator[tuple[ZmqReportSender, Callable[[], list[RankReport]]]]:
    push, pull = open_pair(0)

    def read() -> list[RankReport]:
        found = []
        while pull.poll(0):
            found.append(decode_report(pull.recv()))
        return found

    yield ZmqReportSender(socket=push), read


Reports = tuple[ZmqReportSender, Callable[[], list[RankReport]]]


def test_outputs_are_refused_not_waited_for_while_the_frontend_reads_nothing(
    open_pair: Callable[[int], Pair],
) -> None:
    push, pull = open_pair(1)
    sink = ZmqOutputSink(socket=push)
    num_sent = 0
    while sink.is_ready():
        assert sink.send(OutputBatch(num_sent, ()))
        num_sent += 1
    assert num_sent
    assert not sink.send(OutputBatch(num_sent, ())), "the batch stays with the scheduler"
    assert [decode_outputs(pull.recv()).sequence for _ in range(num_sent)] == list(range(num_sent))
    assert sink.is_ready()
    sink.close()
    assert push.closed


def test_a_load_is_reported(reports: Reports) -> None:
    sender, read = reports
    sink = FrontendLoadSink(reports=sender)
    assert sink.wants_reports
    sink.send(LoadSnapshot(sequence=4, num_running_reqs=2))
    sink.close()  # the process closes the socket
    sink.send(LoadSnapshot(sequence=5))
    assert read() == [LoadReport(LoadSnapshot(sequence=4, num_running_reqs=2)), LoadReport(LoadSnapshot(sequence=5))]


def rejection(reason: RejectionReason) -> RequestRejection:
    return RequestRejection("r", reason, f"it is {reason}")


SUBMITTED = InputMessage(InputKind.REQUEST, SubmitRequest("r", pack_tokens([1]), SamplingLimits(), 1, 7), "r")


@pytest.mark.parametrize(
    ("reason", "is_busy"),
    [(each, each in ("too_many", "held_full", "draining")) for each in RejectionReason if each != "in_use"],
)
def test_a_refusal_says_whether_a_later_try_may_succeed(
    reports: Reports, reason: RejectionReason, is_busy: bool
) -> None:
    sender, read = reports
    work = WorkCounters()
    FrontendRefusalSink(reports=sender, work=work).reject(rejection(reason), SUBMITTED)
    assert read() == [RequestRefused("r", f"it is {reason}", is_busy)]
    assert work.dispatched_watermarks == ((FRONTEND_DISPATCHER, 7),), "the dispatcher must not wait for it"


def test_a_repeated_id_is_counted_and_not_reported_because_the_first_request_continues(reports: Reports) -> None:
    sender, read = reports
    work = WorkCounters()
    FrontendRefusalSink(reports=sender, work=work).reject(rejection(RejectionReason.IN_USE), SUBMITTED)
    assert read() == []
    assert work.dispatched_watermarks == ((FRONTEND_DISPATCHER, 7),)


def test_a_refused_message_other_than_a_request_has_no_ticket(reports: Reports) -> None:
    sender, read = reports
    work = WorkCounters()
    other: InputMessage[object] = InputMessage(InputKind.REQUEST, "an embedding", "r")
    FrontendRefusalSink(reports=sender, work=work).reject(rejection(RejectionReason.TOO_LARGE), other)
    assert len(read()) == 1
    assert work.dispatched_watermarks == ()


def test_a_stall_is_reported_and_logged_with_its_stacks(reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    sender, read = reports
    alive = RankHeartbeat("dp0/tp1", 0)
    report = report_stalls_to(sender, alive)
    stall = StallReport("dp0/tp1", 8, "forward", "r3", 2.5, stacks="the stack of the step")
    with caplog.at_level(logging.INFO):
        report(stall)
    assert read() == [RankStalled(alive, "step 8, phase forward, request r3")]
    assert "the stack of the step" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        report(StallReport("dp0/tp1", 8, "forward", "r3", 9.0, is_resolved=True))
    assert read() == [], "the next heartbeat says it"
    assert "continued after 9.0 s" in caplog.text
