"""The command ``refactor verify``: prove commits by their recipes.

It reads git objects. It runs nothing of the repository, and checks nothing out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scheduler_refactor.commands.output import print_lines
from scheduler_refactor.git_repository import open_repository


def verify(
    base: Annotated[str, Parameter(help="Commit before the first one to verify.")],
    head: Annotated[str, Parameter(help="Last commit to verify.")] = "HEAD",
    /,
    *,
    repository: Annotated[Path, Parameter(help="Folder of the repository. Default: the current one.")] = Path(),
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
