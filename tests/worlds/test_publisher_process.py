"""A publisher's process: what waits, what is kept, what a fault costs, and which number an epoch begins with."""

from __future__ import annotations

import attrs
import pytest

from scheduler_components import BlockStored
from scheduler_components.kv_events import EventStream, codec
from scheduler_components.kv_events.backlog import Backlog
from scheduler_components.kv_events.handover import Handover
from scheduler_components.kv_events.live_sender import LiveSender
from worlds import DiskFaults, FaultyDisk, LiveFrame, PublisherShape, Timeline
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.timeline import BrokenPromise, WorldCounters

CLOCK = ProcessShape(publisher=PublisherShape(seq_base="clock", max_pending=20, window=8), has_floor=True)


class Bench:
    """A process with a peer that notes frames."""

    def __init__(self, shape: ProcessShape = CLOCK, **disk: float) -> None:
        self.timeline = Timeline(seed=0)
        self.counters = WorldCounters()
        self.disk = FaultyDisk(random=self.timeline.random, faults=DiskFaults(**disk))
        self.frames: list[tuple[float, LiveFrame]] = []
        self.num_gone = 0
        self.answers: list[int] = []
        self.process = PublisherProcess(self.timeline, shape, disk=self.disk, counters=self.counters)
        self.process.peers.append(self)

    def on_frame(self, frame: LiveFrame) -> None:
        self.frames.append((self.timeline.now_s, frame))

    def can_take(self, client: bytes) -> bool | None:
        del client
        return True

    def take(self, client: bytes, message: tuple[bytes, ...]) -> None:
        del client
        self.answers.append(int.from_bytes(message[-2], "big", signed=True))

    def on_publisher_gone(self) -> None:
        self.num_gone += 1

    def publish(self, count: int = 1) -> None:
        for number in range(count):
            self.process.publish((BlockStored((number,), None, (number,), 1, None),))


def test_a_publisher_that_leaves_batches_waiting_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    monkeypatch.setattr(Backlog, "may_wait", lambda *_, **__: True)
    with pytest.raises(BrokenPromise, match="few batches wait"):
        it.publish(12)


def test_a_publisher_whose_thread_sleeps_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    monkeypatch.setattr(Backlog, "next_poll_in_s", lambda *_, **__: 60.0)
    it.publish()
    it.timeline.run_until(1.0)
    with pytest.raises(BrokenPromise, match="no batch waits for long"):
        it.process.check()


def test_a_stream_that_keeps_too_many_bytes_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(attrs.evolve(CLOCK, publisher=PublisherShape(max_bytes=300, window=100, max_pending=20)))
    monkeypatch.setattr(EventStream, "is_over_limit", False)
    with pytest.raises(BrokenPromise, match=r"memory is bounded: the stream keeps \d+ bytes of 300"):
        for number in range(60):
            it.timeline.run_until(0.01 * number)
            it.publish()


# A late thread.


def test_a_call_that_leaves_an_old_batch_to_the_thread_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    it.process.delay_thread(10.0)
    monkeypatch.setattr(Handover, "may_wait", lambda *_: True)
    it.publish()
    it.timeline.run_until(0.0045)
    with pytest.raises(BrokenPromise, match="no batch waits for long: publish"):
        it.publish()


# What is sent says what was published.


def test_a_part_that_is_not_sent_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(attrs.evolve(CLOCK, publisher=PublisherShape(large_bytes=60)))
    split = codec.split_events
    monkeypatch.setattr(
        "scheduler_components.kv_events.live_sender.split_events", lambda events: (split(events) or ())[:1]
    )
    with pytest.raises(BrokenPromise, match="no published event is lost"):
        it.process.publish([BlockStored((each, each + 1), None, (each, each + 1), 1, None) for each in range(0, 20, 2)])
        it.timeline.run_until(1.0)


def test_an_event_that_is_left_out_without_a_count_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    monkeypatch.setattr(LiveSender, "_refuse", lambda *_: None)
    it.process.publish((), refused=(BlockStored((1,), None, (2**40,), 1, None),))
    with pytest.raises(BrokenPromise, match="everything is counted"):
        it.timeline.run_until(1.0)


# The first number of an epoch.


def test_a_floor_that_is_not_used_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    monkeypatch.setattr(FaultyDisk, "read", lambda *_: None)
    it.process.crash(is_clean=False)
    with pytest.raises(BrokenPromise, match="an epoch starts above every earlier one"):
        it.process.restart(skew_s=-3_600.0)
