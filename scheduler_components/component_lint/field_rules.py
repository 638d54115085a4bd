"""Rules about what a component asks for: how many fields, and of which types."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scheduler_components.component_lint.class_facts import ClassFacts, ClassKind, FieldFacts
from scheduler_components.component_lint.finding import Finding, finding
from scheduler_components.component_lint.names import ImportedNames
from scheduler_components.component_lint.rules import LintOptions

__all__ = ["check_fields"]

_CALLABLES = {"typing.Callable", "collections.abc.Callable", "types.FunctionType", "types.MethodType", "callable"}
_ANY = {"typing.Any", "typing_extensions.Any"}


def check_fields(facts: ClassFacts, names: ImportedNames, options: LintOptions) -> Iterator[Finding]:
    """Check the fields of one class; interfaces hold nothing, and values may be as wide as their wire."""
    if facts.kind is ClassKind.INTERFACE:
        return
    if facts.kind is ClassKind.COMPONENT:
        yield from _check_count(facts, options)
        for field in facts.fields:
            if field.annotation is not None and names.dotted(field.annotation) in _ANY:
                yield finding("any-field", field.line, f"field {field.name!r} of {facts.node.name} is typed Any")
    yield from _check_callables(facts, names, options)


def _check_count(facts: ClassFacts, options: LintOptions) -> Iterator[Finding]:
    asked = [field for field in facts.fields if not field.is_own_state]
    if len(asked) > options.max_fields:
        message = f"{facts.node.name} has {len(asked)} fields, more than {options.max_fields}"
        yield finding("too-many-fields", facts.node.lineno, message)


def _check_callables(facts: ClassFacts, names: ImportedNames, options: LintOptions) -> Iterator[Finding]:
    typed: list[FieldFacts] = []
    for field in facts.fields:
        found = _callable_in(field.annotation, names)
        if found is None:
            continue
        if _has_parameter_types(found, names):
            typed.append(field)
        else:
            message = f"field {field.name!r} of {facts.node.name} is a callable with untyped parameters or result"
            yield finding("untyped-callable", field.line, message)
    if len(typed) > options.max_callables:
        listed = ", ".join(field.name for field in typed)
        message = (
            f"{facts.node.name} has {len(typed)} callables as fields ({listed}), more than {options.max_callables}"
        )
        yield finding("many-callables", typed[0].line, message)


def _callable_in(annotation: ast.expr | None, names: ImportedNames) -> ast.expr | None:
    """Return the outermost callable of an annotation: ``Callable | None`` and ``list[Callable]`` hold one too."""
    if annotation is None:
        return None
    if isinstance(annotation, ast.Subscript):
        if names.dotted(annotation.value) in _CALLABLES:
            return annotation
        return _callable_in(annotation.slice, names)
    if names.dotted(annotation) in _CALLABLES:
        return annotation
    parts: list[ast.expr] = []
    if isinstance(annotation, ast.BinOp):
        parts = [annotation.left, annotation.right]
    elif isinstance(annotation, ast.Tuple | ast.List):
        parts = annotation.elts
    return next((found for part in parts if (found := _callable_in(part, names)) is not None), None)


def _has_parameter_types(found: ast.expr, names: ImportedNames) -> bool:
    if not isinstance(found, ast.Subscript) or not isinstance(found.slice, ast.Tuple) or len(found.slice.elts) != 2:
        return False
    parameters, result = found.slice.elts
    if not isinstance(parameters, ast.List):
        return isinstance(parameters, ast.Name)  # a ParamSpec
    return not any(names.dotted(part) in _ANY for part in (*parameters.elts, result))
