"""A scheduler that never calls idle() leaves its batches to the thread, and publish() sends those that the thread
misses.

Property: no batch waits forever, is sent twice or out of order, or is sent by two threads together.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from kit.events import numbered_batch
from kit.sockets import SleepingBackstop

from scheduler_components import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch, PublisherClosedError
from scheduler_components.kv_events import ZmqEventPublisher, zmq_publisher
from scheduler_components.kv_events.backlog import MAX_WAITING
from scheduler_components.kv_events.thread_backstop import DrainResult

pytestmark = pytest.mark.sockets

Open = Callable[..., ZmqEventPublisher]
Eventually = Callable[[Callable[[], object]], None]
ReadReplay = Callable[[str | None], list[KVCacheEvent]]


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher without a thread: only the test's calls act."""
    monkeypatch.setattr(zmq_publisher, "Backstop", SleepingBackstop)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The publisher's monotonic clock, which only the test advances."""
    now = [1_000.0]
    stopped = SimpleNamespace(
        monotonic=lambda: now[0], thread_time=time.thread_time, time=time.time, time_ns=time.time_ns
    )
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
def test_old_or_expensive_batches_are_sent_by_publish(opened: Open, clock: list[float]) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(0))
    assert publisher.stats().batches_pending == 1
    clock[0] += 0.0041
    assert publisher.stats().lag_s == pytest.approx(0.0041)
    publisher.publish(numbered_batch(1))
    assert publisher.stats().batches_pending == 0
    publisher.publish(KVEventBatch(1.0, (BlockStored((1,), None, tuple(range(30_000)), 30_000, None),)))
    assert publisher.stats().batches_pending == 0


@pytest.mark.usefixtures("sleeping")
def test_a_late_thread_leaves_the_sockets_to_publish(opened: Open, clock: list[float]) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(0))
    clock[0] += 0.0005
    publisher.publish(numbered_batch(1))
    assert publisher.drain_for_scheduler(late_s=0.005) is DrainResult.DRAINING
    assert publisher.stats().batches_pending == 2
    clock[0] += 0.02  # a loop of long steps: the next call cannot be predicted
    publisher.publish(numbered_batch(2))
    clock[0] += 0.02
    publisher.publish(numbered_batch(3))
    assert publisher.stats().batches_pending == 0
    assert publisher.drain_for_scheduler(late_s=0.0) is not DrainResult.DRAINING  # it is on time again
    clock[0] += 0.02
    publisher.publish(numbered_batch(4))
    assert publisher.stats().batches_pending == 1
    clock[0] += 0.02  # the scheduler stops calling, but a late thread cannot know it yet
    assert publisher.drain_for_scheduler(late_s=0.005) is DrainResult.DRAINING
    clock[0] += 0.008
    assert publisher.drain_for_scheduler(late_s=0.005) is not DrainResult.DRAINING
    assert publisher.stats().batches_pending == 0


@pytest.mark.usefixtures("sleeping")
def test_a_thread_that_lost_the_gil_in_the_middle_is_not_counted_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    publisher = opened()
    drain = zmq_publisher.ZmqStreamSockets.drain

    def starve(edge: Any, *args: Any) -> bool:
        clock[0] += 0.01
        return drain(edge, *args)

    publisher.publish(numbered_batch(0))
    with monkeypatch.context() as patched:
        patched.setattr(zmq_publisher.ZmqStreamSockets, "drain", starve)
        publisher.drain_for_scheduler(0.0)
    clock[0] += 0.02
    publisher.publish(numbered_batch(1))
    assert publisher.stats().batches_pending == 0


@pytest.mark.usefixtures("sleeping")
def test_batches_published_while_the_thread_owns_the_sockets_are_sent(
    opened: Open, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    publisher = opened()
    count_peers = zmq_publisher.ZmqStreamSockets.drain
    late = [numbered_batch(number) for number in range(20)]

    def drain_late(edge: Any, *args: Any) -> bool:
        """Publish more than may wait just before the thread releases the sockets, when publish() cannot send."""
        unfinished = count_peers(edge, *args)
        while late:
            publisher.publish(late.pop())
        return unfinished

    publisher.publish(numbered_batch(20))
    monkeypatch.setattr(zmq_publisher.ZmqStreamSockets, "drain", drain_late)
    assert publisher.drain_for_scheduler(0.0) is DrainResult.SHARING  # so the thread polls again immediately
    assert publisher.stats().batches_pending == 20
    encode, num_slices = zmq_publisher.BatchEncoder.encode_with_changes, 1

    def slow(encoder: Any, *args: Any) -> Any:
        clock[0] += 0.0001
        return encode(encoder, *args)

    monkeypatch.setattr(zmq_publisher.BatchEncoder, "encode_with_changes", slow)
    while publisher.drain_for_scheduler(0.0) in (DrainResult.SHARING, DrainResult.BUSY):
        num_slices += 1
    assert publisher.stats().batches_pending == 0
    assert num_slices == 10  # two batches each: the sockets are released, and the scheduler gets the GIL


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
    drain = zmq_publisher.ZmqStreamSockets.drain
    inside: list[int] = []
    seen: set[tuple[int, int]] = set()

    def noted(edge: Any, *args: Any) -> bool:
        inside.append(threading.get_ident())
        seen.add((len(inside), inside[-1]))
        try:
            return drain(edge, *args)
        finally:
            inside.pop()

    monkeypatch.setattr(zmq_publisher.ZmqStreamSockets, "drain", noted)
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


def test_publish_sends_by_itself_when_the_thread_has_died(opened: Open, eventually: Eventually) -> None:
    publisher = opened(replay_endpoint=None)
    (backstop,) = (each for each in threading.enumerate() if each.name == "kv-events-backstop-0")
    assert backstop.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(backstop.ident), ctypes.py_object(RuntimeError))
    publisher.publish(numbered_batch(0))  # wakes the thread, which dies
    eventually(lambda: not backstop.is_alive())
    publisher.publish(numbered_batch(1))
    assert publisher.stats().batches_pending == 0
    assert publisher.close(10.0).batches_handed_over == 2


@pytest.mark.usefixtures("sleeping")
def test_close_sends_waiting_batches(opened: Open) -> None:
    publisher = opened()
    for number in range(3):
        publisher.publish(numbered_batch(number))
    assert publisher.close(0.0).batches_handed_over == 3
    with pytest.raises(PublisherClosedError):
        publisher.publish(numbered_batch(3))


def test_a_client_is_answered_while_batches_are_left_to_the_thread(
    opened: Open, open_socket: Callable[[int], zmq.Socket[bytes]]
) -> None:
    publisher = opened()
    for number in range(1_000):
        publisher.publish(numbered_batch(number))
    client = open_socket(zmq.DEALER)
    client.connect(publisher.replay_endpoint or "")
    client.send_multipart([b"", bytes(8)])
    numbers, pause = [0], threading.Event()
    count = 1_000
    while numbers[-1] != -1:
        publisher.publish(numbered_batch(count))
        count += 1
        pause.wait(0.0002)
        while client.poll(0):
            numbers.append(int.from_bytes(client.recv_multipart()[-2], "big", signed=True))
    assert numbers[1:1_001] == list(range(1_000))


@pytest.mark.usefixtures("sleeping")
def test_a_batch_that_close_overtook_is_refused_also_when_the_thread_has_not_ended(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = opened()
    check_usable = publisher._check_usable
    monkeypatch.setattr(publisher, "_check_usable", lambda: (check_usable(), publisher.close(60.0)))
    with pytest.raises(PublisherClosedError):
        publisher.publish(numbered_batch(1))
    assert publisher.stats().batches_pending == 0


@pytest.mark.usefixtures("sleeping")
def test_a_scheduler_that_calls_idle_again_keeps_the_sockets(opened: Open, clock: list[float]) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(0))
    publisher.idle()
    clock[0] += 0.001
    publisher.publish(numbered_batch(1))
    assert publisher.drain_for_scheduler(0.0) is DrainResult.DRAINING
    assert publisher.stats().batches_pending == 1
    publisher.idle()
    assert publisher.stats().batches_pending == 0


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
