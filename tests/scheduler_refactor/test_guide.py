"""The guide quotes the patches exactly and names each of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from stages import GUIDE, PATCHES, STAGES

import scheduler_refactor as refactor
from scheduler_refactor.measure_report import MeasureReport, render_text
from scheduler_refactor.measurement import find_host, measure_host
from scheduler_refactor.source_index import SourceIndex

TEXT = (GUIDE / "README.md").read_text()
PACKAGE = Path(refactor.__file__).parent
HOW_TO = GUIDE.parent / "how-to" / "refactor-a-scheduler.md"


def test_each_quoted_diff_belongs_to_the_patch_of_its_section() -> None:
    steps = re.split(r"^## Step \d.*$", TEXT, flags=re.MULTILINE)[1:]
    assert len(steps) == len(PATCHES)
    for patch, step in zip(PATCHES, steps, strict=True):
        assert f"]({patch.name})" in step
        (quoted,) = re.findall(r"```diff\n(.*?)```", step, re.DOTALL)
        difference = patch.read_text().splitlines()
        for line in quoted.splitlines():
            assert line in difference, f"{patch.name} has no {line!r}"


def test_every_stage_is_in_the_table() -> None:
    assert re.findall(r"^\| `(stage_\w+)` \|", TEXT, re.MULTILINE) == list(STAGES)
    assert re.findall(r"^\| `stage_\w+` \| \[`(step_\w+\.patch)`\]", TEXT, re.MULTILINE) == [
        patch.name for patch in PATCHES
    ]


def test_the_quoted_measurement_is_that_of_the_first_stage() -> None:
    (quoted,) = re.findall(r"refactor measure .*\n```\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    files = {path.as_posix(): path.read_text() for path in (GUIDE / STAGES[0]).glob("*.py")}
    index = SourceIndex.parse(files)
    lines = "\n".join(render_text(MeasureReport.of(measure_host(index, find_host(index, ""))), "")).splitlines()
    for line in quoted.splitlines():
        assert line in lines


def rules_of_refusals() -> set[str]:
    """The rules that the package passes to `add`, `_refuse` and `Refusal`. Two of them are values of `Access.via`."""
    found = {"super", "class"}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            place = {"add": 2, "_refuse": 1}.get(getattr(node.func, "attr", ""), len(node.args))
            rules = [*node.args[place : place + 1], *(each.value for each in node.keywords if each.arg == "rule")]
            found |= {each.value for each in rules if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def test_the_how_to_explains_each_rule_of_a_refusal() -> None:
    _, _, table = HOW_TO.read_text().partition("| rule | refused |")
    rows = re.findall(r"^\| (`.*?) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert {rule for row in rows for rule in re.findall(r"`([\w-]+)`", row)} == rules_of_refusals()
