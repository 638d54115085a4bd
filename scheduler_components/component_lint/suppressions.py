"""Comments that accept a finding, with the reason: ``# component-lint: ignore[rule] reason``."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable

import msgspec

from scheduler_components.component_lint.class_facts import Function
from scheduler_components.component_lint.finding import Finding, finding
from scheduler_components.component_lint.rules import RULES

__all__ = ["Suppression", "apply_suppressions", "read_suppressions"]

_COMMENT = re.compile(r"#\s*component-lint:\s*(?P<verb>[\w-]*)\s*(\[(?P<rules>[^\]]*)\])?\s*(?P<reason>.*)")
_CANNOT_SUPPRESS = {"bad-suppression", "unused-suppression", "not-python"}


class Suppression(msgspec.Struct, frozen=True):
    """One comment, and the lines that it covers.

    Attributes:
        line: where the comment stands.
        rules: the ids that it accepts.
        reason: never empty in a good one.
        first_line, last_line: its own line; the line below when it stands alone; the whole definition when it
            stands on, or alone above, the line of a ``class`` or ``def`` or of a decorator of it.
    """

    line: int
    rules: tuple[str, ...]
    reason: str
    first_line: int
    last_line: int

    @property
    def problem(self) -> str:
        """What is wrong with the comment itself; empty for a good one."""
        unknown = [rule for rule in self.rules if rule not in RULES or rule in _CANNOT_SUPPRESS]
        if not self.rules:
            return "the comment names no rule"
        if unknown:
            return f"there is no rule {unknown[0]!r} to ignore"
        return "" if self.reason else "the comment gives no reason"

    def covers(self, each: Finding) -> bool:
        """True for a finding of one of its rules on one of its lines."""
        return each.rule in self.rules and self.first_line <= each.line <= self.last_line


def read_suppressions(source: str, tree: ast.Module) -> list[Suppression]:
    """Return the suppressions of a file, good and bad, by line."""
    definitions: dict[int, Function | ast.ClassDef] = {}
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            definitions.update(dict.fromkeys([node.lineno, *(each.lineno for each in node.decorator_list)], node))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
        if match is None:
            continue
        line = token.start[0]
        stands_alone = not token.line[: token.start[1]].strip()
        first = last = line + 1 if stands_alone else line
        definition = definitions.get(first)
        if definition is not None:
            last = definition.end_lineno or first
        named = (match["rules"] or "") if match["verb"] == "ignore" else ""
        rules = tuple(rule.strip() for rule in named.split(",") if rule.strip())
        found.append(Suppression(line, rules, match["reason"].strip(), first, last))
    return found


def apply_suppressions(findings: Iterable[Finding], suppressions: Iterable[Suppression]) -> tuple[list[Finding], int]:
    """Return the findings that stay, those about the suppressions among them, and how many were taken out."""
    good: dict[Suppression, bool] = {}
    kept: list[Finding] = []
    for suppression in suppressions:
        if suppression.problem:
            kept.append(finding("bad-suppression", suppression.line, suppression.problem))
        else:
            good[suppression] = False
    num_suppressed = 0
    for each in findings:
        covering = [suppression for suppression in good if suppression.covers(each)]
        if covering:
            num_suppressed += 1
            good.update(dict.fromkeys(covering, True))
        else:
            kept.append(each)
    for suppression, is_used in good.items():
        if not is_used:
            listed = ", ".join(suppression.rules)
            kept.append(finding("unused-suppression", suppression.line, f"nothing here breaks {listed}"))
    return kept, num_suppressed
