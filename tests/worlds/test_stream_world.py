"""A publisher with its readers: every kind of fault happens, and a calm judges each reader."""

from __future__ import annotations

import random
from random import Random

import attrs

from worlds import Timeline
from worlds.stream_world import STREAM_FAULTS, StreamPart, draw_stream_shape
from worlds.timeline import WorldCounters

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


def test_some_hundred_shapes_have_every_fault_and_every_kind_of_reader() -> None:
    shapes = [draw_stream_shape(random.Random(seed)) for seed in range(200)]
    assert {fault for shape in shapes for fault in shape.faults} == set(STREAM_FAULTS)
    networks = [network for shape in shapes for _, network in shape.readers]
    for value in ("loss", "duplication", "reordering"):
        rates = {getattr(network.live, value) for network in networks}
        assert 0.0 in rates and len(rates) > 20
    assert {reader.has_extension for shape in shapes for reader, _ in shape.readers} == {True, False}
    assert {shape.process.publisher.seq_base for shape in shapes} == {"zero", "clock"}
    assert {shape.process.has_floor for shape in shapes} == {True, False}
    windows = [shape.process.publisher.window for shape in shapes]
    assert min(windows) == 1 and max(windows) > 64 and sorted(windows)[100] < 32
