"""The rule against branches on whether a feature is on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scheduler_components.component_lint.finding import Finding, finding

__all__ = ["check_enabled_gates"]

_GATE = re.compile(r"_?(is_)?(enabled?|disabled?)(_\w+)?|_?\w+_(enabled|disabled)")


def check_enabled_gates(tree: ast.Module) -> Iterator[Finding]:
    """Find ``if``, ``while`` and conditional expressions that ask an object's own fields whether something is on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Attribute) and _is_of_self(part) and _GATE.fullmatch(part.attr):
                    yield finding("enabled-gate", part.lineno, f"a branch on {ast.unparse(part)}")


def _is_of_self(node: ast.Attribute) -> bool:
    root = node.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id == "self"
