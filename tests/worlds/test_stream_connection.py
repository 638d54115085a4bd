"""A reader on the time line: it connects, reads in the order of its sockets, and comes back after every cut."""

from __future__ import annotations

from collections import Counter

import attrs

from observability.kv_stream import StreamState
from scheduler_components import BlockStored
from worlds import DiskFaults, FaultyDisk, LinkQuality, LiveFrame, PublisherShape, Timeline
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.recovery_model import POLICY
from worlds.stream_connection import ReaderNetwork, ReaderShape, StreamConnection, least_capacity
from worlds.world_counters import WorldCounters


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


def test_a_reader_connects_when_the_publisher_is_up_again() -> None:
    it = Bench()
    it.wait(0.2)
    it.process.crash(is_clean=False)
    assert (it.faults["disconnects"], it.reader.state) == (1, StreamState.CONNECTING)
    it.wait(1.0)
    it.process.restart(skew_s=0.0)
    it.publish(3)
    it.wait(4.0)
    it.expect_converged()
    assert it.reader.epoch == 1


def test_a_cut_loses_what_is_in_transit_and_the_reader_comes_back() -> None:
    it = Bench(ReaderNetwork(live=LinkQuality(latency_s=0.1)))
    it.wait(1.0)
    it.publish(3)
    it.connection.cut()
    assert [frame.sequence for frame in it.lost] == [1, 2, 3]
    it.wait(2.0)
    it.expect_converged()


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


def test_a_lost_request_and_a_lost_answer_are_sent_again() -> None:
    lossy = ReaderNetwork(replay=LinkQuality(loss=1.0))
    it = Bench(lossy)
    it.wait(3.0)
    assert it.reader.state is not StreamState.LIVE and it.faults["requests lost"] > 1
    it.connection.set_network(lossy.without_faults())
    it.wait(3.0)
    it.expect_converged()


def test_a_slow_answer_waits_in_the_publisher() -> None:
    it = Bench(ReaderNetwork(replay=LinkQuality(latency_s=0.01, capacity=2)), window=64)
    it.publish(60)
    it.wait(1.5)
    it.expect_converged()


def test_forged_frames_and_other_topics_change_nothing_for_long() -> None:
    it = Bench()
    it.wait(0.2)
    number = it.process.actor.stream.next_sequence
    it.connection.forge(number, is_own_topic=False)
    it.connection.forge(number + 1, is_own_topic=True)
    it.connection.forge(number, is_own_topic=True)
    it.wait(6.0)
    it.expect_converged()
    assert it.reader.frames.other_topics == 1
    assert it.faults == {"frames of another topic": 1, "forged frames": 2}


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


def test_the_rest_of_an_answer_may_come_after_its_request() -> None:
    late = ReaderNetwork(replay=LinkQuality(latency_s=0.3), lateness=1.0)
    it = Bench(late)
    it.wait(0.5)
    it.connection.cut()
    it.wait(6.0)
    assert it.faults["late answers"] and it.reader.follower.cursor.counters.stale_replays
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


def test_a_reader_may_pause_in_the_middle_of_an_answer() -> None:
    it = Bench(ReaderNetwork(replay=LinkQuality(latency_s=0.01, capacity=2)), window=64)
    it.wait(0.2)
    it.connection.pauses_answer_until_s = it.timeline.now_s + 0.9
    it.connection.cut()
    it.publish(60)
    it.wait(0.8)
    assert it.faults["pauses"] == 1
    assert len(it.process.actor.sessions) > 0, "the answer waits for its reader"
    it.wait(3.0)
    it.expect_converged()
    assert it.faults["pauses"] == 1


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


def test_a_closed_reader_hears_nothing_more() -> None:
    it = Bench()
    it.wait(0.2)
    it.connection.close()
    it.publish(3)
    it.wait(5.0)
    assert it.reader.follower.cursor.last_seq == 0
    assert it.process.peers == []


def test_a_network_without_faults_keeps_its_latency_and_has_fast_answers() -> None:
    quality = LinkQuality(latency_s=0.2, jitter_s=0.1, loss=0.5, duplication=0.5, reordering=0.5, capacity=7)
    network = ReaderNetwork(live=quality, replay=quality, garbling=0.5, alteration=0.5, lateness=0.5)
    calm = LinkQuality(latency_s=0.2, jitter_s=0.1, capacity=7)
    replay = attrs.evolve(calm, capacity=least_capacity(0.3))
    assert network.without_faults() == ReaderNetwork(live=calm, replay=replay)
    assert attrs.asdict(network.without_faults())["garbling"] == 0.0


def test_an_open_answer_gets_the_capacity_of_a_new_network() -> None:
    slow = ReaderNetwork(replay=LinkQuality(latency_s=0.1, capacity=2))
    it = Bench(slow, window=64)
    it.publish(60)
    it.wait(0.15)
    it.connection.set_network(slow.without_faults())
    it.wait(0.5)
    it.expect_converged()
    assert it.reader.follower.cursor.counters.replays_unanswered == 0
