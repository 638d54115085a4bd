"""Prove that commits only do what their recipes say.

A commit that adds one recipe below ``.refactor/`` claims: this commit is what the recipe makes of my parent. `verify`
reads the parent's files, applies the recipe, and compares every file of the commit byte by byte. Nothing is checked out
and nothing of the repository runs. What the commit does besides remains as a difference, and so does what it left out.

A commit without a recipe is one by hand, and a reviewer reads it. The same holds for the `Replace` steps of a recipe
and for the refusals that it accepts: no rule proves them, so the verdict lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

import msgspec

from scheduler_components.errors import ComponentError, ConfigError
from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.git_repository import Commit, FileChange, GitRepository
from scheduler_refactor.recipe import RECIPE_FOLDER, Recipe, Replace, read_recipe, recipe_path

_ABSENT, _SUBMODULE = "000000", "160000"
_FILE = "100644"


class Residual(msgspec.Struct, frozen=True):
    """A file that is not what the recipe makes of it.

    Attributes:
        path: from the root of the repository.
        problem: what differs, as a clause.
        diff: from the recipe's text to the commit's; empty for a file that is no text.
    """

    path: str
    problem: str
    diff: str = ""


class CommitVerdict(msgspec.Struct, frozen=True):
    """The result for one commit.

    Attributes:
        commit: its full name.
        subject: first line of its message.
        recipe: path of its recipe; empty for a commit by hand.
        problem: why its recipe cannot be applied; empty if it can.
        residuals: what the recipe does not explain.
        by_hand: files that the recipe changes by quoted text, with the reason.
        accepted: refusals that the author accepts, with the reason.
    """

    commit: str
    subject: str
    recipe: str = ""
    problem: str = ""
    residuals: tuple[Residual, ...] = ()
    by_hand: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the commit is exactly what its recipe says."""
        return bool(self.recipe) and not self.problem and not self.residuals

    def lines(self) -> Iterator[str]:
        """Yield the verdict, what remains, and what a reviewer must read."""
        word = "PASS" if self.passed else "FAIL" if self.recipe else "BY HAND"
        yield f"{word} {self.commit[:12]} {self.subject}"
        if self.problem:
            yield f"  {self.problem}"
        for residual in self.residuals:
            yield f"  {residual.path}: {residual.problem}"
            yield from (f"    {line}" for line in residual.diff.splitlines())
        yield from (f"  read: {line}" for line in (*self.by_hand, *self.accepted))


def verify(repository: GitRepository, base: str, head: str) -> list[CommitVerdict]:
    """Return the verdict on each commit that `head` has and `base` has not, oldest first.

    Raises:
        ConfigError: a revision does not exist, or there is no commit between the two.
    """
    base, head = repository.resolve(base), repository.resolve(head)
    commits = repository.commits(base, head)
    if not commits:
        raise ConfigError("head", head, "adds no commit to the base", "give the base first, then the head")
    return [_verify_commit(repository, commit) for commit in commits]


def find_residuals(
    expected: Mapping[str, tuple[str, bytes]], actual: Mapping[str, tuple[str, bytes]]
) -> tuple[Residual, ...]:
    """Compare files by path, mode and bytes.

    Args:
        expected: path -> mode and content that the recipe makes.
        actual: the same of the commit.
    """
    found = []
    for path in sorted(expected.keys() | actual.keys()):
        wanted, made = expected.get(path), actual.get(path)
        if wanted == made:
            continue
        if made is None:
            problem = "the recipe has this file, the commit does not"
        elif wanted is None:
            problem = "the commit has this file, the recipe does not"
        elif wanted[0] != made[0]:
            problem = f"the commit changes its mode from {wanted[0]} to {made[0]}"
        else:
            problem = "the commit differs from the recipe"
        found.append(Residual(path, problem, _diff(wanted[1] if wanted else b"", made[1] if made else b"")))
    return tuple(found)


def _diff(expected: bytes, actual: bytes) -> str:
    try:
        wanted, made = (content.decode().splitlines(keepends=True) for content in (expected, actual))
    except UnicodeDecodeError:
        return ""
    lines = difflib.unified_diff(wanted, made, "recipe", "commit", n=2)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n" for line in lines)


def _verify_commit(repository: GitRepository, made: Commit) -> CommitVerdict:
    commit, subject = made.name, made.subject
    if len(made.parents) != 1:
        return CommitVerdict(commit, subject, problem="a merge or a first commit, which no recipe makes")
    (parent,) = made.parents
    changes = repository.changes(parent, commit)
    try:
        path, recipe = _recipe_of(repository, changes)
    except ConfigError as error:
        return CommitVerdict(commit, subject, recipe=RECIPE_FOLDER, problem=str(error))
    if recipe is None:
        return CommitVerdict(
            commit, subject, problem=f"adds no recipe below {RECIPE_FOLDER}/ and changes {len(changes)} files"
        )
    before = repository.python_files(parent, recipe.paths)
    try:
        after = apply_recipe(before, recipe)
    except ComponentError as error:
        return CommitVerdict(commit, subject, recipe=path, problem=f"the recipe does not fit the parent: {error}")
    residuals = _compare(repository, [each for each in changes if each.path != path], before, after)
    named = recipe_path(recipe)
    return CommitVerdict(
        commit,
        subject,
        recipe=path,
        problem="" if path == named else f"the recipe is the file {path}, and its title makes {named}",
        residuals=residuals,
        by_hand=tuple(f"{step.file}: {step.why}" for step in recipe.steps if isinstance(step, Replace)),
        accepted=tuple(
            f"accepted {each.rule} of {each.name}: {each.why}"
            for step in recipe.steps
            if not isinstance(step, Replace)
            for each in step.accepted
        ),
    )


def _compare(
    repository: GitRepository, changes: list[FileChange], before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[Residual, ...]:
    """Compare what the recipe and the commit make of each file that one of them changes."""
    sides = [(each.path, *side) for each in changes for side in zip(each.modes, each.blobs, (0, 1), strict=True)]
    contents = repository.blobs(name for _, mode, name, _ in sides if name and mode != _SUBMODULE)
    old, actual = (
        {path: (mode, contents.get(name, name.encode())) for path, mode, name, at in sides if at == side and name}
        for side in (0, 1)
    )
    expected = dict(old)
    for path in before.keys() | after.keys():
        if before.get(path) == after.get(path):
            continue
        if path not in after:
            expected.pop(path, None)
            if path not in old:  # the recipe deletes it, and the commit leaves it
                actual[path] = (_FILE, before[path].encode())
            continue
        expected[path] = (old[path][0] if path in old else _FILE, after[path].encode())
        if path not in old and path not in actual and path in before:  # the commit leaves it as it was
            actual[path] = (_FILE, before[path].encode())
    return find_residuals(expected, actual)


def _recipe_of(repository: GitRepository, changes: list[FileChange]) -> tuple[str, Recipe | None]:
    """Return the recipe that a commit adds, with its path.

    Raises:
        ConfigError: it adds several, or one that cannot be read.
    """
    added = [each for each in changes if each.path.startswith(f"{RECIPE_FOLDER}/") and each.modes[0] == _ABSENT]
    if not added:
        return "", None
    if len(added) > 1:
        names = ", ".join(each.path for each in added)
        raise ConfigError(
            "recipe", names, "are several in one commit", "keep one commit per recipe: do not squash them"
        )
    (content,) = repository.blobs([added[0].blobs[1]]).values()
    return added[0].path, read_recipe(content)
