"""Ownership and closing of the publisher's sockets.

Property: no accepted batch is left to a timer, a close during a drain waits for nothing and leaves nothing open, and
neither does an unreferenced publisher.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from kit.events import numbered_batch
from kit.interruptions import InterruptedAtCallError, interrupted_at_call
from kit.sockets import Connected, Eventually, Open, OpenSocket, ReadReplay, SleepingBackstop, Subscribe

from scheduler_components import BlockRemoved, EventBatch, KVCacheEvent, PublisherClosedError
from scheduler_components.kv_events import (
    BatchDecoder,
    BatchEncoder,
    KVEventsConfig,
    ZmqEventPublisher,
    backlog,
    codec,
    handover,
    live_sender,
    replay,
    stream,
    stream_drain,
    zmq_publisher,
    zmq_sockets,
)
from scheduler_components.kv_events.backlog import MAX_WAITING
from scheduler_components.kv_events.thread_backstop import Backstop

pytestmark = pytest.mark.sockets

PARTS = (zmq_publisher, handover, stream_drain, live_sender, zmq_sockets, backlog, codec, stream, replay)


LISTENING = KVEventsConfig(bind=True)


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


class Interrupting(tuple[KVCacheEvent, ...]):
    """Events whose encoding runs other code, as a signal handler would: once, on the thread that drains."""

    __slots__ = ()
    handlers: ClassVar[list[Callable[[], object]]] = []

    def __iter__(self) -> Iterator[KVCacheEvent]:
        while self.handlers:
            self.handlers.pop()()
        return super().__iter__()


def interrupted(number: int, handler: Callable[[], object]) -> EventBatch:
    Interrupting.handlers.append(handler)
    # Two events, because a single one is not iterated over.
    return EventBatch(1.0, Interrupting((BlockRemoved((number,)), BlockRemoved((number,)))))


# A publish() between the last check of the pending batches and the release finds the sockets owned.


@pytest.mark.parametrize("looks", ["backstop", "idle", "publish"])
def test_batches_published_while_the_sockets_are_owned_are_sent_on_release(
    opened: Open, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    monkeypatch.setattr(zmq_publisher, "Backstop", SleepingBackstop)
    monkeypatch.setattr(zmq_publisher, "REQUESTS_EVERY_S", 0.0)
    publisher = opened(send_mode="inline" if looks == "publish" else "background")
    late = [numbered_batch(1), numbered_batch(2)]
    receive_requests = zmq_publisher.ZmqReplayServer.receive_requests

    def receive_late(server: zmq_publisher.ZmqReplayServer) -> bool:
        """Serve replays after the pending batches were checked; meanwhile the scheduler may publish."""
        if late:
            publisher.publish(late.pop())
        return receive_requests(server)

    monkeypatch.setattr(zmq_publisher.ZmqReplayServer, "receive_requests", receive_late)
    if looks == "backstop":
        monkeypatch.setattr(handover, "_STALLED_AFTER_S", 0.0)
        polls = 0
        while publisher.stats().batches_pending or not polls:
            assert publisher.poll(0.0) < 0.004
            polls += 1
    elif looks == "idle":
        publisher.idle()
    else:
        publisher.publish(numbered_batch(0))
    assert publisher.stats().batches_pending == 0
    assert publisher.stats().batches_sent >= 1


# close() inside a drain, as from a signal handler.


def close_from_a_signal(publisher: ZmqEventPublisher, found: list[object]) -> None:
    """Close as a signal handler on this thread, in the middle of other code."""

    def handle(*_: object) -> None:
        report = publisher.close(60.0)
        found.append((report.is_under_way, publisher.close(60.0) == report))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("call", ["publish", "idle"])
def test_a_signal_handler_closes_inside_a_drain_without_waiting_for_itself(
    opened: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def never_wait(publisher: ZmqEventPublisher, patience_s: float = 0.0) -> bool:
        assert patience_s == 0.0, "this wait could only be for itself"
        return close_edge(publisher, patience_s)

    close_edge = ZmqEventPublisher._close_edge
    publisher = opened(send_mode="inline")
    before = open_files()
    monkeypatch.setattr(ZmqEventPublisher, "_close_edge", never_wait)
    found: list[object] = []
    if call == "idle":
        publisher.publish(numbered_batch(0))
        publisher.idle()
        publisher.publish(interrupted(1, lambda: close_from_a_signal(publisher, found)))  # waits for the next idle()
        publisher.idle()
    else:
        publisher.publish(interrupted(1, lambda: close_from_a_signal(publisher, found)))
    assert found == [(True, True)]
    report = publisher.close(60.0)
    num_sent = 2 if call == "idle" else 1
    assert (report.batches_handed_over, report.batches_dropped, report.is_under_way) == (num_sent, 0, False)
    assert not report.was_cut
    assert open_files() < before
    opened(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    with pytest.raises(PublisherClosedError):
        publisher.publish(numbered_batch(2))


class LeaveError(Exception):
    """Raised by a handler to end the program."""


def test_a_handler_that_closes_and_raises_leaves_nothing_open(opened: Open) -> None:
    publisher = opened(send_mode="inline")

    def leave() -> None:
        publisher.close(60.0)
        raise LeaveError

    with pytest.raises(LeaveError):
        publisher.publish(interrupted(1, leave))
    assert not publisher.close(60.0).is_under_way
    opened(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)


@pytest.mark.parametrize("send_mode", ["inline", "background"])
def test_handlers_that_raise_anywhere_in_a_call_stop_nothing(
    opened: Open, subscribe: Subscribe, connected: Connected, eventually: Eventually, send_mode: str
) -> None:
    """A timer's signal arrives anywhere in publish() and idle(), also just after a lock was acquired."""

    def leave(*_: object) -> None:
        raise LeaveError

    publisher = opened(replay_endpoint=None, send_mode=send_mode)
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    before = signal.signal(signal.SIGALRM, leave)
    try:
        for trial in range(300):
            with contextlib.suppress(LeaveError):
                signal.setitimer(signal.ITIMER_REAL, 0.00002 * (1 + trial % 10))
                while True:
                    publisher.publish(numbered_batch(trial))
                    publisher.idle()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    publisher.publish(EventBatch(2.0, (BlockRemoved((7,)),)))
    eventually(lambda: publisher.stats().batches_pending == 0)
    messages = [subscriber.recv_multipart()]
    while BatchDecoder().decode(messages[-1][-1]).ts != 2.0:
        messages.append(subscriber.recv_multipart())
    assert {len(message) for message in messages} == {3}  # none is torn or continued
    numbers = [int.from_bytes(message[1], "big") for message in messages]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("send_mode", ["inline", "background"])
def test_a_handler_that_raises_at_any_call_leaves_the_publisher_usable(
    opened: Open, read_replay: ReadReplay, send_mode: str
) -> None:
    """In one publisher, at the first call of the code below ``publish()``, ``idle()`` and ``poll()``, then at the
    second, until all were tried.
    """
    publisher = opened(send_mode=send_mode, buffer_steps=100_000, max_queue_size=3)
    number, was_interrupted = 0, True
    while was_interrupted:
        number += 1
        was_interrupted = False
        try:
            with interrupted_at_call(number, *PARTS):
                for _ in range(4):
                    publisher.publish(numbered_batch(number))
                publisher.idle()
                publisher.publish(numbered_batch(number))
                publisher.poll(0.0)
                publisher.publish(numbered_batch(number))
                publisher.flush()
        except InterruptedAtCallError:
            was_interrupted = True
        publisher.publish(numbered_batch(10_000 + number))
        assert publisher.flush(10.0), f"nothing is sent after an exception at call {number}"
    assert number > 100
    events = read_replay(publisher.replay_endpoint)
    blocks = [block for each in events if isinstance(each, BlockRemoved) for block in each.block_hashes]
    assert [block for block in blocks if block > 10_000] == [*range(10_001, 10_001 + number)]
    stats = publisher.stats()
    assert (stats.batches_pending, stats.batches_dropped) == (0, 0)


def test_a_batch_that_a_handler_interrupts_is_sent_by_the_next_call(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_publisher, "Backstop", SleepingBackstop)
    publisher = opened()

    def leave() -> None:
        raise LeaveError

    publisher.publish(interrupted(1, leave))
    with pytest.raises(LeaveError):
        publisher.idle()
    publisher.idle()
    stats = publisher.stats()
    assert (stats.batches_pending, stats.batches_dropped, stats.batches_sent) == (0, 0, 1)


def test_a_handler_that_raises_while_too_many_batches_are_merged_loses_none(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_publisher, "Backstop", SleepingBackstop)
    publisher = opened(max_queue_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(ZmqEventPublisher, "_acquire", lambda _publisher, _wait_s: False)  # the sockets are in use
        for number in range(5):
            publisher.publish(numbered_batch(number))
    assert publisher.stats().batches_pending == 5

    def leave(_: object) -> None:
        raise LeaveError

    with monkeypatch.context() as patched:
        patched.setattr(live_sender, "merge_batches", leave)
        with pytest.raises(LeaveError):
            publisher.idle()
    assert publisher.stats().batches_pending == 5
    publisher.idle()
    stats = publisher.stats()
    assert (stats.batches_pending, stats.batches_dropped) == (0, 0)
    assert (stats.batches_sent, stats.batches_collapsed) == (2, 4)  # the oldest may be the cause, so it is sent alone


def interrupt_acquire(publisher: ZmqEventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a handler raise between the acquisition of the sockets and the code that releases them."""
    acquire = ZmqEventPublisher._acquire

    def interrupted(each: ZmqEventPublisher, wait_s: float) -> bool:
        assert acquire(each, wait_s)
        raise LeaveError

    with monkeypatch.context() as patched:
        patched.setattr(ZmqEventPublisher, "_acquire", interrupted)
        with pytest.raises(LeaveError):
            publisher.idle()


@pytest.mark.parametrize("call", ["publish", "idle", "poll", "close"])
def test_sockets_that_an_interrupted_call_kept_are_used_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(zmq_publisher, "Backstop", SleepingBackstop)
    publisher = opened()
    publisher.publish(numbered_batch(0))
    interrupt_acquire(publisher, monkeypatch)
    if call == "close":
        assert publisher.close(60.0).batches_handed_over == 1
    elif call == "publish":
        for number in range(1, MAX_WAITING):
            publisher.publish(numbered_batch(number))
    elif call == "idle":
        publisher.idle()
    else:
        monkeypatch.setattr(handover, "_STALLED_AFTER_S", 0.0)
        publisher.poll(0.0)
    assert publisher.stats().batches_sent > 0
    assert publisher.stats().send_stalls == 1
    assert caplog.text.count("a signal handler's exception interrupted") == 1


def test_sockets_in_use_for_long_while_batches_wait_are_reported_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    encode, encodes, go_on = zmq_publisher.BatchEncoder.encode_with_changes, threading.Event(), threading.Event()

    def stuck(encoder: BatchEncoder, batch: EventBatch, rank: int) -> object:
        encodes.set()
        assert go_on.wait(30.0)
        return encode(encoder, batch, rank)

    monkeypatch.setattr(zmq_publisher, "_STUCK_AFTER_S", 0.01)
    publisher = opened()
    with monkeypatch.context() as patched:
        patched.setattr(zmq_publisher.BatchEncoder, "encode_with_changes", stuck)
        publisher.publish(numbered_batch(0))
        assert encodes.wait(30.0)
        for number in range(1, 30):
            publisher.publish(numbered_batch(number))
    assert publisher.stats().send_stalls == 1
    assert caplog.text.count("has sent nothing") == 1
    go_on.set()
    eventually(lambda: publisher.stats().batches_sent == 30)
    assert publisher.stats().send_stalls == 1


@pytest.mark.parametrize("backstop", [Backstop, SleepingBackstop], ids=["ended", "not ended"])
def test_a_batch_that_close_overtook_is_refused_and_not_lost_in_silence(
    opened: Open, monkeypatch: pytest.MonkeyPatch, backstop: type
) -> None:
    monkeypatch.setattr(zmq_publisher, "Backstop", backstop)
    publisher = opened()

    monkeypatch.setattr(
        publisher, "_check_usable", lambda: (ZmqEventPublisher._check_usable(publisher), publisher.close(60.0))
    )
    with pytest.raises(PublisherClosedError):
        publisher.publish(numbered_batch(1))
    assert publisher.stats().batches_pending == 0


# Unreferenced publishers.


def threads_of_publishers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("kv-events-backstop")]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_publishers_that_are_dropped_without_shutdown_leave_nothing(
    in_a_cycle: bool, open_socket: OpenSocket, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    files, threads = open_files(), threads_of_publishers()
    for number in range(20):
        publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=LISTENING)
        publisher.publish(numbered_batch(number))
        publisher.idle()
        publisher.publish(numbered_batch(number))
        if in_a_cycle:
            publisher.itself = publisher  # type: ignore[attr-defined]
        del publisher
    gc.collect()
    # The last reference may have been the backstop's own during a poll.
    eventually(lambda: threads_of_publishers() == threads and open_files() == files)
    assert caplog.text.count("was dropped without shutdown()") == 20


def test_a_publisher_whose_last_reference_is_the_backstops_own_ends_on_that_thread(eventually: Eventually) -> None:
    ended, looking = threading.Event(), threading.Event()

    class Dropped:
        """Drop the last reference during a poll."""

        def poll(self, late_s: float) -> float:
            looking.set()
            dropped.wait(30.0)
            return 0.005

        def stop_deferring(self) -> None:
            pass

        def __del__(self) -> None:
            assert backstop.stop(10.0)
            ended.set()

    before = open_files()
    dropped = threading.Event()
    owner = Dropped()
    backstop = Backstop(owner, watched_fds=(), name="kv-events-backstop-dropped")
    backstop.start()
    backstop.watch()
    assert looking.wait(30.0)
    del owner
    dropped.set()
    assert ended.wait(30.0)
    eventually(lambda: not threads_of_publishers() and open_files() == before)
