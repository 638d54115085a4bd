"""A judge excuses a reader for as long as recovery may take, and no longer."""

from __future__ import annotations

import math

import attrs
import pytest

from observability.kv_stream import StreamCursor, StreamState
from observability.simulation import BrokenPromise, DiskFaults, FaultyDisk, LinkQuality, PublisherShape, Timeline
from observability.simulation.publisher_process import ProcessShape, PublisherProcess
from observability.simulation.reader_judge import ReaderJudge, recovery_limit_s
from observability.simulation.stream_connection import ReaderNetwork, ReaderShape, StreamConnection
from observability.simulation.world_counters import WorldCounters
from observability.testing.recovery_model import POLICY
from scheduler_components import BlockStored
from scheduler_components.kv_events.replay import ReplaySessions

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

    def appoint(self, reader: object) -> ReaderJudge:
        self.judge = ReaderJudge(
            self.timeline,
            self.counters,
            self.process,
            reader,
            network=NETWORK,
            policy=POLICY,  # type: ignore[arg-type]
        )
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
    assert 0.0 < it.counters.max_until_live_s < 1.0
    assert it.judge.limit_s == recovery_limit_s(POLICY, NETWORK)


def test_a_reader_that_never_arrives_breaks_a_promise() -> None:
    it = Bench()
    it.judge.begin()
    it.wait(it.judge.limit_s - 0.1)
    it.judge.judge()
    it.wait(0.2)
    with pytest.raises(BrokenPromise, match="every reader is LIVE in time"):
        it.judge.judge()


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


def test_a_reader_that_misses_a_batch_for_too_long_breaks_a_promise() -> None:
    it = Bench()
    it.arrive()
    it.connection.paused_until_s = math.inf  # not a fault that the judge hears of
    it.publish(1)
    it.judge.judge()
    it.wait(0.3)
    assert it.connection.reader.state is StreamState.LIVE
    with pytest.raises(BrokenPromise, match="batches arrive in time"):
        it.judge.judge()


def test_a_snapshot_that_is_sent_twice_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_of = ReplaySessions._chunk

    def many_times(self: ReplaySessions, number: int, chunk: list, *, clear: bool):  # type: ignore[no-untyped-def]
        yield from [*chunk_of(self, number, chunk, clear=clear)] * 4

    monkeypatch.setattr(ReplaySessions, "_chunk", many_times)
    it = Bench(window=4)
    with pytest.raises(BrokenPromise, match="the cost of a joining reader is bounded"):
        it.arrive()


def test_a_loss_that_no_counter_shows_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    it.arrive()
    last = it.connection.reader.follower.cursor.last_seq
    losing = attrs.evolve(NETWORK, live=attrs.evolve(NETWORK.live, loss=1.0))
    for forgets in (False, True):
        it.connection.set_network(losing)
        it.publish(1)
        it.wait(0.1)
        it.connection.set_network(NETWORK)
        if forgets:
            with pytest.raises(BrokenPromise, match="every loss is reported"), monkeypatch.context() as patched:
                patched.setattr(ReaderJudge, "_reported", 7)
                it.judge._num_reported = 7
                it.wait(4.0)
        else:
            it.wait(4.0)  # the reader finds the loss by a probe, and counts it
            assert it.connection.reader.follower.cursor.last_seq == last + 1


def test_a_number_that_another_epoch_has_taken_is_reported_by_the_next_proof() -> None:
    it = Bench()
    it.arrive()
    reader = it.connection.reader
    it.connection.set_network(attrs.evolve(NETWORK, live=attrs.evolve(NETWORK.live, loss=1.0)))
    it.publish(1)
    it.wait(0.01)
    it.connection.set_network(NETWORK)
    it.connection.hide_restart()
    it.process.crash(is_clean=False, is_hidden=True)
    it.process.restart(skew_s=0.0)
    it.publish(103)
    it.wait(0.01)
    assert reader.state is StreamState.LIVE and reader.follower.cursor.last_seq > 100 and reader.truth.is_spliced
    restarts = reader.follower.cursor.counters.restarts
    it.wait(4.0)
    assert reader.state is StreamState.LIVE and reader.epoch == 1
    assert reader.follower.cursor.counters.restarts == restarts + 1


def test_a_reader_that_finds_the_extension_late_has_the_time_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    it.arrive()

    def be(state: StreamState, *, is_extended: bool) -> None:
        monkeypatch.setattr(StreamCursor, "state", property(lambda _: state))
        monkeypatch.setattr(StreamCursor, "is_extended", property(lambda _: is_extended))

    be(StreamState.PARTIAL, is_extended=False)
    it.wait(it.judge.limit_s + 5.0)
    it.judge.judge()
    be(StreamState.SYNCING, is_extended=True)
    it.judge.judge()
    it.wait(2.0)
    with pytest.raises(BrokenPromise, match="every reader is LIVE in time"):
        it.judge.judge()
