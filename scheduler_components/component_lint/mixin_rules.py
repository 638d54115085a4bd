"""Rules about who knows whom: mixins, and components that hold the whole scheduler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from scheduler_components.component_lint.class_facts import (
    ClassFacts,
    ClassKind,
    FieldFacts,
    Function,
    methods_of,
    parameters_of,
)
from scheduler_components.component_lint.finding import Finding, finding
from scheduler_components.component_lint.names import last_name, unquoted

__all__ = ["check_mixin", "check_whole_scheduler"]

_MIXIN = re.compile(r"\w*Mixin\d*")
_WHOLE_TYPE = re.compile(r"\w*Scheduler")
_WHOLE_FIELDS = ("scheduler", "_scheduler")


def check_mixin(facts: ClassFacts) -> Iterator[Finding]:
    """Find mixins by their names, by the classes made of them, and by a borrowed ``self``."""
    node = facts.node
    mixins = [name for name in map(last_name, node.bases) if _MIXIN.fullmatch(name)]
    if _MIXIN.fullmatch(node.name):
        yield finding("mixin", node.lineno, f"{node.name} is a mixin: it reads and writes the fields of its host")
        return
    if mixins:
        yield finding("mixin", node.lineno, f"{node.name} is made of mixins ({', '.join(mixins)})")
    borrowed = [method for method in methods_of(node) if _host_of(method) not in {"", "Self", node.name}]
    if borrowed:
        message = f"self is annotated as {_host_of(borrowed[0])} in {len(borrowed)} methods of {node.name}"
        yield finding("mixin", borrowed[0].lineno, message)


def _host_of(method: Function) -> str:
    """Return the class that ``self`` is annotated as; empty for none, and for what reads as a type variable (SelfT)."""
    for parameter in parameters_of(method)[:1]:
        if parameter.arg == "self" and parameter.annotation is not None:
            annotation = unquoted(parameter.annotation)
            name = last_name(annotation)
            return name if len(name) > 1 and not name.endswith(("T", "_co", "_contra")) else ""
    return ""


def check_whole_scheduler(facts: ClassFacts) -> Iterator[Finding]:
    """Find a scheduler among the fields and method parameters of a class; a record that lists one does nothing."""
    if facts.kind in (ClassKind.RECORD, ClassKind.INTERFACE):
        return
    node = facts.node
    uses = _uses(node)
    found = [field for field in facts.fields if _is_whole(field.name, field.annotation)]
    for field in found:
        yield finding("whole-scheduler", field.line, _held(node.name, field, uses))
    told = {field.name for field in facts.fields if field in found or field.annotation is not None}
    for method in methods_of(node):
        if method.name == "__init__" and found:
            continue  # told with the field
        for parameter in parameters_of(method):
            if parameter.arg not in {"self", "cls"} and _is_whole(parameter.arg, parameter.annotation):
                message = f"{node.name}.{method.name} takes the whole scheduler as {parameter.arg!r}"
                yield finding("whole-scheduler", parameter.lineno, message)
    others = [use for use in uses if use.attr not in told]
    if others:
        first = min(others, key=lambda use: use.lineno)
        message = f"{node.name} uses self.{first.attr} {len(others)} times"
        yield finding("whole-scheduler", first.lineno, message)


def _held(class_name: str, field: FieldFacts, uses: list[ast.Attribute]) -> str:
    message = f"field {field.name!r} of {class_name} holds the whole scheduler"
    count = sum(use.attr == field.name for use in uses)
    return f"{message}; {count} uses of it" if count else message


def _is_whole(name: str, annotation: ast.expr | None) -> bool:
    if annotation is None:
        return name in _WHOLE_FIELDS
    parts = (unquoted(part) for part in ast.walk(annotation) if isinstance(part, ast.expr))
    return any(_WHOLE_TYPE.fullmatch(last_name(part)) for part in parts if not isinstance(part, ast.Subscript))


def _uses(node: ast.ClassDef) -> list[ast.Attribute]:
    """Return every ``self.scheduler`` of which something is read: ``self.scheduler.x``."""
    return [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Attribute)
        and isinstance(part.value.value, ast.Name)
        and part.value.value.id == "self"
        and part.value.attr in _WHOLE_FIELDS
    ]
