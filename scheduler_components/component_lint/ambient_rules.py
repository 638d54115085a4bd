"""The rule against ambient context: what code takes from its surroundings instead of being given it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scheduler_components.component_lint.class_facts import Function, parameters_of
from scheduler_components.component_lint.finding import Finding, finding
from scheduler_components.component_lint.names import ImportedNames

__all__ = ["check_ambient_context"]

_ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.getenvb"}
_SINGLETON_GETTERS = {"instance", "get_instance"}
_SINGLETON_FIELDS = {"_instance", "instance", "_singleton"}
_ENVIRONMENT_READERS = {"cli", "__main__", "config"}
"""Files (without .py) whose business it is to read the environment, and pass on what it says."""


def check_ambient_context(tree: ast.Module, names: ImportedNames, file_stem: str) -> Iterator[Finding]:
    """Check a whole file, its functions and its module level."""
    visitor = _AmbientVisitor(tree, names, reads_environment=file_stem in _ENVIRONMENT_READERS)
    visitor.visit(tree)
    yield from visitor.found


class _AmbientVisitor(ast.NodeVisitor):
    """Walks a file and knows, at each call, which names are local there and whether it stands in a class."""

    def __init__(self, tree: ast.Module, names: ImportedNames, *, reads_environment: bool) -> None:
        self.found: list[Finding] = []
        self._names = names
        self._reads_environment = reads_environment
        self._own_getters = _getters_of_globals(tree)
        self._locals: list[set[str]] = []
        self._class_depth = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._class_depth += 1
        self.generic_visit(node)
        self._class_depth -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_Global(self, node: ast.Global) -> None:
        self._report(node, f"the module's {', '.join(node.names)} is rebound from a function: a singleton")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_environment(node):
            self._report(node, "the environment is read")
        elif node.attr in _SINGLETON_FIELDS and isinstance(node.ctx, ast.Store) and _is_class_reference(node.value):
            self._report(node, f"the class keeps its only object in {ast.unparse(node)}")
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if self._is_environment(node):
            self._report(node, "the environment is read")

    def visit_Call(self, node: ast.Call) -> None:
        if not node.args and not node.keywords:
            self._check_getter(node)
        self.generic_visit(node)

    def _visit_function(self, node: Function) -> None:
        self._locals.append(_names_bound_in(node))
        self.generic_visit(node)
        self._locals.pop()

    def _check_getter(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            is_getter = function.id.startswith("get_") and not any(function.id in bound for bound in self._locals)
            is_foreign = self._names.is_imported(function.id) and not self._names.is_standard(function)
            if is_getter and (is_foreign or function.id in self._own_getters):
                self._report(node, f"{function.id}() takes a value from the surroundings")
        elif isinstance(function, ast.Attribute) and self._class_depth:
            owner = function.value
            if not isinstance(owner, ast.Name | ast.Attribute) or self._names.is_standard(owner):
                return
            if self._is_module(owner) and function.attr.startswith("get_"):
                self._report(node, f"{ast.unparse(function)}() takes a value from the surroundings")
            elif function.attr in _SINGLETON_GETTERS and self._names.dotted(owner).split(".")[-1][:1].isupper():
                self._report(node, f"{ast.unparse(function)}() is a singleton")

    def _is_module(self, owner: ast.expr) -> bool:
        """A lower-case name that an import binds; ``self.cache`` and local names are not imported."""
        root = owner
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or not self._names.is_imported(root.id):
            return False
        return self._names.dotted(owner).split(".")[-1].islower()

    def _is_environment(self, node: ast.expr) -> bool:
        return not self._reads_environment and self._names.dotted(node) in _ENVIRONMENT

    def _report(self, node: ast.stmt | ast.expr, message: str) -> None:
        self.found.append(finding("ambient-context", node.lineno, message))


def _getters_of_globals(tree: ast.Module) -> set[str]:
    """Functions of this file that return what a ``global`` statement of it rebinds."""
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return {
        function.name
        for function in tree.body
        if isinstance(function, Function)
        and any(isinstance(part, ast.Name) and part.id in rebound for part in ast.walk(function))
    }


def _names_bound_in(function: Function) -> set[str]:
    stored = (part.id for part in ast.walk(function) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    return {parameter.arg for parameter in parameters_of(function)}.union(stored)


def _is_class_reference(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and (node.id == "cls" or node.id[:1].isupper())
