"""The command ``lint-components``: what it prints and returns, and what it calls a person's mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from scheduler_components import ConfigError
from scheduler_components.component_lint.rules import RULES
from scheduler_components.reference.lint_command import lint_components


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "a.py"
    path.write_text("class LoadMixin:\n    pass\n")
    return path


def run(*arguments: str) -> object:
    app = typer.Typer()
    app.command()(lint_components)
    return app(arguments, standalone_mode=False)


def test_findings_are_lines_and_exit_code_1(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(broken)) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{broken}:1: mixin: ")
    assert last == "files: 1, findings: 1, suppressed: 0"


def test_json_is_one_object(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(broken), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [each["rule"] for each in report["findings"]] == ["mixin"]


def test_sound_code_is_exit_code_0(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    assert run(str(tmp_path)) == 0


def test_the_rules_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--rules") == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == list(RULES)


@pytest.mark.parametrize(
    ("arguments", "field"), [(["/no/such/path"], "path"), (["--max-fields", "-1", "."], "max_fields")]
)
def test_a_bad_value_is_a_config_error(arguments: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run(*arguments)
    assert raised.value.field == field


def test_no_path_is_a_mistake() -> None:
    with pytest.raises(typer.BadParameter):
        run()
