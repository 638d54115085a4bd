"""Worlds of plain publishers reach the high-water mark of a ROUTER, and their readers are judged without a proof."""

from __future__ import annotations

import random
from functools import partial

import pytest

from observability.kv_stream import FollowPolicy, StreamState
from observability.kv_stream.instructions import Instruction
from observability.kv_stream.plain_cursor import PlainCursor
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest
from worlds import run_world
from worlds.faults import DiskFaults, FaultyDisk
from worlds.plain_world import PlainJudge, PlainPart, RingAnswers
from worlds.publisher_actor import LiveFrame, PublisherShape
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.reader_judge import LossLedger, ReaderJudge
from worlds.stream_connection import ReaderNetwork
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise, Timeline, WorldCounters


@pytest.fixture
def without_the_other_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``ReaderJudge`` find nothing: it would find some of these defects first."""
    monkeypatch.setattr(LossLedger, "check", lambda _: None)
    monkeypatch.setattr(ReaderJudge, "judge", lambda _: None)


def check_found(*promises: str) -> None:
    """Check that one of the first worlds breaks one of these promises."""
    found = set()
    for seed in range(20):
        violation = run_world(seed, kind="plain").violation
        found.add(violation and violation.promise)
        if found & {*promises}:
            return
    pytest.fail(f"found {found}")


def test_an_answer_may_be_larger_than_the_high_water_mark_in_a_storm_and_not_in_a_calm() -> None:
    part = PlainPart(Timeline(seed=1), WorldCounters())
    size = part.stream.process._shape.publisher.window
    for each in part.stream.readers:
        storm, calm = each.storm.replay.capacity, each.calm.replay.capacity
        assert storm is not None and calm is not None
        assert storm <= max(3, size) and calm > size + 1


def test_a_world_is_sound_and_measures_the_age_of_batches() -> None:
    report = run_world(1, kind="plain")
    assert report.violation is None
    assert report.measured["age_s"] < 0.2


@pytest.mark.broken_variants
@pytest.mark.usefixtures("without_the_other_judge")
def test_a_view_that_forgets_that_it_began_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PlainCursor, "_settle", lambda self: self._change_state("live" if self._run.last >= 0 else "partial")
    )
    check_found("a LIVE view is never wrong", "a view is LIVE if its history is complete")


@pytest.mark.broken_variants
@pytest.mark.usefixtures("without_the_other_judge")
def test_a_gap_that_costs_the_whole_history_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainCursor, "_on_first_batch", lambda self, _, seq, payload: self._begin_run(seq, payload))
    check_found("no history is dropped that the publisher has")


@pytest.mark.broken_variants
@pytest.mark.usefixtures("without_the_other_judge")
def test_a_gap_that_is_skipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(self: PlainCursor) -> tuple[Instruction, ...]:
        self._run.last = self._last_live_seq
        return ()

    monkeypatch.setattr(PlainCursor, "_recover_gap", skip)
    check_found("batches are applied in order", "a LIVE view is never wrong")


POLICY = FollowPolicy()


class NullChannel:
    """Sends nothing."""

    def send(self, request: object) -> None: ...

    def cancel(self) -> None: ...


class Bench:
    """A plain publisher with a ring of four batches, and the judge of a reader that a test feeds by hand."""

    def __init__(self) -> None:
        self.timeline, self.counters = Timeline(seed=1), WorldCounters()
        disk = FaultyDisk(random=random.Random(1), faults=DiskFaults(), counters=self.counters.faults)
        self.process = PublisherProcess(
            self.timeline,
            ProcessShape(publisher=PublisherShape(window=4, max_pending=1), calls_idle=True),
            disk=disk,
            counters=self.counters,
            make_answers=self.make_answers,
        )
        self.reader = SubscriberActor("reader", self.process.actor, channel=NullChannel(), policy=POLICY)
        self.reader.truth.connected_epoch = 0
        self.judge = PlainJudge(
            self.reader,
            self.process,
            self.answers,
            timeline=self.timeline,
            counters=self.counters,
            network=ReaderNetwork(),
            policy=POLICY,
        )

    def make_answers(self, process: PublisherProcess, counters: WorldCounters) -> RingAnswers:
        self.answers = RingAnswers(process, counters, size=4)
        return self.answers

    def publish(self, *events: object) -> None:
        for event in events:
            self.process.publish((event,))  # type: ignore[arg-type]

    def apply(self, *numbers: int) -> None:
        for seq in numbers:
            self.reader.follower.applier.apply(seq, self.answers.sent[0, seq], replayed=False)


def stored(*blocks: int) -> BlockStored:
    return BlockStored(blocks, None, blocks, 1, None)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.publish(stored(1), stored(2, 3), BlockRemoved((2,)), stored(4), AllBlocksCleared(), stored(5))
    return bench


def test_a_batch_out_of_order_breaks_a_promise(bench: Bench) -> None:
    bench.apply(1)
    with pytest.raises(BrokenPromise, match="batches are applied in order"):
        bench.apply(3)


def test_a_view_with_something_else_breaks_a_promise(bench: Bench) -> None:
    bench.apply(0, 1)
    bench.reader.view.apply(0, [stored(77)])
    bench.judge.watch()
    bench.reader.follower.cursor._rules._state = StreamState.PARTIAL
    with pytest.raises(BrokenPromise, match="a view is the effect of the batches received"):
        bench.judge.watch()


class Client:
    """A client with a queue of a few messages."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.messages: list[tuple[bytes, ...]] = []

    def on_frame(self, frame: LiveFrame) -> None: ...

    def can_take(self, _: bytes) -> bool:
        return len(self.messages) < self.capacity

    def take(self, _: bytes, message: tuple[bytes, ...]) -> None:
        self.messages.append(message)

    def on_publisher_gone(self) -> None: ...


@pytest.fixture
def process() -> PublisherProcess:
    shape = ProcessShape(publisher=PublisherShape(window=4, max_pending=1), calls_idle=True)
    disk = FaultyDisk(random=random.Random(1), faults=DiskFaults())
    process = PublisherProcess(
        Timeline(seed=1), shape, disk=disk, counters=WorldCounters(), make_answers=partial(RingAnswers, size=4)
    )
    for block in range(6):
        process.publish((BlockStored((block,), None, (block,), 1, None),))
    return process


def answered(process: PublisherProcess, request: ReplayRequest, *, capacity: int = 100) -> list[int]:
    client = Client(capacity)
    process.receive(b"client", request, client, has_extension=False)
    return [int.from_bytes(message[-2], "big", signed=True) for message in client.messages]


def test_answers_from_the_ring_and_ends_with_a_marker(process: PublisherProcess) -> None:
    end = int.from_bytes(END_SEQ, "big", signed=True)
    assert answered(process, ReplayRequest(4)) == [4, 5, end]
    assert answered(process, ReplayRequest(0)) == [2, 3, 4, 5, end]
    assert answered(process, ReplayRequest(9)) == [end]


def test_drops_what_a_client_cannot_take(process: PublisherProcess) -> None:
    assert answered(process, ReplayRequest(0), capacity=3) == [2, 3, 4]
