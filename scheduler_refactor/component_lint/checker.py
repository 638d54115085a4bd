"""The flake8 plugin: a class with one object per file, and its options."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

import attrs

from scheduler_components._version import __version__
from scheduler_refactor.component_lint.rules import RULES, Limits, find_problems


class OptionParser(Protocol):
    """The method of flake8's ``OptionManager`` that the checker uses. flake8 has no type information."""

    def add_option(
        self, long_option_name: str, *, type: Callable[[str], int], default: object, parse_from_config: bool, help: str
    ) -> None:
        """Declare an option of the command line and of flake8's configuration file."""


class ComponentChecker:
    """Apply the rules to one parsed file. It reads, imports and runs nothing.

    flake8 loads this class from its entry point, and applies selection, ``# noqa`` and per-file ignores to the results
    of ``run``.

    Args:
        tree: the parsed file.
        filename: its path. Files named ``cli``, ``config`` and ``__main__`` may read the environment.
    """

    name = "scheduler-components"
    version = __version__

    limits: ClassVar[Limits] = Limits()
    """An attribute of the class, because flake8 passes the options to the class once per run."""

    def __init__(self, tree: ast.Module, filename: str = "<source>") -> None:
        self._tree = tree
        self._filename = filename

    @staticmethod
    def add_options(parser: OptionParser) -> None:
        """Declare one option for each limit, such as ``--sch-max-fields``, with the default of the limit."""
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
        """Set the limits from flake8's options."""
        given = vars(options)
        cls.limits = Limits(**{limit.name: given[f"sch_{limit.name}"] for limit in attrs.fields(Limits)})

    def run(self) -> Iterator[tuple[int, int, str, type[ComponentChecker]]]:
        """Yield the line (from 1), the column (from 0), the text (code first) and this class for each problem."""
        for problem in find_problems(self._tree, self._filename, self.limits):
            text = f"{problem.code} {problem.message}; {RULES[problem.code].hint}"
            yield problem.line, problem.column, text, type(self)


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit; use an integer of at least 0")
    return int(text)
