"""Find calls of ``get_...()`` that return ambient context, by the uses of their results."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import UnionType

from scheduler_refactor.component_lint.class_info import (
    Function,
    ImportedNames,
    last_name,
    names_bound_in,
    parameters_of,
    root_name,
)

_SINGLETON_GETTERS = {"instance", "get_instance"}
_GLOBAL_GETTER = re.compile(r"get_(global_\w+|(\w+_)?(singleton|instance))")
_OF_TEXT = frozenset(dir(str))


class AmbientGetters:
    """The calls of ``get_...()`` in one file, with the uses of their results.

    A name alone is no proof: ``get_traceback()`` creates a new text at each call. A call is ambient in one of these
    cases:

    - this file defines the getter, and the getter reads a name that a ``global`` statement of this file rebinds;
    - the getter has a telling name (``get_global_x``, ``get_x_instance``, ``X.instance``);
    - this file uses a part of a result (an attribute, an item, a call) or branches on one (a test, a comparison). Text
      methods, slices and ``in`` do not count, because they are uses of text.

    The last two cases apply only to getters that are imported from outside the standard library, and only to calls
    without arguments: with arguments, the code names the dependencies of the result.
    """

    def __init__(self, tree: ast.Module, names: ImportedNames) -> None:
        self._tree = tree
        self._names = names
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._own = _getters_of_globals(tree)

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield each ambient call with its message."""
        uncertain: dict[str, list[ast.Call]] = {}
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Call) or node.args or node.keywords:
                continue
            name = last_name(node.func)
            if isinstance(node.func, ast.Name) and name in self._own and not self._is_local(name, node):
                yield node, _message(node)
            elif self._is_singleton_of_class(node.func) and self._is_in_class(node):
                yield node, f"{ast.unparse(node.func)}() is a singleton"
            elif name.startswith("get_") and self._is_foreign(node):
                uncertain.setdefault(self._names.dotted(node.func), []).append(node)
        for calls in uncertain.values():
            if _GLOBAL_GETTER.fullmatch(last_name(calls[0].func)) or any(map(self._is_used, calls)):
                for call in calls:
                    yield call, _message(call)

    def _is_foreign(self, call: ast.Call) -> bool:
        """Whether the call uses an imported name or, within a class, a function of an imported module."""
        function = call.func
        if self._names.is_standard(function):
            return False
        root = root_name(function)
        if not self._names.is_imported(root) or self._is_local(root, call):
            return False
        if isinstance(function, ast.Name):
            return True
        owner = self._names.dotted(function.value) if isinstance(function, ast.Attribute) else ""
        return owner.split(".")[-1].islower() and self._is_in_class(call)

    def _is_singleton_of_class(self, function: ast.expr) -> bool:
        if not isinstance(function, ast.Attribute) or function.attr not in _SINGLETON_GETTERS:
            return False
        owner = self._names.dotted(function.value)
        return owner.split(".")[-1][:1].isupper() and not self._names.is_standard(function.value)

    def _is_used(self, node: ast.expr) -> bool:
        """Whether the code uses a part of this value or branches on it, directly or through a name."""
        parent = self._parents[node]
        if isinstance(parent, ast.Await):
            return self._is_used(parent)
        if isinstance(parent, ast.NamedExpr) and self._is_part_used(parent):
            return True
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr) and parent.value is node:
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return any(self._is_part_used(use) for target in targets for use in self._uses_of(target))
        return self._is_part_used(node)

    def _is_part_used(self, node: ast.expr) -> bool:
        match self._parents[node]:
            case ast.Attribute(attr=attribute):
                return attribute not in _OF_TEXT
            case ast.Call(func=function):
                return function is node
            case ast.Subscript(value=value, slice=index):
                return value is node and not isinstance(index, ast.Slice)
            case ast.Compare(ops=operators):
                return not any(isinstance(operator, ast.In | ast.NotIn) for operator in operators)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                return test is node
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.Match():
                return True
        return False

    def _uses_of(self, target: ast.expr) -> Iterator[ast.expr]:
        """Yield the reads of a local name in its function, of a global name in the file, of a field in its class."""
        is_field = isinstance(target, ast.Attribute) and root_name(target) == "self"
        scope = self._enclosing(target, ast.ClassDef if is_field else Function) or self._tree
        wanted = ast.dump(target).replace("ctx=Store()", "ctx=Load()")
        for node in ast.walk(scope):
            if type(node) is type(target) and ast.dump(node) == wanted:
                yield node

    def _is_local(self, name: str, node: ast.AST) -> bool:
        """Whether a function around the node binds the name, as a parameter or by an assignment."""
        function = self._enclosing(node, Function)
        while function is not None:
            assert isinstance(function, Function)
            if name in names_bound_in(function) or name in {each.arg for each in parameters_of(function)}:
                return True
            function = self._enclosing(function, Function)
        return False

    def _is_in_class(self, node: ast.AST) -> bool:
        return self._enclosing(node, ast.ClassDef) is not None

    def _enclosing(self, node: ast.AST, kinds: type[ast.ClassDef] | UnionType) -> ast.AST | None:
        around = self._parents.get(node)
        while around is not None and not isinstance(around, kinds):
            around = self._parents.get(around)
        return around


def _getters_of_globals(tree: ast.Module) -> set[str]:
    """Return the functions named ``get_...`` that read a name rebound by a ``global`` statement of this file."""
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return {
        function.name
        for function in tree.body
        if isinstance(function, Function)
        and function.name.startswith("get_")
        and any(isinstance(part, ast.Name) and part.id in rebound for part in ast.walk(function))
    }


def _message(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}() returns ambient context"
