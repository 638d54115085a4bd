"""Files and folders, and the report as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.component_lint.file_lint import lint_paths
from scheduler_components.component_lint.rules import LintOptions
from scheduler_components.component_lint.source_lint import lint_source

BROKEN = "class LoadMixin:\n    pass\n"


def test_folders_are_walked_in_order_and_each_file_is_read_once(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", ".venv/d.py", "a/__pycache__/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(BROKEN)
    report = lint_paths([tmp_path, tmp_path / "b.py", tmp_path / "a"])
    assert report.num_files == 2
    assert [each.path for each in report.findings] == [str(tmp_path / "a" / "c.py"), str(tmp_path / "b.py")]
    assert report.exit_code == 1


def test_the_report_as_text_and_json_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(BROKEN)
    report = lint_paths([path])
    (found,) = report.findings
    assert report.as_text() == f"{path}:1: mixin: {found.message}; {found.hint}\nfiles: 1, findings: 1, suppressed: 0"
    assert json.loads(report.as_json()) == {
        "num_files": 1,
        "num_suppressed": 0,
        "findings": [
            {"path": str(path), "line": 1, "rule": "mixin", "message": found.message, "hint": found.hint},
        ],
    }


def test_sound_code_ends_well(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Load:\n    pass\n")
    report = lint_paths([tmp_path])
    assert (report.findings, report.exit_code) == ((), 0)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"# -*- coding: nonsense -*-\n", b"class A(:\n"])
def test_what_cannot_be_read_is_a_finding_and_not_an_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.py").write_bytes(content)
    (tmp_path / "b.py").write_text(BROKEN)
    assert [each.rule for each in lint_paths([tmp_path]).findings] == ["not-python", "mixin"]


def test_a_files_own_encoding_is_honoured(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# coding: latin-1\nclass ÄMixin: ...\n".encode("latin-1"))
    assert [each.rule for each in lint_paths([tmp_path]).findings] == ["mixin"]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_python_is_a_persons_mistake(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as raised:
        lint_paths([tmp_path / name])
    assert raised.value.field == "path"


@pytest.mark.parametrize("limit", [-1, True, "7"])
def test_a_limit_is_a_number(limit: object) -> None:
    with pytest.raises(ConfigError) as raised:
        LintOptions(max_fields=limit)  # type: ignore[arg-type]
    assert raised.value.field == "max_fields"


def test_a_file_nested_too_deeply_is_a_finding_and_not_an_end() -> None:
    deep = "x = " + " + ".join(["y"] * 20_000)
    assert {each.rule for each in lint_source(deep).findings} <= {"not-python"}


@given(source=st.text(max_size=200))
@settings(deadline=None, max_examples=200)
@example("\\")
@example("#component-lint:\\\n")
@example("\x0c# component-lint: ignore[mixin] x")
@example("if x:\n\t# component-lint: ignore[mixin] x\n        y")
@example("class A:\n  x: 'b c' = 1")
def test_any_text_gets_a_report(source: str) -> None:
    lines = len(source.splitlines()) + 1
    assert all(1 <= each.line <= lines for each in lint_source(source).findings)
