"""Test that the kit keeps its own rules, and that each accepted exception has a reason and is still needed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from scheduler_refactor.component_lint import ComponentChecker

ROOT = Path(__file__).parents[3]
KIT = [ROOT / "scheduler_components", ROOT / "observability"]
NOQA = re.compile(r"# noqa: (SCH\d+)(.*)")


@pytest.mark.soak
def test_the_kit_breaks_a_rule_only_where_a_noqa_comment_gives_a_reason(soaking: bool) -> None:
    """In make test only the files with a comment: `make lint` finds a problem without one in all files."""
    num_accepted = 0
    for path in sorted(path for folder in KIT for path in folder.rglob("*.py")):
        text = path.read_text()
        if not soaking and not NOQA.search(text):
            continue
        accepted = {
            (number, match[1]): match[2]
            for number, line in enumerate(text.splitlines(), 1)
            if (match := NOQA.search(line))
        }
        problems = ComponentChecker(ast.parse(text), str(path)).run()
        assert {(line, problem.split(" ", 1)[0]) for line, _, problem, _ in problems} == accepted.keys(), path
        for (number, _), reason in accepted.items():
            assert len(reason.split()) >= 3, f"{path}:{number} gives no reason"
        num_accepted += len(accepted)
    assert num_accepted


def test_no_component_of_the_kit_takes_a_field_that_it_does_not_declare() -> None:
    """The rule reads the declarations; a base class without slots would undo them."""
    components = [
        value
        for path in (ROOT / "scheduler_components").glob("*.py")
        if not path.stem.startswith(("_", "torch_"))
        for value in vars(importlib.import_module(f"scheduler_components.{path.stem}")).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    ]
    assert len(components) > 20
    for component in components:
        assert not component.__dictoffset__, f"{component.__name__} has a __dict__"
