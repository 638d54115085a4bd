"""A publisher's process: what waits, what is kept, what a fault costs, and which number an epoch begins with."""

from __future__ import annotations

import attrs
import pytest

from scheduler_components import BlockStored
from scheduler_components.kv_events import EventStream, codec, sequence_floor
from scheduler_components.kv_events.backlog import MAX_WAITING, Backlog
from scheduler_components.kv_events.handover import Handover
from scheduler_components.kv_events.live_sender import LiveSender
from scheduler_components.kv_events.replay_messages import ReplayRequest
from worlds import DiskFaults, FaultyDisk, LiveFrame, PublisherShape, Timeline
from worlds.publisher_process import MAX_SEND_DELAY_S, ProcessShape, PublisherProcess
from worlds.timeline import BrokenPromise
from worlds.world_counters import WorldCounters

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


def test_a_stream_that_keeps_too_many_bytes_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(attrs.evolve(CLOCK, publisher=PublisherShape(max_bytes=300, window=100, max_pending=20)))
    monkeypatch.setattr(EventStream, "is_over_limit", False)
    with pytest.raises(BrokenPromise, match=r"memory is bounded: the stream keeps \d+ bytes of 300"):
        for number in range(60):
            it.timeline.run_until(0.01 * number)
            it.publish()


# A late thread.


def test_calls_send_in_place_of_a_late_thread() -> None:
    it = Bench()
    it.process.delay_thread(1.0)
    ages, most = [], 0
    for number in range(400):
        it.timeline.at(0.0025 * number, it.publish)
        it.timeline.run_until(0.0025 * number)
        pending = it.process.actor.sender.pending
        most = max(most, len(pending))
        ages += [it.timeline.now_s - pending[0].ts] if pending else []
    assert 1 < most < MAX_WAITING and max(ages) < 0.005
    it.timeline.run_until(2.0)
    assert not it.process.is_late and len(it.frames) == 400


def test_a_batch_that_a_late_thread_must_send_waits_until_it_does() -> None:
    it = Bench()
    it.process.delay_thread(10.0)
    delays = []
    for number in range(40):
        it.timeline.run_until(0.2 * number)
        it.publish()
        it.timeline.run_until(0.2 * number + 0.199)
        delays.append(it.frames[-1][0] - 0.2 * number)
    assert max(delays) > MAX_SEND_DELAY_S
    assert len(it.frames) == 40


def test_a_call_that_leaves_an_old_batch_to_the_thread_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    it.process.delay_thread(10.0)
    monkeypatch.setattr(Handover, "may_wait", lambda *_: True)
    it.publish()
    it.timeline.run_until(0.0045)
    with pytest.raises(BrokenPromise, match="no batch waits for long: publish"):
        it.publish()


def test_an_answer_gets_its_share_although_the_thread_never_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_planted in (False, True):
        it = Bench()
        it.publish(4)
        it.timeline.run_until(0.1)
        it.process.delay_thread(100.0)
        monkeypatch.setattr(it.timeline.random, "expovariate", lambda _: 100.0)
        if is_planted:
            monkeypatch.setattr(Handover, "replay_s", lambda *_: 0.0)
        first = it.process.actor.stream.first
        it.process.receive(b"client", ReplayRequest(first), it, has_extension=False)
        for number in range(20):
            it.timeline.run_until(0.2 + 0.01 * number)
            it.publish()
        assert bool(it.answers) is not is_planted


def test_inline_every_call_sends() -> None:
    it = Bench(attrs.evolve(CLOCK, is_inline=True))
    it.publish(20)
    assert len(it.frames) == 20
    it.process.receive(b"client", ReplayRequest(0), it, has_extension=False)
    it.timeline.run_until(0.1)
    assert it.answers[-1] == -1


def test_a_buffer_that_is_smaller_than_what_a_round_trip_sends_keeps_no_answer() -> None:
    for max_bytes, expected in ((200, False), (10_000, True)):
        it = Bench(attrs.evolve(CLOCK, publisher=PublisherShape(max_bytes=max_bytes, max_pending=20)))
        for number in range(20):
            it.timeline.at(0.01 * number, it.publish)
        it.timeline.run_until(0.2)
        assert it.process.keeps_answers(0.1) is expected
        assert it.process.keeps_answers(0.01)


# What is sent says what was published.


@pytest.mark.parametrize("max_pending", [1, 20])
def test_a_batch_in_parts_has_a_state_after_each_number(max_pending: int) -> None:
    it = Bench(attrs.evolve(CLOCK, publisher=PublisherShape(large_bytes=60, max_pending=max_pending)))
    events = [BlockStored((number, number + 1), None, (number, number + 1), 1, None) for number in range(0, 20, 2)]
    it.process.publish(events)
    it.process.publish(events[:3])
    it.timeline.run_until(1.0)
    states = [it.process.actor.states[0, frame.sequence] for _, frame in it.frames]
    assert len(it.frames) > 6
    assert [len(state) for state in states] == sorted(map(len, states))
    assert states[-1] == it.process.actor.held and len(states[-1]) == 20


def test_a_part_that_is_not_sent_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(attrs.evolve(CLOCK, publisher=PublisherShape(large_bytes=60)))
    split = codec.split_events
    monkeypatch.setattr("scheduler_components.kv_events.live_sender.split_events", lambda events: split(events)[:1])
    with pytest.raises(BrokenPromise, match="no published event is lost"):
        it.process.publish([BlockStored((each, each + 1), None, (each, each + 1), 1, None) for each in range(0, 20, 2)])
        it.timeline.run_until(1.0)


def test_an_event_that_no_reader_accepts_costs_only_itself() -> None:
    it = Bench()
    bad = BlockStored((1,), None, (2**40,), 1, None)
    for _ in range(3):
        it.process.publish((BlockStored((5,), None, (5,), 1, None),), refused=(bad,))
        it.timeline.run_until(it.timeline.now_s + 0.1)
    it.process.stall(0.1)
    for _ in range(30):
        it.process.publish((BlockStored((6,), None, (6,), 1, None),), refused=(bad,))
    it.timeline.run_until(1.0)
    assert {block for block, _ in it.process.actor.held} == {5, 6}
    assert it.process.actor.sender.num_refused == it.counters.counts["events refused"] == 33


def test_an_event_that_is_left_out_without_a_count_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    monkeypatch.setattr(LiveSender, "_refuse", lambda *_: None)
    it.process.publish((), refused=(BlockStored((1,), None, (2**40,), 1, None),))
    with pytest.raises(BrokenPromise, match="everything is counted"):
        it.timeline.run_until(1.0)


def test_destroyed_sockets_drop_every_batch_count_it_and_come_back_with_a_restart() -> None:
    it = Bench()
    it.publish(1)
    it.timeline.run_until(0.1)
    num_frames = len(it.frames)
    it.process.destroy_sockets()
    assert not it.process.is_up and it.num_gone == 1
    it.publish(5)
    it.process.receive(b"client", ReplayRequest(0), it, has_extension=False)
    it.timeline.run_until(0.2)
    assert len(it.frames) == num_frames and not it.answers
    assert it.process.actor.sender.num_dropped == 5
    it.process.crash(is_clean=True)
    assert it.counters.counts["batches not sent"] == 5
    it.process.restart(skew_s=0.0)
    it.publish(1)
    it.timeline.run_until(0.3)
    assert it.process.is_up and len(it.frames) == num_frames + 2


# The first number of an epoch.


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


def test_after_a_lost_floor_the_wall_clock_chooses_and_repeated_numbers_are_counted() -> None:
    it = Bench(lies=1.0, lost=1.0)
    highest = it.process.actor.last_sequence
    it.timeline.run_until(1.0)
    it.process.crash(is_clean=False)
    it.process.restart(skew_s=0.0)
    assert it.process.actor.stream.next_sequence > highest, "the clock was not set back"
    it.process.crash(is_clean=False)
    it.process.restart(skew_s=-3_600.0)
    assert it.process.actor.last_sequence < highest
    assert it.counters.faults["numbers repeated after a lost floor"] == 1


def test_an_older_floor_repeats_numbers_although_the_clock_was_not_set_back() -> None:
    """Each kill skips the numbers of 72 minutes, so the clock is far behind."""
    it = Bench(lost=1.0)
    it.process.crash(is_clean=False)
    it.process.restart(skew_s=0.0)
    first = it.process.actor.last_sequence
    it.disk.faults = DiskFaults(lies=1.0, lost=1.0)
    it.process.crash(is_clean=False)
    it.process.restart(skew_s=60.0)
    assert it.process.actor.last_sequence == first
    assert it.counters.faults["numbers repeated after a lost floor"] == 1


@pytest.mark.parametrize("repairs", [True, False])
def test_a_torn_floor_is_refused_and_an_operator_repairs_or_removes_it(repairs: bool) -> None:
    it = Bench(attrs.evolve(CLOCK, repairs_floor=repairs), lies=1.0, lost=0.0, torn=1.0)
    it.publish(3)
    it.timeline.run_until(0.1)
    highest = it.process.actor.last_sequence
    it.process.crash(is_clean=False)
    it.process.restart(skew_s=-3_600.0)
    assert it.counters.faults["floor refused"] == 1
    assert (it.process.actor.stream.next_sequence > highest) is repairs
    assert it.counters.faults["numbers repeated after a lost floor"] == (not repairs)
    it.disk.faults = DiskFaults()
    it.process.crash(is_clean=True)
    it.process.restart(skew_s=-3_600.0)
    assert it.counters.faults["floor refused"] == 1


def test_a_torn_floor_that_is_believed_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(lies=1.0, lost=0.0, torn=1.0)
    monkeypatch.setattr(sequence_floor, "_number_in", lambda *_: 7)
    it.process.crash(is_clean=False)
    with pytest.raises(BrokenPromise, match="a damaged floor is refused"):
        it.process.restart(skew_s=0.0)
