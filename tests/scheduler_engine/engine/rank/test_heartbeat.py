"""Heartbeats are sent once per interval, also within a long wait, and the end of the pipe ends every wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from scheduler_components.receiving.zmq_input_relay import StopRequestedError
from scheduler_engine.engine.messages import HEARTBEAT_INTERVAL_S
from scheduler_engine.engine.rank.heartbeat import HeartbeatSender, StopPipe

pytestmark = pytest.mark.sockets


class Reports:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, report: Any) -> None:
        self.sent.append(report)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)


@pytest.fixture
def socket() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind("inproc://heartbeat")
        yield socket


def test_a_heartbeat_is_sent_once_per_interval(pipe: tuple[int, int]) -> None:
    now, reports = [100.0], Reports()
    sender: Any = HeartbeatSender(alive="alive", reports=reports, stop=StopPipe(pipe[0]), clock=lambda: now[0])  # type: ignore[arg-type]
    assert [sender.send_if_due(), sender.send_if_due()] == [True, False]
    assert sender.due_in_s == pytest.approx(HEARTBEAT_INTERVAL_S)
    now[0] += HEARTBEAT_INTERVAL_S
    assert sender.send_if_due()
    assert reports.sent == ["alive", "alive"]
    os.close(pipe[1])


def test_the_end_of_the_pipe_ends_a_wait(pipe: tuple[int, int], socket: zmq.Socket[bytes]) -> None:
    stop = StopPipe(pipe[0])
    assert stop.wait(socket, zmq.POLLIN, 0)
    os.close(pipe[1])
    assert not stop.wait(socket, zmq.POLLIN, 10_000)


def test_a_rank_that_waits_for_no_socket_sends_heartbeats_and_sees_the_end_of_the_pipe(pipe: tuple[int, int]) -> None:
    now, reports = [100.0], Reports()
    sender: Any = HeartbeatSender(alive="alive", reports=reports, stop=StopPipe(pipe[0]), clock=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        sender.keep_alive()
        now[0] += HEARTBEAT_INTERVAL_S / 2
    assert reports.sent == ["alive", "alive"]
    os.close(pipe[1])
    with pytest.raises(StopRequestedError):
        sender.keep_alive()
