"""A judge excuses a reader for as long as recovery may take, and no longer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from observability.kv_stream import StreamState
from scheduler_components import BlockRemoved, BlockStored
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest, ReplayVerb
from worlds import (
    BrokenPromise,
    DiskFaults,
    FaultyDisk,
    LinkQuality,
    LiveFrame,
    PublisherActor,
    PublisherShape,
    SubscriberActor,
    Timeline,
)
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.reader_judge import JoiningBytes, LossLedger, ReaderJudge, recovery_limit_s, snapshot_bytes
from worlds.stream_connection import ReaderNetwork, ReaderShape, StreamConnection
from worlds.stream_world import POLICY
from worlds.timeline import WorldCounters

NETWORK = ReaderNetwork(live=LinkQuality(latency_s=0.001), replay=LinkQuality(latency_s=0.001))


class Bench:
    """A publisher, a reader and its judge, who expects it to arrive."""

    def __init__(self, *, window: int = 16) -> None:
        self.timeline, self.counters = Timeline(seed=0), WorldCounters()
        disk = FaultyDisk(random=self.timeline.random, faults=DiskFaults())
        shape = ProcessShape(publisher=PublisherShape(window=window), calls_idle=True)
        self.process = PublisherProcess(self.timeline, shape, disk=disk, counters=self.counters)
        self.publish(100)
        self.connection = StreamConnection(
            self.timeline, self.process, ReaderShape(name="reader", policy=POLICY), network=NETWORK, judge=self.appoint
        )

    def appoint(self, reader: SubscriberActor) -> ReaderJudge:
        self.judge = ReaderJudge(self.timeline, self.counters, self.process, reader, network=NETWORK, policy=POLICY)
        return self.judge

    def publish(self, count: int) -> None:
        for number in range(count):
            self.process.publish((BlockStored((number,), None, (number,), 1, None),))

    def wait(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now_s + seconds)

    def arrive(self) -> None:
        self.connection.open()
        self.judge.begin()
        self.wait(self.judge.limit_s + 0.1)
        self.judge.judge()


def test_a_reader_that_arrives_is_judged_and_measured() -> None:
    it = Bench()
    it.arrive()
    assert it.counters.counts["recoveries"] == 1
    assert 0.0 < it.counters.measured["until_live_s"] < 1.0
    assert it.judge.limit_s == recovery_limit_s(POLICY, NETWORK)


def test_a_fault_excuses_and_a_storm_does_so_without_a_limit() -> None:
    it = Bench()
    it.judge.begin()
    it.wait(5.0)
    it.judge.on_fault("pauses")
    assert it.judge.due_s == pytest.approx(5.0 + it.judge.limit_s)
    assert it.counters.faults == {"pauses": 1}
    it.judge.end()
    it.judge.on_fault("pauses")
    assert it.judge.due_s == math.inf


def test_a_reader_that_leaves_live_again_and_again_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    it.arrive()
    reader = it.connection.reader
    state = StreamState.LIVE
    monkeypatch.setattr(type(reader), "state", property(lambda _: state))
    with pytest.raises(BrokenPromise, match="LIVE lasts"):
        for _ in range(40):
            for state in (StreamState.RECOVERING, StreamState.LIVE):  # noqa: B007  read by the property
                it.judge.on_change()
            it.judge.judge()


class LedgerBench:
    """A reader that is LIVE at batch 9 of epoch 0. The test changes its position and its counters."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.state, self.is_extended, self.last_seq = StreamState.LIVE, True, 9
        publisher = PublisherActor(PublisherShape(), broadcast=lambda _: None, first_sequence=lambda _: 0)
        self.reader = SubscriberActor("reader", publisher, channel=self, policy=POLICY)
        self.reader.truth.connected_epoch = self.reader.truth.verified_epoch = 0
        cursor = type(self.reader.follower.cursor)
        for name in ("state", "is_extended", "last_seq"):
            patch.setattr(cursor, name, property(partial(self._own, name)))
        self.counters = self.reader.follower.cursor.counters
        self.ledger = LossLedger(self.reader)
        self.ledger.check()

    def _own(self, name: str, _: object) -> object:
        return getattr(self, name)

    def send(self, request: object) -> None:
        """Send nothing."""

    def cancel(self) -> None:
        """Send nothing."""

    def pass_batches(self, *, live: int, recovered: int) -> None:
        """Move the position by batches that came live, and by others."""
        self.last_seq += live + recovered
        self.reader.num_applied_live += live
        self.counters.recovered += recovered

    def begin_epoch(self) -> None:
        self.last_seq = 3
        self.reader.num_jumps += 1
        self.reader.truth.connected_epoch = self.reader.truth.verified_epoch = 1


def jump(it: LedgerBench) -> None:
    it.last_seq += 30
    it.reader.num_jumps += 1


def as_plain(it: LedgerBench) -> None:
    it.is_extended = False
    it.ledger.check()


def counts(**counters: int) -> Callable[[LedgerBench], None]:
    def count(it: LedgerBench) -> None:
        for name, value in counters.items():
            setattr(it.counters, name, getattr(it.counters, name) + value)

    return count


def steps(*each: Callable[[LedgerBench], None]) -> Callable[[LedgerBench], None]:
    def do(it: LedgerBench) -> None:
        for step in each:
            step(it)

    return do


RIGHT: dict[str, Callable[[LedgerBench], None]] = {
    "all live": lambda it: it.pass_batches(live=5, recovered=0),
    "lost and recovered": lambda it: it.pass_batches(live=2, recovered=3),
    "batches of an answer that was given up": steps(
        lambda it: it.pass_batches(live=2, recovered=3), counts(recovered=4, replays_cut=1)
    ),
    "a snapshot": steps(jump, counts(snapshots=1)),
    "a restart": steps(lambda it: it.begin_epoch(), counts(snapshots=1, restarts=1)),
    "dead meanwhile": steps(
        lambda it: setattr(it, "state", StreamState.DEAD),
        lambda it: it.ledger.check(),
        lambda it: setattr(it, "state", StreamState.LIVE),
        lambda it: it.begin_epoch(),
        counts(snapshots=1),
    ),
    "a base state without the extension": steps(as_plain, jump, counts(recovered=2)),
    "history lost without the extension": steps(as_plain, jump, counts(losses=1)),
}

WRONG: dict[str, Callable[[LedgerBench], None]] = {
    "a recovered batch is not counted": steps(lambda it: it.pass_batches(live=2, recovered=3), counts(recovered=-1)),
    "too many are counted": steps(lambda it: it.pass_batches(live=5, recovered=0), counts(recovered=1)),
    "a jump without a snapshot": jump,
    "an epoch without a snapshot": steps(lambda it: it.begin_epoch(), counts(restarts=1)),
    "an epoch without a restart": steps(lambda it: it.begin_epoch(), counts(snapshots=1)),
    "nothing is reported without the extension": steps(as_plain, jump),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_reader_that_reports_what_it_can_know_is_right(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = LedgerBench(monkeypatch)
    RIGHT[what](it)
    it.ledger.check()


@pytest.mark.parametrize("what", WRONG)
def test_a_reader_whose_counters_lack_a_loss_breaks_a_promise(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = LedgerBench(monkeypatch)
    WRONG[what](it)
    with pytest.raises(BrokenPromise, match="every loss is reported"):
        it.ledger.check()


def test_lost_numbers_that_count_as_live_break_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = LedgerBench(monkeypatch)
    for number in (11, 12, 99):
        it.ledger.on_lost(0, number)
    it.pass_batches(live=5, recovered=0)
    with pytest.raises(BrokenPromise, match="of which 2 were lost"):
        it.ledger.check()


class JoiningBench:
    """A publisher whose replay buffer has four batches, and a reader that joins later."""

    def __init__(self) -> None:
        self.joining: JoiningBytes | None = None
        self.actor = PublisherActor(PublisherShape(), broadcast=self.broadcast, first_sequence=lambda _: 0)
        self.publish(20)

    def broadcast(self, frame: LiveFrame) -> None:
        if self.joining is not None:
            self.joining.on_sent(frame)

    def publish(self, count: int) -> None:
        for number in range(count):
            blocks = tuple(range(2 * number, 2 * number + 2))
            self.actor.publish_events((BlockStored(blocks, None, blocks, 1, None), BlockRemoved((2 * number + 1,))))
            self.actor.idle()

    def answer_bytes(self, verb: ReplayVerb | None) -> int:
        """Return the payload bytes of one whole answer, without METAs."""
        self.actor.receive(b"client", ReplayRequest(0, verb), has_extension=verb is not None)
        num_bytes = 0
        while b"client" in self.actor.sessions.clients:
            message = self.actor.sessions.message(b"client")
            self.actor.sessions.on_sent(b"client")
            num_bytes += len(message[-1]) if message is not None and message[-2] != END_SEQ else 0
        return num_bytes


@pytest.mark.parametrize("verb", [ReplayVerb.SYNC, None])
def test_an_answer_has_the_size_of_the_snapshot_and_the_replay_buffer(verb: ReplayVerb | None) -> None:
    it = JoiningBench()
    assert it.actor.stream.has_folded and snapshot_bytes(it.actor.stream) > 100
    assert it.answer_bytes(verb) == JoiningBytes(it.actor).limit(0)
