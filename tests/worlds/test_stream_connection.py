"""A reader on the time line: it connects, reads in the order of its sockets, and comes back after every cut."""

from __future__ import annotations

from collections import Counter

from observability.kv_stream import StreamState
from scheduler_components import BlockStored
from worlds import DiskFaults, FaultyDisk, LinkQuality, LiveFrame, PublisherShape, Timeline
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.stream_connection import ReaderNetwork, ReaderShape, StreamConnection
from worlds.stream_world import POLICY
from worlds.timeline import WorldCounters


class Bench:
    """A publisher, a reader and its network; notes what the network reports."""

    def __init__(self, network: ReaderNetwork | None = None, *, has_extension: bool = True, window: int = 8) -> None:
        self.timeline = Timeline(seed=0)
        counters = WorldCounters()
        disk = FaultyDisk(random=self.timeline.random, faults=DiskFaults())
        shape = ProcessShape(publisher=PublisherShape(window=window, max_pending=50), calls_idle=True)
        self.process = PublisherProcess(self.timeline, shape, disk=disk, counters=counters)
        self.faults: Counter[str] = Counter()
        self.lost: list[LiveFrame] = []
        self.num_sent = 0
        self.connection = StreamConnection(
            self.timeline,
            self.process,
            ReaderShape(name="reader", policy=POLICY, has_extension=has_extension),
            network=network or ReaderNetwork(),
            judge=lambda _: self,
        )
        self.reader = self.connection.reader
        self.process.publish((BlockStored((0,), None, (0,), 1, None),))
        self.connection.open()

    def on_fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def on_frame_sent(self, frame: LiveFrame) -> None:
        self.num_sent += 1

    def on_frame_lost(self, frame: LiveFrame) -> None:
        self.lost.append(frame)

    def on_change(self) -> None:
        self.reader.check()

    def publish(self, count: int) -> None:
        for number in range(count):
            self.process.publish((BlockStored((number,), None, (number,), 1, None),))

    def wait(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now_s + seconds)

    def expect_converged(self) -> None:
        self.reader.check_converged()
        assert self.reader.state is StreamState.LIVE


def test_a_reader_is_live_after_some_round_trips() -> None:
    for has_extension in (True, False):
        it = Bench(has_extension=has_extension)
        it.wait(0.2)
        it.expect_converged()
        it.publish(30)
        it.wait(0.2)
        it.expect_converged()
        assert (it.faults, it.num_sent) == ({}, 31)


def test_a_paused_reader_overflows_at_the_high_water_mark_and_recovers() -> None:
    it = Bench(ReaderNetwork(live=LinkQuality(capacity=10)))
    it.wait(0.2)
    it.connection.pause(1.0)
    it.publish(30)
    it.wait(0.9)
    assert it.reader.follower.cursor.last_seq == 0
    assert it.faults["frames over the high-water mark"] == len(it.lost) == 20
    it.wait(3.0)
    it.expect_converged()


def test_altered_and_garbled_answers_are_found() -> None:
    bad = ReaderNetwork(garbling=0.5, alteration=1.0)
    it = Bench(bad)
    for _ in range(6):
        it.connection.cut()
        it.publish(3)
        it.wait(2.0)
    assert it.faults["META garbled"] and it.faults["batches altered"]
    it.connection.set_network(bad.without_faults())
    it.wait(6.0)
    it.expect_converged()


def test_a_late_answer_comes_while_the_next_one_is_received() -> None:
    it = Bench(ReaderNetwork(replay=LinkQuality(latency_s=0.01, capacity=4), lateness=1.0), window=64)
    it.publish(60)
    it.wait(0.05)
    it.connection.cut()
    it.wait(0.1)
    counters = it.reader.follower.cursor.counters
    assert (it.faults["late answers"], counters.stale_replays) == (1, 0)
    it.wait(2.0)
    assert counters.stale_replays > 0
    it.expect_converged()


def test_a_hidden_restart_is_noticed() -> None:
    it = Bench()
    it.wait(0.2)
    it.connection.hide_restart()
    it.process.crash(is_clean=False, is_hidden=True)
    it.process.restart(skew_s=0.0)
    it.publish(2)
    it.wait(6.0)
    it.expect_converged()
    assert it.reader.epoch == 1 and it.faults["disconnects"] == 0
