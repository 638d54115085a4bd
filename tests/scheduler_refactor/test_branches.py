"""The guide's recipes make its stages, and git follows a renamed file. `test_verify` carries branches over moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.git import ScratchRepository
from stages import GUIDE, STAGES

from scheduler_refactor import read_recipe
from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.recipe import recipe_path, write_recipe

pytestmark = pytest.mark.processes

MOVE = read_recipe((GUIDE / "step_3_moved.json").read_bytes())
IN_A_BODY = ("        events = self.cache.take_events()\n", "        events = self.cache.take_events()[:100]\n")


def source(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.py")}


@pytest.fixture
def scratch(written: Path, tmp_path: Path) -> ScratchRepository:
    """`main` has made the move of step 3, and `branch` began before it."""
    scratch = ScratchRepository(tmp_path / "repository")
    scratch.commit("Prepare", source(written / STAGES[2]))
    scratch.git("branch", "branch")
    deleted = dict.fromkeys(source(written / STAGES[2]))
    recipe = {recipe_path(MOVE): write_recipe(MOVE)}
    scratch.commit("Move", {**deleted, **source(written / STAGES[3]), **recipe})
    scratch.git("checkout", "--quiet", "branch")
    return scratch


def edit(scratch: ScratchRepository, message: str, change: tuple[str, str]) -> str:
    text = (scratch.folder / "kv_events_mixin.py").read_text()
    assert text.count(change[0]) == 1
    return scratch.commit(message, {"kv_events_mixin.py": text.replace(*change)})


@pytest.mark.parametrize("step", [2, 3])
def test_the_recipes_make_the_stages(step: int, written: Path) -> None:
    (file,) = GUIDE.glob(f"step_{step}_*.json")
    recipe = read_recipe(file.read_bytes())
    assert write_recipe(recipe) == file.read_bytes()
    assert apply_recipe(source(written / STAGES[step - 1]), recipe) == source(written / STAGES[step])


def test_git_merges_a_changed_body_into_the_renamed_file(scratch: ScratchRepository) -> None:
    edit(scratch, "Take a hundred events", IN_A_BODY)
    scratch.git("merge", "--quiet", "--no-edit", "main")
    found = source(scratch.folder)
    assert "kv_events_mixin.py" not in found
    assert IN_A_BODY[1] in found["kv_events.py"]
