"""A judge excuses a reader for as long as recovery may take, and no longer."""

from __future__ import annotations

import math

import attrs
import pytest
from kit import broken_traffic_cores

from observability.kv_stream import StreamCursor, StreamState
from observability.kv_stream.digest_cursor import DigestCursor
from scheduler_components import BlockStored
from scheduler_components.kv_events.replay_messages import ReplayVerb
from worlds import BrokenPromise, DiskFaults, FaultyDisk, LinkQuality, PublisherShape, Timeline
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.reader_judge import ReaderJudge, recovery_limit_s
from worlds.recovery_model import POLICY
from worlds.stream_connection import ReaderNetwork, ReaderShape, StreamConnection
from worlds.world_counters import WorldCounters

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
    assert 0.0 < it.counters.measured["until_live_s"] < 1.0
    assert it.judge.limit_s == recovery_limit_s(POLICY, NETWORK)


def test_a_reader_that_never_arrives_breaks_a_promise() -> None:
    it = Bench()
    it.judge.begin()
    it.wait(it.judge.limit_s - 0.1)
    it.judge.judge()
    it.wait(0.2)
    with pytest.raises(BrokenPromise, match="every reader is LIVE in time"):
        it.judge.judge()


@pytest.mark.parametrize("window", [16, 1])
def test_a_lost_batch_costs_no_snapshot_while_the_publisher_keeps_it(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Bench(window=window)
    it.arrive()
    sync = DigestCursor._sync
    monkeypatch.setattr(DigestCursor, "_sync", lambda self, *_: sync(self, ReplayVerb.SNAPSHOT))
    it.judge.expect_repair()
    it.connection.loses_frames = True
    it.publish(1)
    it.connection.loses_frames = False
    it.publish(1)
    if window > 1:
        with pytest.raises(BrokenPromise, match="a lost batch costs no snapshot"):
            it.wait(1.0)
    else:
        it.wait(1.0)


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


@pytest.mark.parametrize("is_excused", [False, True])
def test_a_snapshot_that_is_sent_twice_breaks_a_promise(monkeypatch: pytest.MonkeyPatch, is_excused: bool) -> None:
    broken_traffic_cores.a_snapshot_is_sent_twice(monkeypatch)
    it = Bench(window=4)
    it.judge.begin()
    if is_excused:
        it.judge.excuse()
    with pytest.raises(BrokenPromise, match="the cost of a joining reader is bounded"):
        it.arrive()


def test_a_recovered_batch_that_is_not_counted_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench()
    it.arrive()
    counters = it.connection.reader.follower.cursor.counters
    last = it.connection.reader.follower.cursor.last_seq
    losing = attrs.evolve(NETWORK, live=attrs.evolve(NETWORK.live, loss=1.0))
    for forgets in (False, True):
        it.connection.set_network(losing)
        it.publish(2)
        it.wait(0.1)
        it.connection.set_network(NETWORK)
        if forgets:
            counters.recovered -= 1
            with pytest.raises(BrokenPromise, match="every loss is reported: reader reports -1 recovered"):
                it.wait(4.0)
        else:
            it.wait(4.0)  # the reader finds the loss by a probe, and counts it
            assert (it.connection.reader.follower.cursor.last_seq, counters.recovered) == (last + 2, 18)


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


def lose_first_requests(it: Bench) -> None:
    """Let the reader begin to follow without the extension, and the traffic go on without a pause."""

    def publish() -> None:
        it.publish(1)
        it.timeline.after(0.02, publish)

    publish()
    losing = attrs.evolve(NETWORK, replay=attrs.evolve(NETWORK.replay, loss=1.0))
    it.connection.set_network(losing)
    it.connection.open()
    it.wait(1.5)
    assert not it.connection.reader.follower.cursor.is_extended
    it.connection.set_network(NETWORK)
    it.judge.begin()


def test_a_reader_whose_first_requests_were_lost_finds_the_extension_although_the_stream_never_pauses() -> None:
    it = Bench(window=4)
    lose_first_requests(it)
    it.wait(it.judge.limit_s + 0.1)
    it.judge.judge()
    assert it.connection.reader.state is StreamState.LIVE and it.connection.reader.epoch == 0


def test_a_reader_that_never_finds_the_extension_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCursor, "on_extension_probe_due", lambda _: ())
    it = Bench(window=4)
    lose_first_requests(it)
    it.wait(it.judge.limit_s + 0.1)
    with pytest.raises(BrokenPromise, match="every reader finds the extension"):
        it.judge.judge()


def test_a_forged_frame_excuses_a_reader_until_its_next_proof_is_due_and_no_longer() -> None:
    it = Bench()
    it.arrive()
    it.connection.forge(100, is_own_topic=True)
    it.wait(0.01)
    reader = it.connection.reader
    assert reader.state is StreamState.LIVE and reader.follower.cursor.last_seq == 100
    with pytest.raises(BrokenPromise, match="a LIVE view is never wrong"):
        reader.check(is_proof_due=True)
    it.wait(it.judge.limit_s + 0.1)
    it.judge.judge()
