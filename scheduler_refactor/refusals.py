"""Refusals: the places at which a step would change the meaning of the code, without those that the recipe accepts."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.errors import ComponentError
from scheduler_refactor.recipe import Accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One place at which a step of a refactor would change the meaning of the code.

    Args:
        path: the file.
        line: the line, from 1.
        rule: the reason as one word, which a recipe may accept.
        name: the name that it is about.
        message: the reason as a sentence.
    """

    path: str
    line: int
    rule: str
    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message} [{self.rule} {self.name}]"


class RefusedError(ComponentError):
    """A refactor was refused, and nothing is changed. The recipe or the code is to blame.

    Args:
        refusals: every reason, by path and line.
    """

    def __init__(self, refusals: tuple[Refusal, ...]) -> None:
        self.refusals = refusals
        super().__init__("\n".join(map(str, refusals)))


@dataclass(slots=True)
class Refusals:
    """The refusals of one step."""

    accepted: tuple[Accepted, ...]
    _found: dict[tuple[str, int, str, str], Refusal] = field(default_factory=dict)

    def add(self, path: str, line: int, rule: str, name: str, message: str) -> None:
        """Add a refusal, unless the recipe accepts it. Two of one rule and name on a line are one."""
        if not self.accepts(rule, name, path):
            refusal = Refusal(path=path, line=line, rule=rule, name=name, message=message)
            self._found.setdefault((path, line, rule, name), refusal)

    def accepts(self, rule: str, name: str, path: str) -> bool:
        """Whether the recipe accepts a refusal."""
        return any(each.rule == rule and each.name in (name, "*") and each.path in ("", path) for each in self.accepted)

    def check(self) -> None:
        """Raise if there is a refusal.

        Raises:
            RefusedError: with all of them, by path and line.
        """
        if self._found:
            raise RefusedError(tuple(refusal for _, refusal in sorted(self._found.items())))
