"""What a name in a file stands for, as far as its import statements tell."""

from __future__ import annotations

import ast
import sys

__all__ = ["ImportedNames", "last_name", "unquoted"]


class ImportedNames:
    """The imports of one file, wherever in it they stand.

    Args:
        tree: the parsed file.
    """

    __slots__ = ("_origins",)

    def __init__(self, tree: ast.Module) -> None:
        self._origins: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self._origins[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for alias in node.names:
                    self._origins[alias.asname or alias.name] = f"{module}.{alias.name}"

    def dotted(self, node: ast.expr) -> str:
        """Return the full dotted name of ``a.b.c``, resolved through the imports; empty for any other expression."""
        if isinstance(node, ast.Name):
            return self._origins.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def is_imported(self, name: str) -> bool:
        """True when an import statement binds ``name``."""
        return name in self._origins

    def is_standard(self, node: ast.expr) -> bool:
        """True when the expression names something of the standard library."""
        return self.dotted(node).partition(".")[0] in sys.stdlib_module_names


def last_name(node: ast.expr) -> str:
    """Return the last identifier of ``a.b.c`` or ``a.b.c[...]``; empty for any other expression."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def unquoted(annotation: ast.expr) -> ast.expr:
    """Return what an annotation in quotes says; any other annotation as it is."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return ast.parse(annotation.value.strip(), mode="eval").body
        except SyntaxError:
            return annotation
    return annotation
