"""``refactor verify`` and ``refactor carry`` in a repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.git import ScratchRepository
from kit.wrong_moves import ENGINE, RECIPE, changed

from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.recipe import recipe_path, write_recipe

pytestmark = pytest.mark.processes

MIXIN = "engine/mixin.py"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScratchRepository:
    """A branch that edits a body, and `main` with the move."""
    scratch = ScratchRepository(tmp_path / "repository")
    scratch.commit("Begin", ENGINE)
    scratch.git("checkout", "--quiet", "-b", "branch")
    scratch.commit("Edit", {MIXIN: changed(ENGINE[MIXIN], "+= 1\n", "+= 2\n")})
    scratch.git("checkout", "--quiet", "main")
    scratch.commit("Move", {**apply_recipe(ENGINE, RECIPE), recipe_path(RECIPE): write_recipe(RECIPE)})
    monkeypatch.chdir(scratch.folder)
    return scratch


def test_a_move_is_verified_and_a_branch_is_carried(command_line: Callable, scratch: ScratchRepository) -> None:
    found = command_line("refactor", "verify", "HEAD~1")
    assert (found.code, found.out.splitlines()[-1]) == (0, "1 of 1 commits are what their recipes say")
    found = command_line("refactor", "carry", "main", "branch", "branch-moved")
    assert found.code == 0
    assert found.out.startswith("branch-moved: 1 commits on ")
    found = command_line("refactor", "verify", "main~1", "branch-moved")
    assert found.code == 1
    assert [line.split()[0] for line in found.out.splitlines()] == ["PASS", "BY", "adds", "1"]
    assert command_line("refactor", "verify", "main~1", "branch-moved", "--allow-by-hand").code == 0
    assert "+= 2" in scratch.files("branch-moved")["engine/results.py"]


@pytest.mark.usefixtures("scratch")
def test_mistakes_are_named(command_line: Callable) -> None:
    assert command_line("refactor", "verify", "nowhere").complaint.startswith("revision='nowhere': is no commit here")
    assert command_line("refactor", "carry", "main", "branch", "main").complaint.startswith("branch='main'")
    assert command_line("refactor", "carry", "branch", "main", "x").complaint.startswith("move='")
    outside = command_line("refactor", "verify", "main", "--repository", "/")
    assert outside.complaint.startswith("repository='/': is none")
