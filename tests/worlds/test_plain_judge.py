"""The judge of a plain reader compares its view with the effect of the batches as they were sent."""

from __future__ import annotations

import random

import pytest

from observability.kv_stream import FollowPolicy, StreamState
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.events import Tier
from worlds.faulty_disk import DiskFaults, FaultyDisk
from worlds.plain_judge import PlainJudge
from worlds.plain_publisher import RingAnswers
from worlds.publisher_actor import PublisherShape
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.stream_connection import ReaderNetwork
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise, Timeline
from worlds.world_counters import WorldCounters

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


def test_the_effect_is_that_of_the_batches_since_the_first_one(bench: Bench) -> None:
    bench.apply(1, 2, 3)
    assert bench.judge.run.blocks == {(3, Tier.DEVICE), (4, Tier.DEVICE)} == bench.reader.blocks
    assert (bench.judge.run.first, bench.judge.run.is_complete) == (1, False)
    bench.apply(4, 5)
    assert bench.judge.run.is_complete and bench.judge.run.blocks == {(5, Tier.DEVICE)}


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


def test_a_run_that_begins_again_although_the_ring_has_its_last_batch_is_needless(bench: Bench) -> None:
    bench.apply(0, 1, 2)
    bench.judge.run.on_view_cleared(0, "again")
    bench.apply(3)
    assert bench.judge.run.needless_s == bench.timeline.now_s
