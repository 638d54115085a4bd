"""A floor on any file: numbers only go up, and a file that fails costs nothing but its message."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import DiskFaults, FaultyDisk
from worlds.faults import FloorOnFaultyDisk

from scheduler_components import StartError
from scheduler_components.kv_events import sequence_floor
from scheduler_components.kv_events.sequence_floor import open_floor


@given(seed=st.integers(0, 99), ends=st.lists(st.booleans(), max_size=8))
def test_each_epoch_starts_above_all_earlier_ones(seed: int, ends: list[bool]) -> None:
    disk = FaultyDisk(random=random.Random(seed), faults=DiskFaults(lost=0.5, torn=0.5))
    draw = random.Random(seed)
    next_number = 0
    for is_clean in ends:
        floor = open_floor(FloorOnFaultyDisk(disk=disk, name="floor"), wanted=draw.randrange(100))
        assert floor.first >= next_number
        next_number = floor.first + draw.randrange(1_000)
        if is_clean:
            floor.close(next_number)
        else:
            disk.crash()


def test_a_torn_floor_is_refused() -> None:
    """The digits that are left would be a lower number."""
    file = FloorOnFaultyDisk(disk=FaultyDisk(random=random.Random(0), faults=DiskFaults()), name="floor")
    open_floor(file, wanted=1_700_000_000_000_000)
    content = file.read()
    assert content is not None
    for length in range(len(content)):
        file.replace(content[:length])
        with pytest.raises(StartError):
            open_floor(file, wanted=0)


def test_a_file_that_cannot_be_written_later_is_reported_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk(random=random.Random(0), faults=DiskFaults())
    file = FloorOnFaultyDisk(disk=disk, name="the floor")
    floor = open_floor(file, wanted=0)

    def fail(_file: object, _content: bytes) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(FloorOnFaultyDisk, "replace", fail)
    for number in range(1_000):
        floor.reserve_above(sequence_floor._RESERVED + number)
    assert caplog.text.count("cannot reserve sequence numbers in the floor: the disk is full") == 1
