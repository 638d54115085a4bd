"""Read the names and classes of a file: imports, fields, and the kind of each class."""

from __future__ import annotations

import ast
import enum
import sys
from collections.abc import Iterator, Mapping

import msgspec

Function = ast.FunctionDef | ast.AsyncFunctionDef

CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__attrs_post_init__")

_DATACLASS = {"dataclasses.dataclass"}
_MUTABLE_ATTRS = {"attrs.define", "attrs.mutable", "attr.define", "attr.mutable", "attr.s", "attr.attrs"}
_FROZEN_ATTRS = {"attrs.frozen", "attr.frozen"}
_DECLARING = _DATACLASS | _MUTABLE_ATTRS | _FROZEN_ATTRS
_WITHOUT_SLOTS_BY_DEFAULT = _DATACLASS | {"attr.s", "attr.attrs"}
_VALUE_BASES = {"msgspec.Struct", "pydantic.BaseModel", "typing.NamedTuple", "typing.TypedDict", "enum.Enum"}
_INTERFACE_BASES = {"typing.Protocol", "typing_extensions.Protocol"}
_CALLABLES = {"typing.Callable", "collections.abc.Callable", "types.FunctionType", "types.MethodType", "callable"}
_ANY = {"typing.Any", "typing_extensions.Any"}
_UNIONS = {"Optional", "Union", "Final", "Annotated"}
_DATA_TYPES = {
    "int", "float", "bool", "complex", "str", "bytes", "bytearray", "memoryview", "None", "Literal", "list", "dict",
    "set", "frozenset", "tuple", "List", "Dict", "Set", "FrozenSet", "Tuple", "Sequence", "MutableSequence",
    "Mapping", "MutableMapping", "Iterable", "Collection", "deque", "Deque", "defaultdict", "DefaultDict",
    "Counter", "OrderedDict", "array",
}  # fmt: skip
"""Last names of types that only hold data, regardless of their items."""
_NOT_OF_OBJECTS = {"property", "cached_property", "setter", "deleter", "classmethod", "staticmethod"}
_WITHOUT_EFFECT = {"setattr", "logger", "logging", "log", "warnings", "print"}
"""Calls of these names set a field or log: they are no behaviour."""


class ClassKind(enum.Enum):
    """Kind of a class, from its declaration and its methods."""

    COMPONENT = "behaviour and collaborators"
    VALUE = "a frozen class, wire struct or settings model with behaviour"
    RECORD = "declared data fields without behaviour: no rule about components applies"
    INTERFACE = "a Protocol"


class FieldInfo(msgspec.Struct, frozen=True):
    """One field: declared in the class body, or stored by ``__init__``.

    Attributes:
        node: the node to report.
        annotation: without quotes; None without an annotation.
        callable: the outermost callable in the annotation, also of ``Callable | None`` and ``list[Callable]``.
        is_own_state: the object creates it, and the constructor does not take it. By convention this also holds for a
            dataclass field whose name begins with an underscore.
    """

    name: str
    node: ast.AST
    annotation: ast.expr | None
    callable: ast.expr | None
    is_own_state: bool


class ClassInfo(msgspec.Struct, frozen=True):
    """One class of a file.

    Attributes:
        lacks_slots: a dataclass or an attrs class that is declared without slots.
    """

    node: ast.ClassDef
    kind: ClassKind
    fields: tuple[FieldInfo, ...]
    lacks_slots: bool


class ImportedNames:
    """All imports of one file.

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
        """Return the full dotted name of ``a.b.c``, resolved through the imports; empty for other expressions."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self._origins.get(node.id, node.id), *reversed(parts)])

    def is_imported(self, name: str) -> bool:
        """Whether an import statement binds ``name``."""
        return name in self._origins

    def is_standard(self, node: ast.expr) -> bool:
        """Whether the expression names a part of the standard library."""
        return self.dotted(node).partition(".")[0] in sys.stdlib_module_names


def last_name(node: ast.expr) -> str:
    """Return the last identifier of ``a.b.c`` or ``a.b.c[...]``; empty for other expressions."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def root_name(node: ast.expr) -> str:
    """Return the first identifier of ``a.b.c``, ``a[...].b`` or ``a(...).b``; empty for other expressions."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def unquoted(annotation: ast.expr) -> ast.expr:
    """Parse an annotation in quotes; return other annotations unchanged."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return ast.parse(annotation.value.strip(), mode="eval").body
        except SyntaxError:
            return annotation
    return annotation


def is_any(annotation: ast.expr, names: ImportedNames) -> bool:
    """Whether the annotation is ``Any`` itself, not a container of it."""
    return names.dotted(annotation) in _ANY


def methods_of(node: ast.ClassDef) -> Iterator[Function]:
    """Yield the functions of a class body."""
    for statement in node.body:
        if isinstance(statement, Function):
            yield statement


def parameters_of(function: Function) -> list[ast.arg]:
    """Return all parameters with ``self``."""
    arguments = function.args
    rest = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]


def names_bound_in(function: Function) -> set[str]:
    """Return the local names that a function's body assigns, without its parameters."""
    return {part.id for part in ast.walk(function) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def read_class(node: ast.ClassDef, names: ImportedNames, siblings: Mapping[str, ast.ClassDef]) -> ClassInfo:
    """Read one class; ``siblings`` are the classes of its file by name, because a class inherits their kinds."""
    kind = _declared_kind(node, names, siblings, frozenset())
    decorated = any(names.dotted(_call(decorator)[0]) in _DECLARING for decorator in node.decorator_list)
    is_data_class = decorated or kind is ClassKind.VALUE
    found = _declared_fields(node, names) if is_data_class else _stored_fields(node, names)
    by_name = {field.name: field for field in reversed(list(found))}  # Keep the first assignment of each.
    fields = tuple(reversed(by_name.values()))
    if is_data_class and kind is not ClassKind.INTERFACE and not _has_behaviour(node, fields):
        kind = ClassKind.RECORD
    return ClassInfo(node, kind, fields, any(_lacks_slots(decorator, names) for decorator in node.decorator_list))


def _lacks_slots(decorator: ast.expr, names: ImportedNames) -> bool:
    name, keywords = _call(decorator)
    dotted, slots = names.dotted(name), keywords.get("slots")
    if slots is None:
        return dotted in _WITHOUT_SLOTS_BY_DEFAULT
    return dotted in _DECLARING and not _is_true(slots)


def _declared_kind(
    node: ast.ClassDef, names: ImportedNames, siblings: Mapping[str, ast.ClassDef], seen: frozenset[str]
) -> ClassKind:
    for name, keywords in map(_call, node.decorator_list):
        if names.dotted(name) in _FROZEN_ATTRS or _is_true(keywords.get("frozen")):
            return ClassKind.VALUE
    if any(keyword.arg == "frozen" and _is_true(keyword.value) for keyword in node.keywords):
        return ClassKind.VALUE  # A msgspec struct, whatever the name of its base.
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        dotted = names.dotted(base)
        if dotted in _INTERFACE_BASES:
            return ClassKind.INTERFACE
        if dotted in _VALUE_BASES or dotted.startswith("enum."):
            return ClassKind.VALUE
        if dotted in siblings and dotted not in seen:
            kind = _declared_kind(siblings[dotted], names, siblings, seen | {dotted})
            if kind is ClassKind.VALUE:
                return kind
    return ClassKind.COMPONENT


def _has_behaviour(node: ast.ClassDef, fields: tuple[FieldInfo, ...]) -> bool:
    """Whether a data class has behaviour: a callable field, or a method that acts.

    Methods that only store, check or compute the class's own data are no behaviour.
    """
    if any(field.callable is not None for field in fields):
        return True
    collaborators = {field.name for field in fields if not (field.annotation and _is_data(field.annotation))}
    return any(_acts(method, collaborators) for method in methods_of(node))


def _acts(method: Function, collaborators: set[str]) -> bool:
    """Whether a method uses a member of a field, awaits, or calls a function for its effect.

    Alternative constructors, properties and special methods do not count, except ``__call__``.
    """
    is_dunder = method.name.startswith("__") and method.name.endswith("__")
    if is_dunder and method.name != "__call__":
        return False
    if any(last_name(_call(decorator)[0]) in _NOT_OF_OBJECTS for decorator in method.decorator_list):
        return False
    own = {"self", *_WITHOUT_EFFECT, *names_bound_in(method)}
    for part in ast.walk(method):
        if isinstance(part, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        if isinstance(part, ast.Attribute | ast.Call):
            reached = part.value if isinstance(part, ast.Attribute) else part.func
            if _is_own_field(reached) and last_name(reached) in collaborators:
                return True
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and root_name(part.value) not in own:
            return True
    return False


def _is_own_field(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_data(annotation: ast.expr) -> bool:
    """Whether the annotation is a number, text, a container, or a union of them."""
    annotation = unquoted(annotation)
    if isinstance(annotation, ast.BinOp):
        return _is_data(annotation.left) and _is_data(annotation.right)
    if isinstance(annotation, ast.Constant):
        return annotation.value is None
    if isinstance(annotation, ast.Subscript) and last_name(annotation) in _UNIONS:
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return all(_is_data(part) for part in parts)
    return last_name(annotation) in _DATA_TYPES


def _declared_fields(node: ast.ClassDef, names: ImportedNames) -> Iterator[FieldInfo]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if last_name(unquoted(statement.annotation)) in {"ClassVar", "KW_ONLY"}:
            continue
        is_own_state = statement.target.id.startswith("_") or _is_left_out_of_init(statement.value)
        yield _field(statement.target.id, statement, statement.annotation, names, is_own_state=is_own_state)


def _is_left_out_of_init(default: ast.expr | None) -> bool:
    """Whether the default is ``field(init=False)``, of dataclasses or attrs."""
    if not isinstance(default, ast.Call) or last_name(default.func) not in {"field", "ib"}:
        return False
    init = _call(default)[1].get("init")
    return isinstance(init, ast.Constant) and init.value is False


def _stored_fields(node: ast.ClassDef, names: ImportedNames) -> Iterator[FieldInfo]:
    """Yield the fields of a plain class: assignments to ``self`` in ``__init__``, and in ``init_...`` of a mixin."""
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
            yield _field(target.attr, target, annotation, names, is_own_state=given is None)


def _field(
    name: str, node: ast.AST, annotation: ast.expr | None, names: ImportedNames, *, is_own_state: bool
) -> FieldInfo:
    annotation = None if annotation is None else unquoted(annotation)
    return FieldInfo(name, node, annotation, _callable_in(annotation, names), is_own_state)


def _callable_in(annotation: ast.expr | None, names: ImportedNames) -> ast.expr | None:
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


def _assignment(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None, ast.expr | None]:
    """Return (target, value, annotation) of a simple assignment, else three times None."""
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
