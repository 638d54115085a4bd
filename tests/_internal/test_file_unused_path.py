"""A new file gets a name that no other file has."""

from __future__ import annotations

from pathlib import Path

from scheduler_components._internal.file_unused_path import unused_path


def test_a_name_in_use_gets_the_next_number(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = unused_path(tmp_path, "profile-rank0", ".folded")
        path.write_text("")
        names.append(path.name)
    assert names == ["profile-rank0.folded", "profile-rank0.1.folded", "profile-rank0.2.folded"]
    assert unused_path(tmp_path / "missing", "a", ".b") == tmp_path / "missing" / "a.b"
