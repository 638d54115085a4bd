"""Ownership and closing of the publisher's sockets.

Property: no accepted batch is left to a timer, a close during a drain waits for nothing and leaves nothing open, and
neither does an unreferenced publisher.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import zmq
from kit.events import numbered_batch
from kit.sockets import SleepingBackstop

from scheduler_components import BlockRemoved, EventBatch, KVCacheEvent, PublisherClosedError
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher, zmq_publisher
from scheduler_components.kv_events.thread_backstop import Backstop, DrainResult

pytestmark = pytest.mark.sockets

Open = Callable[..., ZmqEventPublisher]
Eventually = Callable[[Callable[[], object]], None]
OpenSocket = Callable[[int], zmq.Socket[bytes]]
Subscribe = Callable[..., zmq.Socket[bytes]]
Connected = Callable[..., int]


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
    publisher = opened(send_mode="inline" if looks == "publish" else "background")
    late = [numbered_batch(1), numbered_batch(2)]
    serve_slice = zmq_publisher.ZmqReplayServer.serve_slice

    def serve_late(server: zmq_publisher.ZmqReplayServer, now_s: float, *, is_waiting: bool = False) -> bool:
        """Serve replays after the pending batches were checked; meanwhile the scheduler may publish."""
        if late:
            publisher.publish(late.pop())
        return serve_slice(server, now_s, is_waiting=is_waiting)

    monkeypatch.setattr(zmq_publisher.ZmqReplayServer, "serve_slice", serve_late)
    if looks == "backstop":
        monkeypatch.setattr(zmq_publisher, "_STALLED_AFTER_S", 0.0)
        publisher.drain_for_scheduler(0.0)
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


def test_a_message_that_a_handler_tore_is_never_continued(
    opened: Open, subscribe: Subscribe, connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = opened(replay_endpoint=None, send_mode="inline")
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    live = publisher._edge.live
    send, sent = live._send, []

    def torn(*frame: object) -> None:
        send(*frame)
        sent.append(frame)
        if len(sent) == 2:
            live.pending.append(numbered_batch(2))
            publisher.close(60.0)
            raise LeaveError

    monkeypatch.setattr(live, "_send", torn)
    with pytest.raises(LeaveError):
        publisher.publish(numbered_batch(1))
    assert publisher.close(60.0).batches_dropped == 1
    assert not subscriber.poll(100)  # the partial message was discarded


def test_a_batch_that_close_overtook_is_refused_and_not_lost_in_silence(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
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

        def drain_for_scheduler(self, late_s: float) -> DrainResult:
            looking.set()
            dropped.wait(30.0)
            return DrainResult.DRAINING

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
