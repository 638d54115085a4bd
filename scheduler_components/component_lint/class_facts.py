"""What a class declares: its fields, and what kind of class it is."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator, Mapping

import msgspec

from scheduler_components.component_lint.names import ImportedNames, last_name, unquoted

__all__ = [
    "CONSTRUCTORS",
    "ClassFacts",
    "ClassKind",
    "FieldFacts",
    "Function",
    "methods_of",
    "parameters_of",
    "read_class",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef

CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__attrs_post_init__")

_DATACLASS = "dataclasses.dataclass"
_MUTABLE_ATTRS = {"attrs.define", "attrs.mutable", "attr.define", "attr.mutable", "attr.s", "attr.attrs"}
_FROZEN_ATTRS = {"attrs.frozen", "attr.frozen"}
_VALUE_BASES = {"msgspec.Struct", "pydantic.BaseModel", "typing.NamedTuple", "typing.TypedDict", "enum.Enum"}
_INTERFACE_BASES = {"typing.Protocol", "typing_extensions.Protocol"}


class ClassKind(enum.Enum):
    """What a class is for, as far as its declaration tells."""

    COMPONENT = "behaviour and collaborators"
    VALUE = "frozen, a wire struct, a model of settings or an enumeration"
    RECORD = "declared fields, and no behaviour"
    INTERFACE = "a Protocol"


class FieldFacts(msgspec.Struct, frozen=True):
    """One field: declared in the class body, or stored by ``__init__``.

    Attributes:
        annotation: out of its quotes; None where there is none.
        is_own_state: made by the object itself, not given to its constructor; by convention also a dataclass's field
            whose name begins with an underscore.
    """

    name: str
    annotation: ast.expr | None
    line: int
    is_own_state: bool


class ClassFacts(msgspec.Struct, frozen=True):
    """One class of a file."""

    node: ast.ClassDef
    kind: ClassKind
    fields: tuple[FieldFacts, ...]


def read_class(node: ast.ClassDef, names: ImportedNames, siblings: Mapping[str, ast.ClassDef]) -> ClassFacts:
    """Read one class; ``siblings`` are the classes of its file by name, whose kinds it inherits."""
    decorators = [_call(decorator) for decorator in node.decorator_list]
    declares = any(names.dotted(name) in {_DATACLASS, *_MUTABLE_ATTRS, *_FROZEN_ATTRS} for name, _ in decorators)
    fields = _declared_fields(node) if declares else _stored_fields(node)
    kind = _kind(node, names, siblings, frozenset())
    if declares and kind is not ClassKind.INTERFACE and not _has_behaviour(node):
        kind = ClassKind.RECORD
    by_name = {field.name: field for field in reversed(list(fields))}  # the first assignment of each
    return ClassFacts(node, kind, tuple(reversed(by_name.values())))


def methods_of(node: ast.ClassDef) -> Iterator[Function]:
    """Yield the functions that stand in a class's body."""
    for statement in node.body:
        if isinstance(statement, Function):
            yield statement


def parameters_of(function: Function) -> list[ast.arg]:
    """Return all parameters, ``self`` included."""
    arguments = function.args
    rest = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]


def _has_behaviour(node: ast.ClassDef) -> bool:
    """True for a class with a method of its own: neither a property nor one that Python calls, save ``__call__``."""
    return any(
        (method.name == "__call__" or not (method.name.startswith("__") and method.name.endswith("__")))
        and not any(last_name(decorator) in {"property", "cached_property"} for decorator in method.decorator_list)
        for method in methods_of(node)
    )


def _kind(
    node: ast.ClassDef, names: ImportedNames, siblings: Mapping[str, ast.ClassDef], seen: frozenset[str]
) -> ClassKind:
    for name, keywords in map(_call, node.decorator_list):
        if names.dotted(name) in _FROZEN_ATTRS or _is_true(keywords.get("frozen")):
            return ClassKind.VALUE
    if any(keyword.arg == "frozen" and _is_true(keyword.value) for keyword in node.keywords):
        return ClassKind.VALUE  # a msgspec struct, whatever its base is called
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        dotted = names.dotted(base)
        if dotted in _INTERFACE_BASES:
            return ClassKind.INTERFACE
        if dotted in _VALUE_BASES or dotted.startswith("enum."):
            return ClassKind.VALUE
        if dotted in siblings and dotted not in seen:
            kind = _kind(siblings[dotted], names, siblings, seen | {dotted})
            if kind is ClassKind.VALUE:
                return kind
    return ClassKind.COMPONENT


def _declared_fields(node: ast.ClassDef) -> Iterator[FieldFacts]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation = unquoted(statement.annotation)
        if last_name(annotation) in {"ClassVar", "KW_ONLY"}:
            continue
        is_own_state = statement.target.id.startswith("_") or _is_left_out_of_init(statement.value)
        yield FieldFacts(statement.target.id, annotation, statement.lineno, is_own_state)


def _is_left_out_of_init(default: ast.expr | None) -> bool:
    """True for ``field(init=False)`` and its likes in attrs."""
    if not isinstance(default, ast.Call) or last_name(default.func) not in {"field", "ib"}:
        return False
    init = _call(default)[1].get("init")
    return isinstance(init, ast.Constant) and init.value is False


def _stored_fields(node: ast.ClassDef) -> Iterator[FieldFacts]:
    """Fields of a plain class: what its ``__init__``, and a mixin's ``init_...``, assign to ``self``."""
    for method in methods_of(node):
        if method.name != "__init__" and not method.name.startswith("init_"):
            continue
        parameters = {parameter.arg: parameter for parameter in parameters_of(method)[1:]}
        for statement in ast.walk(method):
            target, value, annotation = _assignment(statement)
            if not (isinstance(target, ast.Attribute) and last_name(target.value) == "self"):
                continue
            given = parameters.get(value.id) if isinstance(value, ast.Name) else None
            if annotation is None and given is not None:
                annotation = given.annotation
            yield FieldFacts(
                target.attr, None if annotation is None else unquoted(annotation), target.lineno, given is None
            )


def _assignment(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None, ast.expr | None]:
    """Return (target, value, annotation) of a simple assignment, else Nones."""
    if isinstance(node, ast.AnnAssign):
        return node.target, node.value, node.annotation
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value, None
    return None, None, None


def _call(node: ast.expr) -> tuple[ast.expr, dict[str | None, ast.expr]]:
    """Return the called name and the keywords of ``name(...)``; a bare ``name`` has none."""
    if isinstance(node, ast.Call):
        return node.func, {keyword.arg: keyword.value for keyword in node.keywords}
    return node, {}


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
