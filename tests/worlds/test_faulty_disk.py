"""Disks: an honest one keeps every write, and what a lying one loses or tears is counted and known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.errors import StartError
from scheduler_components.kv_events.sequence_floor import open_floor
from worlds import DiskFaults, FaultyDisk
from worlds.faulty_disk import FloorOnFaultyDisk, WriteFate


def disk(seed: int = 0, **faults: float) -> FaultyDisk:
    return FaultyDisk(random=random.Random(seed), faults=DiskFaults(**faults))


@given(
    seed=st.integers(0, 1_000),
    steps=st.lists(st.sampled_from(["write", "crash"]), max_size=30),
    lies=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_file_has_its_newest_write_or_the_disk_says_what_became_of_it(
    seed: int, steps: list[str], lies: float
) -> None:
    it = disk(seed, lies=lies, lost=0.5, torn=0.5)
    written: list[bytes | None] = [None]
    for number, step in enumerate(steps):
        if step == "write":
            written.append(b"content %d" % number)
            before, content = it.read("file"), written[-1]
            it.write("file", content or b"")
        else:
            it.crash()
        found, fate = it.read("file"), it.fate("file")
        if fate is WriteFate.KEPT:
            assert found == written[-1]
        elif fate is WriteFate.LOST:
            assert found == before, "the write before the lost one"
        else:
            assert found is not None and content is not None and content.startswith(found) and found != content
    assert lies or not it.counters


@pytest.mark.parametrize(("lost", "torn", "fate"), [(1.0, 0.0, "lost"), (0.0, 1.0, "torn"), (0.0, 0.0, "kept")])
def test_every_fault_is_counted(lost: float, torn: float, fate: str) -> None:
    it = disk(lies=1.0, lost=lost, torn=torn)
    it.write("file", b"new")
    it.crash()
    it.crash()
    assert it.fate("file") == fate
    assert dict(it.counters) == ({} if fate == "kept" else {f"disk writes {fate}": 1})
    assert (it.read("file") is None) is (fate == "lost")
    it.write("file", b"newer")
    assert (it.read("file"), it.fate("file")) == (b"newer", WriteFate.KEPT)


def test_an_operator_may_lose_a_file() -> None:
    it = disk()
    assert it.fate("file") is WriteFate.KEPT
    it.write("file", b"new")
    it.lose("file")
    it.crash()
    assert (it.read("file"), it.fate("file")) == (None, WriteFate.LOST)


def test_a_torn_sequence_floor_is_refused() -> None:
    for seed in range(40):
        it = disk(seed, lies=1.0, lost=0.0, torn=1.0)
        file = FloorOnFaultyDisk(disk=it, name="floor")
        open_floor(file, wanted=5)
        it.crash()
        with pytest.raises(StartError, match="holds no sequence number, or a damaged one"):
            open_floor(file, wanted=5)
