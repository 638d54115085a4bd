"""A scheduler that never calls idle() leaves its batches to the thread, and publish() sends those that the thread
misses.

Property: no batch waits forever, is sent twice or out of order, or is sent by two threads together.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kit.events import numbered_batch
from kit.sockets import Eventually, Open, ReadReplay, SleepingBackstop

from scheduler_components import BlockRemoved
from scheduler_components.kv_events import stream_drain, zmq_publisher
from scheduler_components.kv_events.backlog import MAX_WAITING

pytestmark = pytest.mark.sockets


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher without a thread: only the test's calls act."""
    monkeypatch.setattr(zmq_publisher, "Backstop", SleepingBackstop)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The publisher's monotonic clock, which only the test advances."""
    now = [1_000.0]
    stopped = SimpleNamespace(monotonic=lambda: now[0], time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(zmq_publisher, "time", stopped)
    return now


@pytest.mark.usefixtures("sleeping")
@pytest.mark.parametrize("max_queue_size", [1, 3, 100])
def test_a_starved_thread_leaves_few_batches_waiting(opened: Open, max_queue_size: int) -> None:
    publisher = opened(max_queue_size=max_queue_size)
    for number in range(100):
        publisher.publish(numbered_batch(number))
        assert publisher.stats().batches_pending < min(MAX_WAITING, max_queue_size)
    report = publisher.close(10.0)
    assert (report.batches_handed_over, report.batches_dropped, publisher.stats().batches_collapsed) == (100, 0, 0)


@pytest.mark.usefixtures("sleeping")
def test_old_batches_are_sent_by_publish(opened: Open, clock: list[float]) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(0))
    assert publisher.stats().batches_pending == 1
    clock[0] += 0.0041
    assert publisher.stats().lag_s == pytest.approx(0.0041)
    publisher.publish(numbered_batch(1))
    assert publisher.stats().batches_pending == 0


@pytest.mark.usefixtures("sleeping")
def test_a_call_sends_for_a_short_time_and_the_next_call_goes_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    encode = zmq_publisher.BatchEncoder.encode_with_changes

    def slow(encoder: Any, *args: Any) -> Any:
        clock[0] += 0.00003
        return encode(encoder, *args)

    publisher = opened()
    monkeypatch.setattr(zmq_publisher.BatchEncoder, "encode_with_changes", slow)
    pending = []
    for number in range(16):
        publisher.publish(numbered_batch(number))
        pending.append(publisher.stats().batches_pending)
    assert pending == [*range(1, 12), 9, 10, 11, 9, 10]  # three batches in 75 us and a little
    publisher.idle()
    assert publisher.stats().batches_pending == 0


@pytest.mark.usefixtures("sleeping")
def test_a_late_thread_is_not_counted_on_for_a_while(opened: Open, clock: list[float]) -> None:
    publisher = opened()

    def pending_after_a_long_step() -> int:
        clock[0] += 0.02
        publisher.poll(late_s=0.0)
        clock[0] += 0.02
        publisher.publish(numbered_batch(0))
        return publisher.stats().batches_pending

    assert pending_after_a_long_step() == 1
    publisher.poll(late_s=0.005)
    assert publisher.stats().batches_pending == 1  # left to publish(), which was just called
    clock[0] += 0.004
    publisher.poll(late_s=0.005)
    assert publisher.stats().batches_pending == 0  # it sends what waits, although it is late
    assert [pending_after_a_long_step() for _ in range(3)] == [0, 0, 0]
    clock[0] += 1.0
    assert pending_after_a_long_step() == 1


@pytest.mark.usefixtures("sleeping")
@pytest.mark.parametrize("overdue_s", [0.0, 0.0029, 0.0031])
def test_a_thread_whose_poll_is_overdue_is_not_counted_on(opened: Open, clock: list[float], overdue_s: float) -> None:
    publisher = opened()
    clock[0] += 0.02
    publisher._backstop.due_s = clock[0] - overdue_s
    publisher.publish(numbered_batch(0))
    assert publisher.stats().batches_pending == (overdue_s < 0.003)


@pytest.mark.usefixtures("sleeping")
def test_batches_published_while_the_thread_owns_the_sockets_are_sent(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = stream_drain.StreamDrain.drain
    late = [numbered_batch(number) for number in range(20)]

    def drain_late(work: Any, *args: Any, **options: Any) -> bool:
        """Publish more than may wait just before the thread releases the sockets, when publish() cannot send."""
        unfinished = drain(work, *args, **options)
        while late:
            publisher.publish(late.pop())
        return unfinished

    monkeypatch.setattr(zmq_publisher, "_OWNER_WAIT_S", 0.0)
    publisher = opened()
    publisher.publish(numbered_batch(20))
    monkeypatch.setattr(stream_drain.StreamDrain, "drain", drain_late)
    assert publisher.poll(0.0) < 0.001
    assert publisher.stats().batches_pending == 20
    while publisher.poll(0.0) < 0.001:
        pass
    assert publisher.stats().batches_pending == 0


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 20])
def test_waiting_batches_are_sent_when_the_scheduler_stops_calling(
    opened: Open, read_replay: ReadReplay, eventually: Eventually, count: int
) -> None:
    publisher = opened()
    for number in range(count):
        publisher.publish(numbered_batch(number))
    eventually(lambda: publisher.stats().batches_sent == count)
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((number,)) for number in range(count)]


def test_thread_and_scheduler_never_own_the_sockets_together(
    opened: Open, monkeypatch: pytest.MonkeyPatch, read_replay: ReadReplay
) -> None:
    drain = stream_drain.StreamDrain.drain
    inside: list[int] = []
    seen: set[tuple[int, int]] = set()

    def noted(work: Any, *args: Any, **options: Any) -> bool:
        inside.append(threading.get_ident())
        seen.add((len(inside), inside[-1]))
        try:
            return drain(work, *args, **options)
        finally:
            inside.pop()

    monkeypatch.setattr(stream_drain.StreamDrain, "drain", noted)
    publisher = opened()
    pause = threading.Event()
    count = 0
    while len(seen) < 2 or count < 500:  # until both have sent something
        publisher.publish(numbered_batch(count))
        if count % 50 == 0:
            pause.wait(0.002)
        count += 1
    assert {number for number, _ in seen} == {1}
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((number,)) for number in range(count)]


@pytest.mark.usefixtures("sleeping")
def test_a_scheduler_that_calls_idle_again_keeps_the_sockets(opened: Open, clock: list[float]) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(0))
    publisher.idle()
    clock[0] += 0.001
    publisher.publish(numbered_batch(1))
    assert publisher.poll(0.0) == pytest.approx(0.004)  # when the scheduler would have stopped draining
    assert publisher.stats().batches_pending == 1
    publisher.idle()
    assert publisher.stats().batches_pending == 0


@pytest.mark.usefixtures("sleeping")
def test_a_batch_waits_for_the_next_idle_only_if_that_is_soon_or_the_thread_is_prompt(
    opened: Open, clock: list[float]
) -> None:
    publisher = opened()

    def pending_after(step_s: float) -> int:
        publisher.publish(numbered_batch(0))
        publisher.idle()
        clock[0] += step_s
        publisher.idle()
        publisher.publish(numbered_batch(1))
        return publisher.stats().batches_pending

    assert pending_after(0.1) == 1
    publisher._backstop.due_s = clock[0] - 1.0  # the thread has been starving for a second
    assert pending_after(0.001) == 1
    assert pending_after(0.1) == 0


def test_a_batch_that_the_thread_encodes_just_now_is_pending(
    opened: Open, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """A reader that compares the pool with the stream's last number must know that the number will change."""
    encode, encodes, go_on = zmq_publisher.BatchEncoder.encode_with_changes, threading.Event(), threading.Event()

    def slow(encoder: Any, *args: Any) -> Any:
        encodes.set()
        assert go_on.wait(30.0)
        return encode(encoder, *args)

    publisher = opened()
    monkeypatch.setattr(zmq_publisher.BatchEncoder, "encode_with_changes", slow)
    publisher.publish(numbered_batch(0))
    assert encodes.wait(30.0)
    stats = publisher.stats()
    go_on.set()
    assert (stats.batches_pending, stats.last_sequence) == (1, -1)
    eventually(lambda: publisher.stats().batches_pending == 0)
    assert publisher.stats().last_sequence == 0


class WatchedLock:
    """A lock that says when a caller waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.has_waiter = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        if timeout > 0.0:
            self.has_waiter.set()
        return self.lock.acquire(blocking, timeout)

    def locked(self) -> bool:
        return self.lock.locked()

    def release(self) -> None:
        self.lock.release()


def test_a_flush_waits_for_the_thread_that_uses_the_sockets(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread encodes the first batch until a flush waits for it. The second batch is left to the flush."""
    encode, encodes = zmq_publisher.BatchEncoder.encode_with_changes, threading.Event()
    owner = WatchedLock()

    def slow(encoder: Any, *args: Any) -> Any:
        encodes.set()
        assert owner.has_waiter.wait(30.0)
        return encode(encoder, *args)

    publisher = opened()
    monkeypatch.setattr(zmq_publisher, "_OWNER_WAIT_S", 0.0)
    monkeypatch.setattr(publisher, "_owner", owner)
    monkeypatch.setattr(zmq_publisher.BatchEncoder, "encode_with_changes", slow)
    publisher.publish(numbered_batch(0))
    assert encodes.wait(30.0)
    publisher.publish(numbered_batch(1))
    assert not publisher.flush()
    assert publisher.stats().last_sequence == -1
    assert publisher.flush(30.0)
    stats = publisher.stats()
    assert (stats.batches_pending, stats.last_sequence) == (0, 1)
    publisher.shutdown()
    assert publisher.flush(30.0)
