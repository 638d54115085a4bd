"""The guide quotes the stages as they are."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "docs" / "refactor"
STAGES = sorted(FOLDER.glob("stage_*"))


def lines_of(stage: Path) -> set[str]:
    return {line for path in stage.glob("*.py") for line in path.read_text().splitlines()}


def test_each_quoted_diff_is_the_step_that_it_stands_under() -> None:
    steps = re.split(r"^## Step \d.*$", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(steps) == len(STAGES) - 1
    for number, step in enumerate(steps):
        before, after = lines_of(STAGES[number]), lines_of(STAGES[number + 1])
        (quoted,) = re.findall(r"```diff\n(.*?)```", step, re.DOTALL)
        for line in quoted.splitlines():
            here, there = (before, after) if line[0] == "-" else (after, before)
            assert line[1:] in here, f"step {number + 1} quotes {line!r}"
            assert line.strip("+- ") == "@staticmethod" or line[1:] not in there, f"step {number + 1} keeps {line!r}"


def test_every_stage_is_in_the_table() -> None:
    guide = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| \[`(stage_\w+)`\]", guide, re.MULTILINE) == [stage.name for stage in STAGES]
