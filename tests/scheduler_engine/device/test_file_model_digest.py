"""Every byte of a file counts, and a file that stays is read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_engine.device import file_model_digest
from scheduler_engine.device.file_model_digest import DigestMemory, digest_files


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_model_digest, "_SEGMENT_BYTES", 64)
    monkeypatch.setattr(file_model_digest, "_READ_BYTES", 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@given(content=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_change_of_any_byte_changes_the_digest(folder: Path, content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content) - 1))
    changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    digests = []
    for name, each in (("a", content), ("b", changed), ("c", content + b"\0"), ("d", content)):
        (folder / name).write_bytes(each)
        digests += digest_files([folder / name])
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3


def test_a_file_is_read_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memory = tmp_path / "weights", DigestMemory(tmp_path / "cache" / "digests.json")
    file.write_bytes(bytes(100))
    segments = []
    hash_segment = file_model_digest._digest_segment

    def counted(name: str, start: int) -> bytes:
        segments.append(start)
        return hash_segment(name, start)

    monkeypatch.setattr(file_model_digest, "_digest_segment", counted)
    first = digest_files([file], memory)
    assert digest_files([file], memory) == first
    assert sorted(segments) == [0, 64]
    other = tmp_path / "other"
    other.write_bytes(bytes(99) + b"1")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)  # of the same size and time: the inode differs
    assert digest_files([file], memory) != first
    file.write_bytes(bytes(100))
    os.utime(file, ns=(1, 1))
    assert digest_files([file], memory) == first
    assert len(segments) == 6


@pytest.mark.parametrize("content", [b"", b"{", b'{"file": 1}', b"\xff"])
def test_a_broken_memory_is_empty_and_is_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file, kept = tmp_path / "weights", tmp_path / "digests.json"
    file.write_bytes(b"1")
    kept.write_bytes(content)
    digest = digest_files([file], DigestMemory(kept))
    assert "cannot be read" in caplog.text
    assert [each.digest for each in DigestMemory(kept).read().values()] == digest


def test_a_memory_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"1")
    assert digest_files([file], DigestMemory(file / "digests.json"))
    assert "cannot be kept" in caplog.text
    assert list(tmp_path.iterdir()) == [file]


def test_a_memory_that_cannot_be_replaced_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, taken = tmp_path / "weights", tmp_path / "digests.json"
    file.write_bytes(b"1")
    taken.mkdir()
    assert digest_files([file], DigestMemory(taken))
    assert "cannot be kept" in caplog.text
    assert {each.name for each in tmp_path.iterdir()} == {"weights", "digests.json"}
