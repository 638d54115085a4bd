"""Collect refusals, without those that the recipe's author has accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.errors import Refusal, RefusedError
from scheduler_refactor.recipe import Accepted

__all__ = ["Refusals"]


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
