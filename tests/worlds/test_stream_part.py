"""A publisher with its readers: every kind of fault happens, and a calm judges each reader."""

from __future__ import annotations

from random import Random

import attrs
import pytest

from worlds import BrokenPromise, Timeline
from worlds.stream_part import StreamPart
from worlds.world_counters import WorldCounters
from worlds.world_shape import STREAM_FAULTS, draw_stream_shape

FAULTS = tuple(each for each in STREAM_FAULTS if each != "lose sockets")  # after it there are no others
SHAPE = attrs.evolve(draw_stream_shape(Random(2), num_readers=2), faults=FAULTS, faults_per_s=30.0)


def make_part() -> tuple[StreamPart, Timeline, WorldCounters]:
    timeline, counters = Timeline(seed=5), WorldCounters()
    return StreamPart(timeline, counters, SHAPE), timeline, counters


def test_a_storm_has_every_fault_of_its_shape() -> None:
    part, timeline, counters = make_part()
    part.begin_storm(40.0)
    timeline.run_until(40.0)
    for kind in (
        "disconnects", "pauses", "stalls", "bursts", "unreadable batches", "answers truncated", "publisher: crash",
        "publisher: restart", "publisher: hidden restart", "frames of another topic", "late threads",
    ):  # fmt: skip
        assert counters.faults[kind], kind
    before = dict(counters.faults)
    part.begin_calm()
    assert part.process.is_up and not part.process.is_stalled
    timeline.run_until(40.0 + part.limit_s)
    part.judge()
    new = {kind: count - before.get(kind, 0) for kind, count in counters.faults.items()}
    assert sum(new.values()) <= 2 * len(part.readers), new  # the restart after unreadable batches


def test_a_publisher_without_sockets_comes_back_with_the_calm() -> None:
    timeline = Timeline(seed=5)
    part = StreamPart(timeline, WorldCounters(), attrs.evolve(SHAPE, faults=("lose sockets",)))
    part.begin_storm(2.0)
    timeline.run_until(2.0)
    assert part.process.is_running and not part.process.is_up
    part.begin_calm()
    assert part.process.is_up
    timeline.run_until(2.0 + part.limit_s)
    part.judge()


def test_some_calms_are_silent_and_some_publishers_stay_unreadable() -> None:
    part, timeline, _ = make_part()
    seen = set()
    for _ in range(20):
        part.begin_storm(timeline.now_s)
        part.process.actor.send_poison()
        part.begin_calm()
        num_published = part.process.actor.num_published
        timeline.run_until(timeline.now_s + 3.0)
        seen.add((part.process.actor.num_published == num_published, part.process.actor.is_poisoned))
    assert {is_silent for is_silent, _ in seen} == {is_poisoned for _, is_poisoned in seen} == {True, False}


def test_every_reader_loses_one_batch_and_has_it_soon() -> None:
    part, timeline, counters = make_part()
    timeline.run_until(part.limit_s)
    before = sum(each.reader.follower.cursor.counters.gaps for each in part.readers)
    number = part.process.actor.stream.next_sequence
    part.lose_frame()
    timeline.run_until(timeline.now_s + 0.5)
    readers = [each.reader for each in part.readers]
    assert sum(each.follower.cursor.counters.gaps for each in readers) == before + len(readers)
    assert min(each.follower.cursor.last_seq for each in readers) > number
    assert counters.faults == {}


def test_another_reader_joins_in_place_of_the_one_before() -> None:
    part, timeline, _ = make_part()
    names = [each.reader.name for each in part.readers]
    for _ in range(2):
        part.join()
        assert [each.reader.name for each in part.readers] == [*names, f"joining {names[0]}"]
        timeline.run_until(timeline.now_s + 1.0)
    assert len(part.process.peers) == 3


def test_a_plain_reader_that_joins_loses_no_single_message_of_an_answer() -> None:
    (shape, network), *others = SHAPE.readers
    lossy = attrs.evolve(network, replay=attrs.evolve(network.replay, loss=0.5))
    part = StreamPart(Timeline(seed=5), WorldCounters(), attrs.evolve(SHAPE, readers=((shape, lossy), *others)))
    losses = {}
    for _ in range(10):
        part.join()
        losses[part.readers[-1].reader.has_extension] = part.readers[-1].storm.replay.loss
    assert losses == {True: 0.5, False: 0.0}


def test_quiet_readers_have_what_the_publisher_has() -> None:
    part, timeline, _ = make_part()
    timeline.run_until(3.0)
    part.begin_quiet()
    num_published = part.process.actor.num_published
    timeline.run_until(3.0 + part.limit_s)
    part.check_converged()
    assert part.process.actor.num_published == num_published > 0
    part.readers[0].reader.view.clear(0)
    if part.process.actor.held:
        with pytest.raises(BrokenPromise, match="every view converges"):
            part.check_converged()
