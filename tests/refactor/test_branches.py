"""The guide's advice for open branches: git follows a renamed file, and a move is repeated on a branch."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.git import ScratchRepository
from stages import GUIDE, STAGES

from scheduler_components.refactor import read_recipe
from scheduler_components.refactor.apply import apply_recipe
from scheduler_components.refactor.git_repository import GitRepository
from scheduler_components.refactor.recipe import recipe_path, write_recipe
from scheduler_components.refactor.verify import carry, verify

pytestmark = pytest.mark.processes

MOVE = read_recipe((GUIDE / "step_3_moved.json").read_bytes())
IN_A_BODY = ("        events = self.cache.take_events()\n", "        events = self.cache.take_events()[:100]\n")
NEW_METHOD = (
    "    def close_kv_events(",
    "    def flush(self: Scheduler) -> None:\n        self.publish_kv_events()\n\n    def close_kv_events(",
)


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


def test_the_move_is_verified(scratch: ScratchRepository) -> None:
    (verdict,) = verify(GitRepository(scratch.folder), "main~1", "main")
    assert verdict.passed, list(verdict.lines())


def test_git_merges_a_changed_body_into_the_renamed_file(scratch: ScratchRepository) -> None:
    edit(scratch, "Take a hundred events", IN_A_BODY)
    scratch.git("merge", "--quiet", "--no-edit", "main")
    found = source(scratch.folder)
    assert "kv_events_mixin.py" not in found
    assert IN_A_BODY[1] in found["kv_events.py"]


def test_a_branch_is_carried_over_the_move(scratch: ScratchRepository) -> None:
    edit(scratch, "Take a hundred events", IN_A_BODY)
    carried = carry(GitRepository(scratch.folder), "main", "branch")
    found = scratch.files(carried[-1])
    assert found.pop(recipe_path(MOVE))
    assert found == apply_recipe(source(scratch.folder), MOVE)
    assert scratch.git("log", "--format=%an: %s", f"main..{carried[-1]}") == "Ada: Take a hundred events\n"
    changed = scratch.git("diff", "--unified=0", "main", carried[-1]).splitlines()
    assert [line[1:] + "\n" for line in changed if line.startswith("+ ")] == [IN_A_BODY[1]]


def test_a_method_in_the_old_shape_is_not_lost(scratch: ScratchRepository) -> None:
    """The recipe does not name it, so it stays in its class, which stays for it."""
    edit(scratch, "Flush", NEW_METHOD)
    (carried,) = carry(GitRepository(scratch.folder), "main", "branch")
    flush = "    def flush(self: Scheduler) -> None:\n        self.kv_events.publish_kv_events()\n"
    assert flush in scratch.files(carried)["kv_events.py"]
