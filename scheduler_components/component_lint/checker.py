"""The plugin as flake8 knows it: a class that is made once per file, and options."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

import attrs

from scheduler_components._version import __version__
from scheduler_components.component_lint.rules import RULES, Limits, find_problems

__all__ = ["ComponentChecker", "OptionParser"]


class OptionParser(Protocol):
    """What the checker asks of flake8's ``OptionManager``, which has no type information."""

    def add_option(
        self, long_option_name: str, *, type: Callable[[str], int], default: object, parse_from_config: bool, help: str
    ) -> None:
        """Declare an option of the command line and of flake8's configuration file."""


class ComponentChecker:
    """The rules over one file. Pure: nothing is read, imported or run.

    flake8 finds this class by its entry point, walks files, and applies selection, ``# noqa`` and per-file ignores to
    what ``run`` yields.

    Args:
        tree: the parsed file.
        filename: where it stands; files named ``cli``, ``config`` and ``__main__`` may read the environment.
    """

    name = "scheduler-components"
    version = __version__

    limits: ClassVar[Limits] = Limits()
    """On the class and not in the object, because flake8 hands options to the class, once per run."""

    def __init__(self, tree: ast.Module, filename: str = "<source>") -> None:
        self._tree = tree
        self._filename = filename

    @staticmethod
    def add_options(parser: OptionParser) -> None:
        """Declare one option per limit, ``--sch-max-fields`` and so on, with the limit's own default."""
        for limit in attrs.fields(Limits):
            parser.add_option(
                f"--sch-{limit.name.replace('_', '-')}",
                type=_limit,
                default=limit.default,
                parse_from_config=True,
                help=f"{limit.metadata['help']} (Default: {limit.default})",
            )

    @classmethod
    def parse_options(cls, options: argparse.Namespace) -> None:
        """Take the limits from flake8's options."""
        given = vars(options)
        cls.limits = Limits(**{limit.name: given[f"sch_{limit.name}"] for limit in attrs.fields(Limits)})

    def run(self) -> Iterator[tuple[int, int, str, type[ComponentChecker]]]:
        """Yield line (from 1), column (from 0), text (the code first) and this class for each problem."""
        for problem in find_problems(self._tree, self._filename, self.limits):
            text = f"{problem.code} {problem.message}; {RULES[problem.code].hint}"
            yield problem.line, problem.column, text, type(self)


def _limit(text: str) -> int:
    """Return the number; argparse tells the person what is wrong with any other text."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit; give an integer of at least 0")
    return int(text)
