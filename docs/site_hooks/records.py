"""Show the fields of attrs classes, structs, models and named tuples on the reference pages.

griffe knows the constructors of dataclasses only. This extension adds a constructor to the other records. It then
removes fields without a docstring, because the constructor shows their names, types and defaults, and the
``Attributes:`` of the class explain them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    Expr,
    ExprCall,
    ExprKeyword,
    ExprName,
    ExprSubscript,
    ExprTuple,
    Extension,
    Function,
    Module,
    Parameter,
    ParameterKind,
    Parameters,
)

MODEL_BASES = {"pydantic.BaseModel", "scheduler_components.kv_events.config.JsonSettings"}
STRUCT_BASES = {"msgspec.Struct", "typing.NamedTuple", *MODEL_BASES}
ATTRS = {"attrs.frozen", "attrs.define"}
FIELDS = {"attrs.field", "msgspec.field", "pydantic.Field"}

SHARED_ITEM = re.compile(
    r"^(?P<indent> +)(?P<names>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)+):(?P<meaning> .*(?:\n(?P=indent) +.*)*)", re.MULTILINE
)
"""Several names with one description in a section of a docstring."""


class Records(Extension):
    """The extension that mkdocstrings loads after the extension for dataclasses."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Complete the classes once all modules of the package have been read, because only then are bases resolved."""
        del kwargs
        found = list(_objects(pkg))
        for docstring in (each.docstring for each in found if each.docstring is not None):
            _name_each_item(docstring)
        classes = [each for each in found if each.is_class]
        for cls in classes:
            _simplify_types(cls)
            if _is_record(cls) and ("__init__" not in cls.members or _is_model(cls)):
                _add_constructor(cls)
        for cls in classes:
            _remove_undocumented(cls)


def _objects(owner: Any) -> Iterator[Any]:
    """Yield every object that is defined below ``owner``."""
    for member in owner.members.values():
        if not member.is_alias:
            yield member
            yield from _objects(member)


def _is_record(cls: Class) -> bool:
    return _attrs_decorator(cls) is not None or _is_struct(cls)


def _is_model(cls: Class) -> bool:
    """Return whether the constructor takes the fields even if the class defines ``__init__``."""
    return bool(MODEL_BASES & _base_paths(cls))


def _is_struct(cls: Class) -> bool:
    return bool(_base_paths(cls) & STRUCT_BASES) or any(_base_paths(base) & STRUCT_BASES for base in cls.mro())


def _base_paths(cls: Class) -> set[str]:
    return {base.canonical_path for base in cls.bases if isinstance(base, Expr)}


def _attrs_decorator(cls: Class) -> Expr | None:
    for decorator in cls.decorators:
        if isinstance(decorator.value, Expr) and decorator.value.canonical_path in ATTRS:
            return decorator.value
    return None


def _add_constructor(cls: Class) -> None:
    owners = [owner for owner in (*reversed(cls.mro()), cls) if _is_record(owner)]
    found = {parameter.name: parameter for owner in owners for parameter in _parameters(owner)}
    ordered = sorted(found.values(), key=lambda each: each.kind is ParameterKind.keyword_only)
    init = Function("__init__", parent=cls, parameters=Parameters(Parameter("self"), *ordered), returns="None")
    cls.set_member("__init__", init)


def _parameters(cls: Class) -> Iterator[Parameter]:
    """Yield one parameter per field."""
    decorator = _attrs_decorator(cls)
    options = {**cls.keywords, **_arguments(decorator)}
    named_only = str(options.get("kw_only")) == "True" or _is_model(cls)
    kind = ParameterKind.keyword_only if named_only else ParameterKind.positional_or_keyword
    for field in cls.members.values():
        if isinstance(field, Attribute) and _is_field(field):
            yield Parameter(field.name, annotation=field.annotation, kind=kind, default=_default(field))


def _is_field(member: Attribute) -> bool:
    is_of_instances = "instance-attribute" in member.labels
    is_given = str(_arguments(member.value).get("init")) != "False"
    return member.annotation is not None and is_of_instances and is_given and "property" not in member.labels


def _default(field: Attribute) -> str | Expr | None:
    value = field.value
    if not isinstance(value, ExprCall) or value.function.canonical_path not in FIELDS:
        return value
    given = _arguments(value)
    factory = given.get("factory", given.get("default_factory"))
    return given.get("default") if factory is None else ExprCall(factory, [])


def _arguments(call: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call."""
    arguments = call.arguments if isinstance(call, ExprCall) else []
    return {each.name: each.value for each in arguments if isinstance(each, ExprKeyword)}


def _simplify_types(cls: Class) -> None:
    """Replace ``Annotated`` types and private aliases by the plain type."""
    for member in cls.members.values():
        if isinstance(member, Attribute):
            member.annotation = _simple_type(member.annotation, cls)


def _simple_type(annotation: str | Expr | None, cls: Class) -> str | Expr | None:
    if isinstance(annotation, ExprName) and annotation.name.startswith("_") and annotation.name in cls.module.members:
        alias = cls.module.members[annotation.name]
        return _simple_type(alias.value, cls) if isinstance(alias, Attribute) else annotation
    if isinstance(annotation, ExprSubscript) and annotation.canonical_path.endswith(".Annotated"):
        arguments = annotation.slice
        return _simple_type(arguments.elements[0], cls) if isinstance(arguments, ExprTuple) else annotation
    return annotation


def _remove_undocumented(cls: Class) -> None:
    """Remove attributes that the constructor shows, and special methods, if they have no docstring."""
    if cls.docstring is not None:
        _ = cls.docstring.parsed  # resolves and keeps the types of its ``Attributes:``
    for name, member in list(cls.members.items()):
        is_shown = isinstance(member, Attribute) and "property" not in member.labels and "__init__" in cls.members
        is_special = name.startswith("__") and name != "__init__"
        if member.docstring is None and (is_shown or is_special):
            del cls.members[name]


def _name_each_item(docstring: Docstring) -> None:
    """Turn ``a, b: meaning`` into one entry per name, because a table has one row per name."""
    docstring.value = SHARED_ITEM.sub(_one_item_per_name, docstring.value)


def _one_item_per_name(match: re.Match[str]) -> str:
    return "\n".join(f"{match['indent']}{name}:{match['meaning']}" for name in match["names"].split(", "))
