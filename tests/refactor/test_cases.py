"""The four cases: before and after send the same, and the wrong move of each is found with its smallest workload."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.harness import CASES, case_version, harness
from stages import GUIDE

from scheduler_components.refactor import read_recipe, write_recipe
from scheduler_components.refactor.apply import apply_recipe
from scheduler_components.refactor.workload_search import find_difference

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
