"""An idle rank waits for its sockets only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import zmq

from scheduler_components.receiving.zmq_input_relay import IdleSleeper

pytestmark = pytest.mark.sockets


@pytest.fixture
def wire() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    pull.bind("inproc://input")
    push.connect("inproc://input")
    yield push, pull
    context.destroy(linger=0)


def test_it_wakes_for_input_only(wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    push, pull = wire
    sleeper = IdleSleeper([pull])
    called = threading.Event()
    woken: list[object] = []

    def sleep() -> None:
        called.set()
        woken.extend(sleeper.sleep())

    sleeping = threading.Thread(target=sleep)
    sleeping.start()
    assert called.wait(10)
    push.send(b"request")
    sleeping.join(10)
    assert woken == [pull]
    assert (sleeper.num_sleeps, sleeper.num_timeouts) == (1, 0)
    assert sleeper.sleep(0) == {pull}, "an unread message is still there"


def test_it_wakes_at_the_callers_timeout(
    wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    sleeper = IdleSleeper([wire[1]])
    assert sleeper.sleep(0.0001) == frozenset()
    assert sleeper.sleep(0) == frozenset()
    assert (sleeper.num_sleeps, sleeper.num_timeouts) == (2, 2)
    assert repr(sleeper) == "<IdleSleeper: 2 sleeps, 2 of them without input>"


def test_it_wakes_when_the_parent_process_ends(wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    try:
        assert IdleSleeper([wire[1]], [reader]).sleep() == {reader}
    finally:
        os.close(reader)


def test_an_overdue_caller_checks_once(wire: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    sleeper = IdleSleeper([wire[1]])
    assert sleeper.sleep(-0.01) == frozenset()
    assert sleeper.num_timeouts == 1
