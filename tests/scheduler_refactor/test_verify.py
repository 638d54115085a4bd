"""A commit is what its recipe makes of its parent, or the difference is named."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
from kit.git import ScratchRepository
from kit.wrong_moves import ENGINE, RECIPE

from scheduler_components.errors import ConfigError
from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.git_repository import GitRepository
from scheduler_refactor.recipe import recipe_path, write_recipe
from scheduler_refactor.verify import verify

pytestmark = pytest.mark.processes

MIXIN, HOST, COMPONENT = "engine/mixin.py", "engine/host.py", "engine/results.py"
RECIPE_FILE = {recipe_path(RECIPE): write_recipe(RECIPE).decode()}
MOVED = apply_recipe(ENGINE, RECIPE)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "repository"
    ScratchRepository(folder).commit("Begin", {**ENGINE, "notes.txt": "one\n"})
    return folder


@pytest.fixture
def scratch(begun: Path, tmp_path: Path) -> ScratchRepository:
    return ScratchRepository(copytree(begun, tmp_path / "repository"))


def move(scratch: ScratchRepository, **edits: str | None) -> str:
    """Commit the move; `edits` replace files by their stem."""
    files: dict[str, str | bytes | None] = {**MOVED, **RECIPE_FILE}
    for path in list(files):
        stem = Path(path).stem
        if stem in edits:
            files[path] = edits[stem]
    return scratch.commit(RECIPE.title, files)


def test_a_commit_that_only_moves_passes(scratch: ScratchRepository) -> None:
    commit = move(scratch)
    (verdict,) = verify(GitRepository(scratch.folder), "HEAD~1", "HEAD")
    assert verdict.passed
    assert list(verdict.lines()) == [f"PASS {commit[:12]} {RECIPE.title}"]


def test_what_a_commit_does_besides_is_printed(scratch: ScratchRepository) -> None:
    """An edit, a forgotten call site, another file, a new file and a deleted one."""
    (scratch.folder / "notes.txt").write_text("two\n")
    (scratch.folder / "more.py").write_text("x = 1\n")
    (scratch.folder / "engine" / "__init__.py").unlink()
    files: dict[str, str | bytes | None] = {**MOVED, **RECIPE_FILE}
    del files["engine/__init__.py"]
    files[COMPONENT], files[HOST] = MOVED[COMPONENT].replace("LIMIT:", "LIMIT :"), ENGINE[HOST]
    scratch.commit(RECIPE.title, files)
    (verdict,) = verify(GitRepository(scratch.folder), "HEAD~1", "HEAD")
    assert not verdict.passed
    assert {each.path: each.problem for each in verdict.residuals} == {
        COMPONENT: "the commit differs from the recipe",
        HOST: "the commit differs from the recipe",
        "engine/__init__.py": "the recipe has this file, the commit does not",
        "more.py": "the commit has this file, the recipe does not",
        "notes.txt": "the commit differs from the recipe",
    }
    lines = list(verdict.lines())
    assert lines[0].startswith("FAIL ")
    assert "    +        if len(self.history) > LIMIT :" in lines


def test_other_line_ends_are_a_difference(scratch: ScratchRepository) -> None:
    move(scratch, results=MOVED[COMPONENT].replace("\n", "\r\n"))
    (verdict,) = verify(GitRepository(scratch.folder), "HEAD~1", "HEAD")
    assert [each.path for each in verdict.residuals] == [COMPONENT]


def test_a_changed_mode_is_a_difference(scratch: ScratchRepository) -> None:
    (scratch.folder / HOST).chmod(0o755)
    move(scratch)
    (verdict,) = verify(GitRepository(scratch.folder), "HEAD~1", "HEAD")
    assert [each.problem for each in verdict.residuals] == ["the commit changes its mode from 100644 to 100755"]


def test_a_changed_submodule_is_a_difference(scratch: ScratchRepository) -> None:
    for digit in "12":
        scratch.git("update-index", "--add", "--cacheinfo", f"160000,{digit * 40},vendored")
        (scratch.folder / "vendored").mkdir(exist_ok=True)
        if digit == "1":
            scratch.git("commit", "--quiet", "--message=Vendor")
    for path, text in {**MOVED, **RECIPE_FILE}.items():
        (scratch.folder / path).parent.mkdir(exist_ok=True)
        (scratch.folder / path).write_text(text)
    scratch.git("add", "engine", ".refactor")
    scratch.git("commit", "--quiet", "--message=Move")
    (verdict,) = verify(GitRepository(scratch.folder), "HEAD~1", "HEAD")
    assert [each.path for each in verdict.residuals] == ["vendored"]


def test_commits_by_hand_are_listed(scratch: ScratchRepository) -> None:
    scratch.commit("By hand", {"notes.txt": "two\n"})
    move(scratch)
    by_hand, moved = verify(GitRepository(scratch.folder), "HEAD~2", "HEAD")
    assert (by_hand.passed, moved.passed) == (False, True)
    assert next(by_hand.lines()).startswith("BY HAND ")


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({".refactor/other.json": RECIPE_FILE[recipe_path(RECIPE)]}, "its title makes .refactor/make-a-component"),
        ({recipe_path(RECIPE): "{}"}, "is no recipe"),
        ({**RECIPE_FILE, ".refactor/b.json": "{}"}, "are several in one commit"),
        ({recipe_path(RECIPE): RECIPE_FILE[recipe_path(RECIPE)].replace('"end"', '"ends"')}, "does not fit the parent"),
    ],
    ids=["name", "content", "several", "refused"],
)
def test_a_wrong_recipe_is_named(recipe: dict[str, str], problem: str, scratch: ScratchRepository) -> None:
    scratch.commit("Move", {**MOVED, **recipe})
    (verdict,) = verify(GitRepository(scratch.folder), "HEAD~1", "HEAD")
    assert not verdict.passed
    assert problem in verdict.problem


def test_a_merge_is_no_move(scratch: ScratchRepository) -> None:
    scratch.git("checkout", "--quiet", "-b", "other")
    scratch.commit("Other", {"other.txt": ""})
    scratch.git("checkout", "--quiet", "main")
    move(scratch)
    scratch.git("merge", "--quiet", "--no-edit", "other")
    verdicts = verify(GitRepository(scratch.folder), "HEAD~1^", "HEAD")
    assert [each.passed for each in verdicts].count(True) == 1
    assert "a merge" in verdicts[-1].problem
    with pytest.raises(ConfigError, match="adds no commit"):
        verify(GitRepository(scratch.folder), "HEAD", "HEAD~1")
