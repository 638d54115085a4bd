"""All packages keep the rules of the kit, and each accepted exception has a reason and is still needed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from scheduler_refactor.component_lint import ComponentChecker

ROOT = Path(__file__).parents[3]
PACKAGES = ("scheduler_components", "observability", "scheduler_engine", "scheduler_refactor")
EDGES = ("torch_", "otel_", "llguidance_")
"""Modules whose packages may be missing."""
NOQA = re.compile(r"# noqa: (SCH\d+)(.*)")


@pytest.mark.soak
def test_the_packages_break_a_rule_only_where_a_noqa_comment_gives_a_reason(soaking: bool) -> None:
    """In make test only the files with a comment: `make lint` finds a problem without one in all files."""
    num_accepted = 0
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
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
    assert num_accepted > 30


def test_no_component_of_the_kit_takes_a_field_that_it_does_not_declare() -> None:
    """The rule reads the declarations; a base class without slots would undo them."""
    names = (
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "scheduler_components").rglob("*.py")
        if not {"engines", "testing", "_internal"} & {*path.parts} and not path.stem.startswith(("_", *EDGES))
    )
    components = [
        value
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    ]
    assert len(components) > 100
    for component in components:
        assert not component.__dictoffset__, f"{component.__name__} has a __dict__"
