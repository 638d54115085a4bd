"""The commands ``refactor verify`` and ``refactor carry``: prove commits by their recipes, and repeat them on a branch.

They read and write git objects. They run nothing of the repository, and check nothing out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scheduler_refactor.commands.output import print_lines
from scheduler_refactor.git_repository import open_repository

__all__ = ["carry", "verify"]

Repository = Annotated[Path, Parameter(help="Folder of the repository. Default: the current one.")]


def verify(
    base: Annotated[str, Parameter(help="Commit before the first one to verify.")],
    head: Annotated[str, Parameter(help="Last commit to verify.")] = "HEAD",
    /,
    *,
    repository: Repository = Path(),
    allow_by_hand: Annotated[
        bool, Parameter(show_default=False, help="Do not fail for commits without a recipe. They are listed.")
    ] = False,
) -> int:
    """Prove that each commit is what its recipe makes of its parent, byte for byte.

    The exit code is 1 if something remains.
    """
    from scheduler_refactor import verify as commits  # needs libcst

    verdicts = commits.verify(open_repository(repository), base, head)
    for verdict in verdicts:
        print_lines(verdict.lines())
    passed = [verdict.passed or (allow_by_hand and not verdict.recipe) for verdict in verdicts]
    print_lines(
        (f"{sum(verdict.passed for verdict in verdicts)} of {len(verdicts)} commits are what their recipes say",)
    )
    return int(not all(passed))


def carry(
    move: Annotated[str, Parameter(help="Commit with a recipe.")],
    branch: Annotated[str, Parameter(help="Branch that began before it. It stays as it is.")],
    new_branch: Annotated[str, Parameter(help="Name of the branch to make on top of the commit.")],
    /,
    *,
    repository: Repository = Path(),
) -> int:
    """Carry the commits of a branch over a commit with a recipe: move the branch's methods too, and keep its edits.

    The exit code is 1 if the recipe does not fit the branch, or if two edits conflict.
    """
    from scheduler_refactor import verify as commits

    opened = open_repository(repository)
    carried = commits.carry(opened, move, branch)
    opened.set_branch(new_branch, carried[-1])
    print_lines((f"{new_branch}: {len(carried)} commits on {opened.resolve(move)[:12]}",))
    return 0
