"""Check that a method means the same in another class or file: its names, defaults, decorators and annotations."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from scheduler_refactor.refusals import Refusals
from scheduler_refactor.source_index import ClassSource, FunctionSource, ModuleSource

_PLAIN_DECORATORS = frozenset({"property", "staticmethod"})
_OF_MODULE = frozenset({"__name__", "__file__", "__package__", "__doc__", "__spec__"})


def check_body(method: FunctionSource, source: ClassSource, refusals: Refusals) -> None:
    """Refuse what would mean something else in any other class."""
    node, path = method.node, method.path
    for text_of, decorator in zip(method.decorators, node.decorator_list, strict=True):
        plain = text_of in _PLAIN_DECORATORS or text_of.endswith((".setter", ".getter", ".deleter"))
        if not plain:
            message = f"the decorator {text_of} gets another object as `self`; check that it ignores it"
            refusals.add(path, decorator.lineno, "decorator", text_of, message)
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and child.id == "__class__":
            refusals.add(path, child.lineno, "super", "__class__", f"{method.name} names its own class")
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "super":
            refusals.add(path, child.lineno, "super", method.name, f"{method.name} calls super()")
        name = child.attr if isinstance(child, ast.Attribute) else child.id if isinstance(child, ast.Name) else ""
        if name.startswith("__") and not name.endswith("__"):
            line = getattr(child, "lineno", node.lineno)
            refusals.add(path, line, "private-name", name, f"{name} means another name in another class")
        if isinstance(child, ast.Global):
            for written in child.names:
                refusals.add(path, child.lineno, "global-write", written, f"{method.name} binds the global {written}")
    _check_defaults(method, source, refusals)


def _check_defaults(method: FunctionSource, source: ClassSource, refusals: Refusals) -> None:
    """Defaults and decorators are evaluated once, in the scope of the class."""
    of_class = {*source.attributes, *source.methods}
    for default in _defaults(method):
        for child in ast.walk(default):
            if isinstance(child, ast.Call | ast.Await | ast.NamedExpr):
                message = f"a default of {method.name} is computed when the class is made, so it would be elsewhere"
                refusals.add(method.path, default.lineno, "default", method.name, message)
            elif isinstance(child, ast.Name) and child.id in of_class:
                message = f"a default of {method.name} is the name {child.id} of the class {source.name}"
                refusals.add(method.path, default.lineno, "default", child.id, message)
    for decorator in method.node.decorator_list:
        for child in ast.walk(decorator):
            if isinstance(child, ast.Name) and child.id in source.attributes:
                message = f"a decorator of {method.name} is the name {child.id} of the class {source.name}"
                refusals.add(method.path, decorator.lineno, "class-scope", child.id, message)


def _defaults(method: FunctionSource) -> list[ast.expr]:
    arguments = method.node.args
    return [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]


def check_evaluated_early(
    method: FunctionSource, source: ModuleSource, target: ModuleSource, component: ast.ClassDef, refusals: Refusals
) -> None:
    """Refuse a default or decorator with a global that is bound twice, or below the class that gets the method."""
    bound = module_bindings(source.tree)
    for expression in (*_defaults(method), *method.node.decorator_list):
        for child in ast.walk(expression):
            if not isinstance(child, ast.Name) or child.id not in bound:
                continue
            lines = bound[child.id]
            if len(lines) > 1 or (source is target and lines[0] > component.lineno):
                message = f"{child.id} is bound at line {lines[-1]}, so it may differ where the target class is made"
                refusals.add(method.path, expression.lineno, "default", child.id, message)


def global_names(text: str, path: str, method: FunctionSource) -> set[str]:
    """Return the global names that a method's body, defaults and decorators use."""
    found: set[str] = set()
    for table in _tables(symtable.symtable(text, path, "exec")):
        if table.get_type() != "function" or table.get_name() != method.name:
            continue
        first = min([method.node.lineno, *(each.lineno for each in method.node.decorator_list)])
        if first <= table.get_lineno() <= method.node.lineno:
            for inner in _tables(table):
                found |= {symbol.get_name() for symbol in inner.get_symbols() if symbol.is_global()}
    for expression in (*_defaults(method), *method.node.decorator_list):
        found |= {child.id for child in ast.walk(expression) if isinstance(child, ast.Name)}
    return found


def annotation_names(method: FunctionSource) -> set[str]:
    """Return the names that the annotations of a method use, without that of ``self``."""
    parameters = method.parameters
    parameters += [each for each in (method.node.args.vararg, method.node.args.kwarg) if each is not None]
    annotations = [each.annotation for each in parameters if each.annotation is not None and each.arg != "self"]
    if method.node.returns is not None:
        annotations.append(method.node.returns)
    annotations += [child.annotation for child in ast.walk(method.node) if isinstance(child, ast.AnnAssign)]
    return {name for annotation in annotations for name in _names_of(annotation)}


def module_bindings(tree: ast.Module) -> dict[str, list[int]]:
    """Return the lines at which each global name is bound, without imports."""
    found: dict[str, list[int]] = {}
    for statement in _statements(tree.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.setdefault(statement.name, []).append(statement.lineno)
            continue
        for child in ast.walk(statement):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                found.setdefault(child.id, []).append(child.lineno)
    return found


def has_future_annotations(tree: ast.Module) -> bool:
    """Whether annotations of a file are not evaluated."""
    return any(
        isinstance(each, ast.ImportFrom)
        and each.module == "__future__"
        and any(alias.name == "annotations" for alias in each.names)
        for each in tree.body
    )


def import_statements(tree: ast.Module) -> dict[str, tuple[str, bool]]:
    """Return, for each name that the top level imports, a statement that binds it, and whether it is for types only."""
    found: dict[str, tuple[str, bool]] = {}
    for statement, is_type in _imports(tree.body, is_type=False):
        for alias in statement.names:
            named = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            if isinstance(statement, ast.ImportFrom):
                source = "." * statement.level + (statement.module or "")
                found[alias.asname or alias.name] = (f"from {source} import {named}", is_type)
            else:
                found[alias.asname or alias.name.partition(".")[0]] = (f"import {named}", is_type)
    return found


def is_builtin(name: str) -> bool:
    """Whether Python itself defines a name."""
    return hasattr(builtins, name)


def _imports(body: list[ast.stmt], *, is_type: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement, is_type
        elif isinstance(statement, ast.If):
            types = ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            yield from _imports(statement.body, is_type=is_type or types)
            yield from _imports(statement.orelse, is_type=is_type)
        elif isinstance(statement, ast.Try):
            yield from _imports([*statement.body, *statement.orelse], is_type=is_type)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.stmt):
                    yield from _statements([part])
                elif isinstance(part, ast.ExceptHandler):
                    yield from _statements(part.body)
                elif isinstance(part, ast.expr):
                    yield ast.copy_location(ast.Expr(value=part), statement)
        else:
            yield statement


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _names_of(annotation: ast.expr) -> Iterator[str]:
    for child in ast.walk(annotation):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            try:
                yield from _names_of(ast.parse(child.value, mode="eval").body)
            except SyntaxError:
                continue


def check_names(
    needed: Mapping[str, bool], source: ModuleSource, target: ModuleSource, line: int, refusals: Refusals
) -> tuple[list[str], list[str]]:
    """Return the imports that the target file needs for names of moved bodies, for run time and for types.

    Args:
        needed: the names, and whether annotations alone use them.
        source: the file that the bodies leave.
        target: the file that gets them.
        line: the line to name in a refusal.
        refusals: gets names that the target cannot have.
    """
    imported, present = import_statements(source.tree), import_statements(target.tree)
    own, taken = module_bindings(source.tree), module_bindings(target.tree)
    same_folder = PurePosixPath(source.path).parent == PurePosixPath(target.path).parent
    run_time: list[str] = []
    types: list[str] = []
    for name, only_type in sorted(needed.items()):
        if name in _OF_MODULE:
            refusals.add(source.path, line, "module-name", name, f"{name} differs in {target.path}")
        elif name in own:
            if present.get(name, ("", False))[0].rpartition(" import ")[2] != name:
                message = f"a moved body uses the global {name} of this file, which {target.path} does not import"
                refusals.add(source.path, own[name][0], "captured-name", name, message)
        elif name in imported:
            statement, is_type = imported[name]
            if statement.startswith("from .") and not same_folder:
                message = f"{name} is imported by a relative path, which differs in {target.path}"
                refusals.add(source.path, line, "relative-import", name, message)
            elif name in taken or (name in present and present[name][0] != statement):
                message = f"{target.path} has another {name} than the moved body means"
                refusals.add(source.path, line, "name-clash", name, message)
            elif name not in present or (present[name][1] and not is_type and not only_type):
                (types if is_type else run_time).append(statement)
        elif name in taken or name in present:
            message = f"{target.path} defines {name}, which means something else in this file"
            refusals.add(source.path, line, "name-clash", name, message)
        elif not is_builtin(name) and not only_type:
            refusals.add(source.path, line, "captured-name", name, f"where {name} comes from is unknown")
    return run_time, types
