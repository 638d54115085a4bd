"""The four cases: before and after send the same, and the wrong move of each is found with its smallest workload."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cases.harness import CASES, case_version, harness
from stages import GUIDE

from scheduler_refactor import read_recipe, write_recipe
from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.recipe import ComponentField, Move, Prepare, Step
from scheduler_refactor.refusals import RefusedError
from scheduler_refactor.workload_search import find_difference

CASES_FOLDER = GUIDE / "cases"
WRONG_MOVES = {
    "override": ("self.finisher.finish(rid)", "self.finish_output(rid)", "drafts"),
    "shared_field": (
        "Decode(requests=self, budget=self.budget, send=self.send)",
        "Decode(requests=self, budget=TokenBudget(4), send=self.send)",
        "free",
    ),
    "init_order": ("min(4, self.num_pages)", "4", "old goes on with nothing"),
    "overlap": ("self.results.process(last_batch,", "self.results.process(self.cur_batch,", "on the device"),
}
"""The text of the right version, that of the wrong one, and a part of the difference."""


def test_every_case_has_its_files_and_its_section() -> None:
    page = (CASES_FOLDER / "README.md").read_text()
    for case in CASES:
        assert {each.name for each in (CASES_FOLDER / case).glob("*.py")} == {"before.py", "after.py"}
        assert f"[Before]({case}/before.py), [after]({case}/after.py), [recipe]({case}/recipe.json)." in page
    assert WRONG_MOVES.keys() == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_recipe_makes_after_from_before(case: str) -> None:
    folder = CASES_FOLDER / case
    recipe = read_recipe((folder / "recipe.json").read_bytes())
    assert write_recipe(recipe) == (folder / "recipe.json").read_bytes()
    made = apply_recipe({"scheduler.py": (folder / "before.py").read_text()}, recipe)
    assert made == {"scheduler.py": (folder / "after.py").read_text()}


PLAIN_MOVES: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "override": ("override", (), {"methods": ("finish", "process")}),
    "shared_field": ("fact-rebound", ("free_tokens",), {"facts": ("free_tokens", "send")}),
    "init_order": ("fact-unbound", (), {}),
    "overlap": ("fact-rebound", ("last_batch", "cur_batch"), {"methods": ("process_last",)}),
}
"""The rule that refuses the move without the edits by hand, facts that it would pass, and what else it would say."""


@pytest.mark.parametrize("case", CASES)
def test_the_move_without_its_preparation_is_refused(case: str) -> None:
    rule, facts, changes = PLAIN_MOVES[case]
    recipe = read_recipe((CASES_FOLDER / case / "recipe.json").read_bytes())
    steps: list[Step] = []
    for step in recipe.steps:
        if isinstance(step, Prepare):
            fields = tuple(each for each in step.fields if each.name != "budget")
            more = (ComponentField(name=name, annotation="object", kind="fact") for name in facts)
            steps.append(msgspec.structs.replace(step, fields=(*fields, *more)))
        elif isinstance(step, Move):
            steps.append(msgspec.structs.replace(step, **changes))
    with pytest.raises(RefusedError) as refused:
        apply_recipe(
            {"scheduler.py": (CASES_FOLDER / case / "before.py").read_text()},
            msgspec.structs.replace(recipe, steps=tuple(steps)),
        )
    assert rule in {each.rule for each in refused.value.refusals}


@pytest.mark.parametrize("case", CASES)
def test_before_and_after_send_the_same(case: str) -> None:
    old, new = (case_version(CASES_FOLDER / case / f"{name}.py") for name in ("before", "after"))
    coverage, found = find_difference(harness, old, new, count=30, derandomize=True)
    assert found is None, found
    assert coverage.payloads["sent"] > 100


@pytest.mark.parametrize("case", CASES)
def test_the_wrong_move_is_found(case: str, tmp_path: Path) -> None:
    right, wrong, word = WRONG_MOVES[case]
    text = (CASES_FOLDER / case / "after.py").read_text()
    assert text.count(right) == 1
    (tmp_path / "wrong.py").write_text(text.replace(right, wrong))
    old, new = (case_version(file) for file in (CASES_FOLDER / case / "before.py", tmp_path / "wrong.py"))
    _, found = find_difference(harness, old, new, count=30, derandomize=True)
    assert found is not None
    assert sum(map(len, found.workload.steps)) <= 3
    assert word in found.difference.problem
