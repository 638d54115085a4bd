"""Shapes are drawn from the world's random numbers alone, and cover what they may have."""

from __future__ import annotations

import random

import attrs

from worlds.stream_connection import least_capacity
from worlds.world_shape import STREAM_FAULTS, draw_stream_shape


def test_equal_draws_give_equal_shapes() -> None:
    assert draw_stream_shape(random.Random(7)) == draw_stream_shape(random.Random(7))
    assert draw_stream_shape(random.Random(7)) != draw_stream_shape(random.Random(8))


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


def test_some_streams_are_busy_during_every_answer() -> None:
    """The buffer passes the beginning of an answer before its chunks are sent, and never twice its length."""
    shapes = [draw_stream_shape(random.Random(seed)) for seed in range(200)]
    busy = [each for each in shapes if each.process.publisher.chunk_bytes == 40]
    assert 10 < len(busy) < 40
    for shape in busy:
        for _, network in shape.readers:
            calm = network.without_faults().replay
            assert calm.capacity is not None
            messages_per_s = calm.capacity / (calm.max_latency_s + 0.001)
            num_chunks = shape.traffic.num_blocks
            num_added = (num_chunks + shape.process.publisher.window) / messages_per_s * shape.traffic.rate_per_s
            assert num_added < shape.process.publisher.window


def test_every_answer_is_fast_in_a_calm_and_whole_without_the_extension() -> None:
    shapes = [draw_stream_shape(random.Random(seed)) for seed in range(200)]
    num_slow = 0
    for reader, network in (each for shape in shapes for each in shape.readers):
        calm = network.without_faults().replay
        least = least_capacity(calm.max_latency_s)
        assert calm.capacity is not None and calm.capacity >= least
        num_slow += calm != attrs.evolve(network.replay, loss=0.0, duplication=0.0)
        assert reader.has_extension or not network.replay.loss
    assert num_slow > 20, "storms have answers that are slower than a publisher"
    assert max(shape.traffic.rate_per_s for shape in shapes) > 90
    assert least_capacity(0.1) >= 2 * 300 * 0.1, "a relay may have three engines with 100 batches per second"


def test_the_number_of_readers_may_be_given() -> None:
    shape = draw_stream_shape(random.Random(1), name="relay", num_readers=2)
    assert [reader.name for reader, _ in shape.readers] == ["relay 0", "relay 1"]
