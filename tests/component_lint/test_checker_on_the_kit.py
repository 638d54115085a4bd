"""Test that the kit keeps its own rules, and that each accepted exception has a reason and is still needed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from flake8.main.cli import main

from scheduler_components.component_lint import ComponentChecker

ROOT = Path(__file__).parent.parent.parent
KIT = [ROOT / "scheduler_components", ROOT / "observability"]
NOQA = re.compile(r"# noqa: (SCH\d+)(.*)")


def test_the_kit_has_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--isolated", "--jobs=1", "--select=SCH", *map(str, KIT)])
    assert (status, capsys.readouterr().out) == (0, "")


def test_each_noqa_comment_has_a_reason_and_is_needed() -> None:
    num_found = 0
    for path in sorted(path for folder in KIT for path in folder.rglob("*.py")):
        accepted = [
            (number, *match.groups())
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if (match := NOQA.search(line))
        ]
        if accepted:
            problems = ComponentChecker(ast.parse(path.read_text()), str(path)).run()
            found = {(line, text.split(" ", 1)[0]) for line, _, text, _ in problems}
            for number, code, reason in accepted:
                assert (number, code) in found, f"{path}:{number} breaks no rule {code} any more"
                assert len(reason.split()) >= 3, f"{path}:{number} gives no reason"
        num_found += len(accepted)
    assert num_found
