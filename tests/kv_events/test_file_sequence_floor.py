"""The sequence floor. Property: whatever clock and crashes do, an epoch starts above all earlier ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import StartError
from scheduler_components.kv_events import sequence_floor
from scheduler_components.kv_events.file_sequence_floor import LockedFloorFile, open_sequence_floor

NOW = 1_800_000_000_000_000
EPOCHS = st.lists(
    st.tuples(
        st.integers(-(10**15), 10**15),  # the clock, relative to NOW
        st.lists(st.integers(1, 40), max_size=5),  # batches sent between two reservations
        st.booleans(),  # closed, or killed
    ),
    min_size=2,
    max_size=8,
)


@settings(deadline=None)
@given(epochs=EPOCHS)
@example(epochs=[(0, [40] * 5, False), (-(10**15), [1], False), (0, [1], True)])
@example(epochs=[(0, [], False), (-1, [], True), (-2, [1], True)])
def test_every_epoch_starts_above_all_numbers_of_all_earlier_ones(epochs: list[tuple[int, list[int], bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sequence_floor, "_RESERVED", 100)  # fewer than an epoch may send
        path = Path(directory) / "floor"
        highest = -1
        for offset, sent, is_closed in epochs:
            floor = open_sequence_floor(path, wanted=NOW + offset)
            assert floor.first > highest
            assert floor.first >= NOW + offset
            number = floor.first
            for count in sent:
                number += count
                highest = number - 1
                floor.reserve_above(number)
            if is_closed:
                floor.close(number)
            else:
                floor._file.close()  # type: ignore[union-attr]  # as the system does when a process is killed
        if epochs[-1][2]:
            assert {each.name for each in Path(directory).iterdir()} == {"floor"}


def test_a_clean_close_returns_unused_numbers(tmp_path: Path) -> None:
    floor = open_sequence_floor(tmp_path / "floor", wanted=1_000)
    floor.close(1_005)
    floor.close(2_000)
    assert open_sequence_floor(tmp_path / "floor", wanted=0).first == 1_005


def test_it_is_written_sparsely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = LockedFloorFile.replace
    monkeypatch.setattr(
        LockedFloorFile, "replace", lambda file, content: (written.append(content), write(file, content))
    )
    floor = open_sequence_floor(tmp_path / "floor", wanted=0)
    for number in range(10_000):
        floor.reserve_above(number)
    assert len(written) == 1
    floor.reserve_above(1 << 32)
    assert len(written) == 2


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"1.5", b"9" * 40, b"\xff", b"%d" % (1 << 62), b"1\0", b"12"])
def test_a_file_without_a_number_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "floor"
    path.write_bytes(content)
    with pytest.raises(StartError, match="holds no sequence number, or a damaged one"):
        open_sequence_floor(path, wanted=5)
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["floor"]


@given(number=st.integers(10, 2**61), data=st.data())
def test_a_floor_that_is_cut_or_damaged_is_refused(number: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "floor"
        floor = open_sequence_floor(path, wanted=0)
        floor.close(number)
        content = path.read_bytes()
        place = data.draw(st.integers(0, len(content) - 1))
        damaged = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
        for wrong in (content[:place], damaged):
            path.write_bytes(wrong)
            with pytest.raises(StartError, match="holds no sequence number, or a damaged one"):
                open_sequence_floor(path, wanted=0)
        path.write_bytes(b"%d\n" % number)  # as an operator writes it
        assert open_sequence_floor(path, wanted=0).first == number


def test_a_pipe_or_a_device_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe", tmp_path / "device"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        with pytest.raises(StartError, match="is no regular file"):
            open_sequence_floor(path, wanted=0)
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "device"}


def test_one_file_serves_one_publisher(tmp_path: Path) -> None:
    first = open_sequence_floor(tmp_path / "floor", wanted=5)
    with pytest.raises(StartError, match="another publisher uses this sequence floor"):
        open_sequence_floor(tmp_path / "floor", wanted=5)
    first.close(6)


def test_a_place_that_cannot_be_written_is_a_start_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "floor", tmp_path):
        with pytest.raises(StartError):
            open_sequence_floor(path, wanted=5)


def test_a_disk_that_fails_later_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    floor = open_sequence_floor(directory / "floor", wanted=0)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    for number in range(1 << 32, (1 << 32) + 1_000):
        floor.reserve_above(number)
    floor.close(1)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
