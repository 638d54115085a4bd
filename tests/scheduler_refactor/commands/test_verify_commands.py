"""``refactor verify`` in a repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.git import ScratchRepository
from kit.wrong_moves import ENGINE, RECIPE

from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.recipe import recipe_path, write_recipe

pytestmark = pytest.mark.processes


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScratchRepository:
    """`main` with a move, then a commit by hand."""
    scratch = ScratchRepository(tmp_path / "repository")
    scratch.commit("Begin", ENGINE)
    scratch.commit("Move", {**apply_recipe(ENGINE, RECIPE), recipe_path(RECIPE): write_recipe(RECIPE)})
    scratch.commit("Edit", {"notes.txt": "one\n"})
    monkeypatch.chdir(scratch.folder)
    return scratch


@pytest.mark.usefixtures("scratch")
def test_a_move_is_verified_and_an_edit_is_by_hand(command_line: Callable) -> None:
    found = command_line("refactor", "verify", "HEAD~2", "HEAD~1")
    assert (found.code, found.out.splitlines()[-1]) == (0, "1 of 1 commits are what their recipes say")
    found = command_line("refactor", "verify", "HEAD~2")
    assert found.code == 1
    assert [line.split()[0] for line in found.out.splitlines()] == ["PASS", "BY", "adds", "1"]
    assert command_line("refactor", "verify", "HEAD~2", "--allow-by-hand").code == 0


@pytest.mark.usefixtures("scratch")
def test_mistakes_are_named(command_line: Callable) -> None:
    assert command_line("refactor", "verify", "nowhere").complaint.startswith("revision='nowhere': is no commit here")
    outside = command_line("refactor", "verify", "main", "--repository", "/")
    assert outside.complaint.startswith("repository='/': is none")
