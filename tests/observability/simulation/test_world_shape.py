"""Shapes are drawn from the world's random numbers alone, and cover what they may have."""

from __future__ import annotations

import random

from observability.simulation.world_shape import STREAM_FAULTS, draw_stream_shape


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


def test_the_number_of_readers_may_be_given() -> None:
    shape = draw_stream_shape(random.Random(1), name="relay", num_readers=2)
    assert [reader.name for reader, _ in shape.readers] == ["relay 0", "relay 1"]
