"""Test that the kit keeps its own rules, and that each accepted exception has a reason and is still needed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from scheduler_components.component_lint import ComponentChecker

ROOT = Path(__file__).parent.parent.parent
KIT = [ROOT / "scheduler_components", ROOT / "observability"]
NOQA = re.compile(r"# noqa: (SCH\d+)(.*)")


def test_the_kit_breaks_a_rule_only_where_a_noqa_comment_gives_a_reason() -> None:
    """`make lint` runs flake8 on the kit. Here the checker runs alone, in a third of the time."""
    num_accepted = 0
    for path in sorted(path for folder in KIT for path in folder.rglob("*.py")):
        text = path.read_text()
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
