"""Disks: what was synced survives an honest disk, and every loss is counted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.simulation import DiskFaults, FaultyDisk
from observability.simulation.faulty_disk import FloorOnFaultyDisk
from scheduler_components.errors import StartError
from scheduler_components.kv_events.sequence_floor import open_floor


def disk(seed: int = 0, **faults: float) -> FaultyDisk:
    return FaultyDisk(random=random.Random(seed), faults=DiskFaults(**faults))


@given(seed=st.integers(0, 1_000), steps=st.lists(st.sampled_from(["write", "sync", "append", "crash"]), max_size=30))
def test_an_honest_disk_keeps_what_was_synced(seed: int, steps: list[str]) -> None:
    it = disk(seed, lies=0.0, lost=0.5, torn=0.5)
    synced: bytes | None = None
    appended, num_synced = list[bytes](), 0
    for number, step in enumerate(steps):
        content = b"%d" % number
        if step == "write":
            it.write("file", content, is_synced=True)
            synced = content
        elif step == "append":
            it.append("log", content)
            appended = [*it.records("log")]
        elif step == "sync":
            it.sync("log")
            num_synced = len(appended)
        else:
            it.crash()
            kept = it.records("log")
            assert kept == appended[: len(kept)] and len(kept) >= num_synced
            appended, num_synced = kept, len(kept)
        assert it.read("file") == synced


def test_what_was_not_synced_is_kept_lost_or_torn() -> None:
    left = set[bytes | None]()
    for seed in range(50):
        it = disk(seed, lost=0.3, torn=0.5)
        it.write("file", b"old", is_synced=True)
        it.write("file", b"newer", is_synced=False)
        it.crash()
        left.add(it.read("file"))
        assert sum(it.counters.values()) == 1
    assert {b"old", b"newer", b"new"} <= left


def test_a_first_write_that_is_lost_leaves_no_file() -> None:
    it = disk(lost=1.0)
    it.write("file", b"new", is_synced=False)
    it.crash()
    assert it.read("file") is None


def test_a_disk_that_lies_loses_synced_records() -> None:
    it = disk(lies=1.0, lost=1.0)
    for number in range(10):
        it.append("log", b"%d" % number)
    it.sync("log")
    it.crash()
    assert len(it.records("log")) < 10
    assert it.counters["lost"] == 10 - len(it.records("log"))


def test_a_torn_sequence_floor_is_refused() -> None:
    it = disk(lies=1.0, lost=0.0, torn=1.0)
    file = FloorOnFaultyDisk(disk=it, name="floor")
    open_floor(file, wanted=5)
    it.crash()
    with pytest.raises(StartError, match="holds no sequence number, or a damaged one"):
        open_floor(file, wanted=5)
