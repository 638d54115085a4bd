"""A publisher's process: what waits, what is kept, and which number an epoch begins with."""

from __future__ import annotations

import attrs
import pytest

from observability.simulation import DiskFaults, FaultyDisk, LiveFrame, PublisherShape, Timeline
from observability.simulation.publisher_process import MAX_SEND_DELAY_S, ProcessShape, PublisherProcess
from observability.simulation.timeline import BrokenPromise
from observability.simulation.world_counters import WorldCounters
from scheduler_components import BlockStored
from scheduler_components.kv_events.backlog import Backlog

CLOCK = ProcessShape(publisher=PublisherShape(seq_base="clock", max_pending=20, window=8), has_floor=True)


class Bench:
    """A process with a peer that notes frames."""

    def __init__(self, shape: ProcessShape = CLOCK, **disk: float) -> None:
        self.timeline = Timeline(seed=0)
        self.counters = WorldCounters()
        self.disk = FaultyDisk(random=self.timeline.random, faults=DiskFaults(**disk))
        self.frames: list[tuple[float, LiveFrame]] = []
        self.num_gone = 0
        self.process = PublisherProcess(self.timeline, shape, disk=self.disk, counters=self.counters)
        self.process.peers.append(self)

    def on_frame(self, frame: LiveFrame) -> None:
        self.frames.append((self.timeline.now_s, frame))

    def can_take(self, client: bytes) -> bool | None:
        del client
        return True

    def take(self, client: bytes, message: tuple[bytes, ...]) -> None:
        del client, message

    def on_publisher_gone(self) -> None:
        self.num_gone += 1

    def publish(self, count: int = 1) -> None:
        for number in range(count):
            self.process.publish((BlockStored((number,), None, (number,), 1, None),))


def test_a_batch_is_sent_within_milliseconds() -> None:
    it = Bench()
    for number in range(20):
        it.timeline.at(0.0017 * number, it.publish)
    it.timeline.run_until(1.0)
    assert len(it.frames) == 20
    sent = [time_s for time_s, _ in it.frames]
    assert all(sent[number] - 0.0017 * number <= MAX_SEND_DELAY_S for number in range(20))
    assert max(sent[number] - 0.0017 * number for number in range(20)) > 0.001


def test_what_a_stall_has_held_up_becomes_one_batch() -> None:
    it = Bench()
    it.process.stall(1.0)
    it.publish(100)
    it.timeline.run_until(0.9)
    assert it.frames == []
    it.timeline.run_until(1.1)
    assert len(it.frames) == 1
    assert it.process.actor.sender.num_collapsed == 100


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


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_restart_numbers_above_every_earlier_epoch_although_the_clock_was_set_back(is_clean: bool) -> None:
    it = Bench()
    it.publish(5)
    last = it.process.actor.stream.next_sequence - 1
    it.process.crash(is_clean=is_clean)
    assert (it.num_gone, it.process.is_up) == (1, False)
    it.publish(1)  # goes nowhere
    it.process.restart(skew_s=-3_600.0)
    assert it.process.actor.stream.next_sequence > last


def test_without_a_floor_the_clock_may_repeat_numbers() -> None:
    it = Bench(attrs.evolve(CLOCK, has_floor=False))
    first = it.process.actor.stream.next_sequence
    it.process.crash(is_clean=False)
    it.process.restart(skew_s=-3_600.0)
    assert it.process.actor.stream.next_sequence < first


def test_a_floor_that_is_not_used_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    monkeypatch.setattr(FaultyDisk, "read", lambda *_: None)
    it.process.crash(is_clean=False)
    with pytest.raises(BrokenPromise, match="an epoch starts above every earlier one"):
        it.process.restart(skew_s=-3_600.0)


def test_a_torn_floor_is_counted_and_replaced() -> None:
    it = Bench(lies=1.0, lost=0.0, torn=1.0)
    it.process.crash(is_clean=False)
    it.process.restart(skew_s=0.0)
    assert it.counters.faults["floor refused"] == 1
    it.disk.faults = DiskFaults()
    it.process.crash(is_clean=True)
    it.process.restart(skew_s=-3_600.0)
    assert it.counters.faults["floor refused"] == 1
