"""A dump becomes one file, which overwrites no other."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from scheduler_components.agreement.file_divergence_sink import FileDivergenceSink
from scheduler_components.values import Decision, DecisionDump, DivergenceReport

DUMP = DecisionDump(
    1,
    DivergenceReport(4, 5, 0, {0: Decision("evict", (7,)), 1: None}),
    ((3, (Decision("batch", ("decode", "a")),)), (4, ())),
)


def test_each_dump_is_one_file_that_can_be_read_back(tmp_path: Path) -> None:
    sink = FileDivergenceSink(directory=tmp_path / "new")
    for _ in range(2):
        sink.write(DUMP)
    names = ["decisions-rank1-step5.1.json", "decisions-rank1-step5.json"]
    paths = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in paths] == names
    for path in paths:
        assert msgspec.json.decode(path.read_bytes(), type=DecisionDump) == DUMP
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_rank_that_diverges_again_and_again_does_not_fill_the_disk(tmp_path: Path) -> None:
    sink = FileDivergenceSink(directory=tmp_path, max_files=2)
    for _ in range(5):
        sink.write(DUMP)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FileDivergenceSink(directory=tmp_path / "file").write(DUMP)
