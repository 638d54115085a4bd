"""Measure a host: which attributes of it every method uses, what is reached by name, and in which order it begins.

The host is one class, the scheduler. Its *parts* are the classes that it inherits from and the classes that inherit
from it. Everything else that gets the host is measured, too: functions with the host as a parameter and components that
keep it in a field, followed from the calls that pass it and from annotations.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from scheduler_components.errors import ConfigError
from scheduler_refactor.host_access import Access, AccessReader, Escape, Indirect, Origin
from scheduler_refactor.source_index import (
    ClassSource,
    FunctionSource,
    ModuleSource,
    SourceIndex,
    dotted_name,
)

Role: TypeAlias = Literal["host", "mixin", "base", "subclass", "component", "function", "module"]


class MethodUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one function does with the host.

    Args:
        name: its name.
        line: its first line.
        num_lines: its lines, with decorators.
        is_property: whether it is read without a call.
        is_static: whether it gets no host by itself.
        decorators: its decorators, as text without arguments.
        accesses: its uses, in the order of evaluation.
        escapes: the places where it passes the bare host on.
        indirect: uses that the syntax does not name.
    """

    name: str
    line: int
    num_lines: int
    is_property: bool = False
    is_static: bool = False
    decorators: tuple[str, ...] = ()
    accesses: tuple[Access, ...] = ()
    escapes: tuple[Escape, ...] = ()
    indirect: tuple[Indirect, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A class of the host, or something else that uses it.

    Args:
        name: name of the class; of a file's functions, the file.
        role: what it is to the host.
        path: its file.
        line: its first line.
        num_lines: its lines.
        methods: its functions, in order.
        attributes: attributes that its class body binds.
        host_fields: for a component, the fields that hold the host.
    """

    name: str
    role: Role
    path: str
    line: int
    num_lines: int
    methods: tuple[MethodUse, ...]
    attributes: tuple[str, ...] = ()
    host_fields: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether the class makes up the host: an object of the host has its members."""
        return self.role in ("host", "mixin", "base")


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """A name that several classes define, in the order of lookup.

    Args:
        name: the name.
        parts: the classes.
        calls_super: whether one of the definitions calls the next.
    """

    name: str
    parts: tuple[str, ...]
    calls_super: bool


class NameReach(msgspec.Struct, frozen=True, kw_only=True):
    """A method that code reaches without a plain call.

    Args:
        name: the method.
        path: the file.
        line: the line.
        how: ``reference`` for a bound method that is passed or stored, such as in a table of handlers; ``getattr`` for
            a name in a string that is applied to the host; ``string`` for an equal string elsewhere, which may mean
            something else.
    """

    name: str
    path: str
    line: int
    how: Literal["reference", "getattr", "string"]


class InitStep(msgspec.Struct, frozen=True, kw_only=True):
    """An attribute that the constructor binds, in order.

    Args:
        attribute: the attribute.
        path: file of the binding.
        line: line of the binding.
        start_line: line of the constructor from which it is reached.
        through: the methods that the constructor called to get there.
        is_conditional: whether a branch may skip it.
    """

    attribute: str
    path: str
    line: int
    start_line: int
    through: tuple[str, ...]
    is_conditional: bool


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """All uses of one host.

    Args:
        host: name of the class.
        path: its file.
        parts: the host's classes in the order of lookup, then subclasses, components and functions.
        unknown_bases: bases whose source was not found. What they define and use is unknown.
        overrides: names with several definitions.
        reached: methods that are reached by reference or by name.
        init_order: attributes in the order in which the constructor binds them.
        read_before_bound: uses in the constructor that come before the first binding.
    """

    host: str
    path: str
    parts: tuple[Part, ...]
    unknown_bases: tuple[str, ...]
    overrides: tuple[Override, ...]
    reached: tuple[NameReach, ...]
    init_order: tuple[InitStep, ...]
    read_before_bound: tuple[InitStep, ...]

    def own_parts(self) -> Iterator[Part]:
        """Yield the classes that make up the host, in the order of lookup."""
        return (part for part in self.parts if part.is_own)


def find_host(index: SourceIndex, name: str = "") -> ClassSource:
    """Return the class of that name; without a name, the class with the most lines that has a mixin for a base.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if name:
        path, _, short = name.rpartition(":")
        named = index.find_classes(short)
        found = [each for each in named if each.path == path] or [
            each for each in named if not path or each.path.endswith(f"/{path}")
        ]
        if len(found) == 1:
            return found[0]
        if found:
            places = ", ".join(f"{each.path}:{each.name}" for each in found)
            raise ConfigError("host", name, f"is ambiguous: {places}", "write it as FILE:CLASS")
        raise ConfigError("host", name, "is no class of these files", "name a class at the top level of a file")
    hosts = [each for each in index.all_classes() if any(base.endswith("Mixin") for base in each.bases)]
    if not hosts:
        raise ConfigError("host", name, "has no default here: no class has a mixin", "name the class with --host")
    return max(hosts, key=lambda each: (_num_lines(each.node), each.path))


def measure_host(
    index: SourceIndex, host: ClassSource, on_part: Callable[[str], None] = lambda _name: None
) -> Measurement:
    """Measure every use of a host in the indexed files.

    Args:
        index: parsed files. Files of bases may be added to it.
        host: the class.
        on_part: called with the name of each part before it is read.
    """
    return _HostMeasurer(index=index, host=host, on_part=on_part).measure()


@dataclass(slots=True, kw_only=True)
class _HostMeasurer:
    """Follows the host from its own classes to all functions and components that get it."""

    index: SourceIndex
    host: ClassSource
    on_part: Callable[[str], None]
    family: set[ClassSource] = field(default_factory=set)
    _origins: dict[FunctionSource, dict[str, Origin]] = field(default_factory=dict)
    _fields: dict[ClassSource, set[str]] = field(default_factory=dict)
    _uses: dict[FunctionSource, MethodUse] = field(default_factory=dict)

    def measure(self) -> Measurement:
        order, unknown = self.index.linearize(self.host)
        subclasses = self._subclasses()
        self.family = {*order, *subclasses}
        parts = [self._own_part(source, self._role(source)) for source in order]
        parts += [self._own_part(source, "subclass") for source in subclasses]
        self._seed_annotated()
        self._follow(parts)
        parts += self._other_parts()
        init_order, before = InitOrder([part for part in parts if part.is_own]).walk()
        return Measurement(
            host=self.host.name,
            path=self.host.path,
            parts=tuple(parts),
            unknown_bases=tuple(unknown),
            overrides=tuple(_overrides(order, subclasses, self._uses)),
            reached=tuple(self._reached(parts, order)),
            init_order=init_order,
            read_before_bound=before,
        )

    def _role(self, source: ClassSource) -> Role:
        if source is self.host:
            return "host"
        return "mixin" if source.name.endswith("Mixin") else "base"

    def _subclasses(self) -> list[ClassSource]:
        found: list[ClassSource] = []
        below = {self.host}
        grew = True
        while grew:
            grew = False
            for source in self.index.all_classes():
                if source in below:
                    continue
                if any(self.index.resolve_class(source.path, base) in below for base in source.bases):
                    found.append(source)
                    below.add(source)
                    grew = True
        return found

    # The host's own classes

    def _own_part(self, source: ClassSource, role: Role) -> Part:
        self.on_part(source.name)
        methods = [self._read(method, self._own_origins(method)) for method in source.definitions]
        return Part(
            name=source.name,
            role=role,
            path=source.path,
            line=source.node.lineno,
            num_lines=_num_lines(source.node),
            methods=tuple(methods),
            attributes=tuple(source.attributes),
        )

    def _own_origins(self, method: FunctionSource) -> dict[str, Origin]:
        origins = self._annotated(method)
        positional = [*method.node.args.posonlyargs, *method.node.args.args]
        if positional and not method.is_static:
            origins[positional[0].arg] = Origin("host", via="class" if method.is_class_method else "self")
        return origins

    def _annotated(self, function: FunctionSource) -> dict[str, Origin]:
        names = {each.arg for each in function.parameters if each.annotation and self._is_host_type(each.annotation)}
        return {name: Origin("host", via="parameter") for name in names}

    def _is_host_type(self, annotation: ast.expr) -> bool:
        """Whether an annotation is the host, as a name or a string, or the host or None."""
        match annotation:
            case ast.Constant(value=str() as text):
                try:
                    return self._is_host_type(ast.parse(text, mode="eval").body)
                except SyntaxError:
                    return False
            case ast.BinOp(op=ast.BitOr()):
                return self._is_host_type(annotation.left) or self._is_host_type(annotation.right)
            case ast.Subscript() if dotted_name(annotation.value).endswith("Optional"):
                return self._is_host_type(annotation.slice)
            case _:
                return dotted_name(annotation).rpartition(".")[2] == self.host.name

    def _read(
        self, function: FunctionSource, origins: dict[str, Origin], fields: frozenset[str] = frozenset()
    ) -> MethodUse:
        node = function.node
        reader = AccessReader(
            path=function.path,
            parameters=origins,
            class_name=function.owner.name if function.owner else "",
            is_host_class=self._host_classes(function.path),
            host_fields=fields,
        )
        reader.read(node)
        use = MethodUse(
            name=function.name,
            line=node.lineno,
            num_lines=_num_lines(node),
            is_property=function.is_property,
            is_static=function.is_static,
            decorators=function.decorators,
            accesses=tuple(reader.accesses),
            escapes=tuple(reader.escapes),
            indirect=tuple(reader.indirect),
        )
        self._uses[function] = use
        return use

    def _host_classes(self, path: str) -> Callable[[str], bool]:
        names = {source.name for source in self.family}

        def is_host_class(name: str) -> bool:
            return name.rpartition(".")[2] in names and self.index.resolve_class(path, name) in self.family

        return is_host_class

    # What else gets the host

    def _seed_annotated(self) -> None:
        for module in list(self.index.modules.values()):
            for function in module.functions.values():
                self._give(function, self._annotated(function))
            for source in module.classes.values():
                if source in self.family:
                    continue
                for name, statement in source.attributes.items():
                    if isinstance(statement, ast.AnnAssign) and self._is_host_type(statement.annotation):
                        self._fields.setdefault(source, set()).add(name)
                for method in source.definitions:
                    self._give(method, self._annotated(method))

    def _give(self, function: FunctionSource, origins: dict[str, Origin]) -> bool:
        """Note that parameters of a function hold the host; return whether that is new."""
        known = self._origins.setdefault(function, {}) if origins else {}
        fresh = origins.keys() - known.keys()
        known.update({name: origins[name] for name in fresh})
        return bool(fresh)

    def _follow(self, parts: list[Part]) -> None:
        """Follow the bare host from argument to parameter until nothing new gets it."""
        waiting = [(escape.path, escape) for part in parts for method in part.methods for escape in method.escapes]
        seen = set(waiting)
        changed = True
        while changed:
            passed = [self._pass(path, escape) for path, escape in waiting]
            noted = [self._note_fields(function) for function in list(self._origins)]
            changed = any(passed) or any(noted)
            waiting = []
            for function, origins in self._origins.items():
                use = self._read(function, origins, self._fields_of(function))
                waiting += [(use_escape.path, use_escape) for use_escape in use.escapes]
            waiting = [each for each in waiting if each not in seen]
            seen.update(waiting)
            changed |= bool(waiting)

    def _pass(self, path: str, escape: Escape) -> bool:
        if escape.how != "argument":
            return False
        function = self.index.resolve_function(path, escape.callee)
        offset = 0
        if function is None:
            source = self.index.resolve_class(path, escape.callee)
            if source is None or source in self.family:
                return False
            if "__init__" not in source.methods:  # a dataclass: its fields are its parameters
                names = [name for name, node in source.attributes.items() if isinstance(node, ast.AnnAssign)]
                name = _parameter(names, escape.parameter, 0)
                held = self._fields.setdefault(source, set())
                is_new = bool(name) and name not in held
                held.update([name] if name else [])
                return is_new
            function, offset = source.methods["__init__"], 1
        if function.owner in self.family:
            return False
        name = _parameter([each.arg for each in function.parameters], escape.parameter, offset)
        return bool(name) and self._give(function, {name: Origin("host", via="parameter")})

    def _note_fields(self, function: FunctionSource) -> bool:
        """Note ``self.scheduler = scheduler`` in a method of another class."""
        if function.owner is None or function.owner in self.family:
            return False
        held = self._fields.setdefault(function.owner, set())
        before = len(held)
        for node in ast.walk(function.node):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if node.value.id in self._origins[function] and dotted_name(target).startswith("self."):
                        held.add(dotted_name(target).removeprefix("self."))
        return len(held) > before

    def _fields_of(self, function: FunctionSource) -> frozenset[str]:
        return frozenset(self._fields.get(function.owner, ())) if function.owner else frozenset()

    def _other_parts(self) -> Iterator[Part]:
        for source, fields in self._fields.items():
            if fields:
                yield self._component_part(source, frozenset(fields))
        holders = {source for source, fields in self._fields.items() if fields}
        by_path: dict[str, list[MethodUse]] = {}
        for function, origins in self._origins.items():
            if function.owner not in holders:
                by_path.setdefault(function.path, []).append(self._read(function, origins))
        for path, module in sorted(self.index.modules.items()):
            uses = [*by_path.get(path, []), *self._module_use(path, module)]
            uses = [use for use in uses if use.accesses or use.escapes or use.indirect]
            if uses:
                role: Role = "module" if len(uses) == 1 and uses[0].name == "<module>" else "function"
                yield Part(name=path, role=role, path=path, line=1, num_lines=0, methods=tuple(uses))

    def _module_use(self, path: str, module: ModuleSource) -> Iterator[MethodUse]:
        """Read the uses of the host's classes outside of functions, and in functions that get no host."""
        known = {self.host.name, *(source.name for source in self.family)}
        if not known & {*module.imports, *module.classes}:
            return
        reader = AccessReader(path=path, parameters={}, is_host_class=self._host_classes(path))
        reader.read_module(module.tree)
        others = [*module.functions.values()]
        for source in module.classes.values():
            others += [] if source in self.family else source.definitions
        for function in others:
            if function not in self._origins:
                reader.read(function.node)
        if reader.accesses or reader.indirect:
            yield MethodUse(
                name="<module>",
                line=1,
                num_lines=0,
                accesses=tuple(reader.accesses),
                escapes=tuple(reader.escapes),
                indirect=tuple(reader.indirect),
            )

    def _component_part(self, source: ClassSource, fields: frozenset[str]) -> Part:
        self.on_part(source.name)
        methods = []
        for method in source.definitions:
            origins = dict(self._origins.get(method, {}))
            positional = [*method.node.args.posonlyargs, *method.node.args.args]
            if positional and not method.is_static and not method.is_class_method:
                origins[positional[0].arg] = Origin("component")
            methods.append(self._read(method, origins, fields))
        return Part(
            name=source.name,
            role="component",
            path=source.path,
            line=source.node.lineno,
            num_lines=_num_lines(source.node),
            methods=tuple(methods),
            attributes=tuple(source.attributes),
            host_fields=tuple(sorted(fields)),
        )

    # Names

    def _reached(self, parts: list[Part], order: list[ClassSource]) -> Iterator[NameReach]:
        methods = {name for source in order for name, each in source.methods.items() if not each.is_property}
        methods = {name for name in methods if not (name.startswith("__") and name.endswith("__"))}
        literal: set[tuple[str, int]] = set()
        for part in parts:
            for use in part.methods:
                for access in use.accesses:
                    if access.attribute not in methods:
                        continue
                    if access.via == "getattr":
                        literal.add((access.path, access.line))
                        yield NameReach(name=access.attribute, path=access.path, line=access.line, how="getattr")
                    elif access.kind == "read" and access.via != "super":
                        yield NameReach(name=access.attribute, path=access.path, line=access.line, how="reference")
        for path, module in sorted(self.index.modules.items()):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    name = self._named_method(node.value, methods)
                    if name and (path, node.lineno) not in literal:
                        yield NameReach(name=name, path=path, line=node.lineno, how="string")

    def _named_method(self, text: str, methods: set[str]) -> str:
        owner, _, name = text.rpartition(".")
        if name not in methods or len(text) > 300:
            return ""
        names = {source.name for source in self.family}
        return name if not owner or owner.rpartition(".")[2] in names else ""


@dataclass(slots=True)
class InitOrder:
    """Walks the constructor, and the host's methods that it calls, in order.

    `first_use` has, for each attribute and method, the line of the constructor that reaches it first.
    """

    parts: list[Part]
    bound: dict[str, InitStep] = field(default_factory=dict)
    before: dict[str, InitStep] = field(default_factory=dict)
    first_use: dict[str, int] = field(default_factory=dict)

    def walk(self) -> tuple[tuple[InitStep, ...], tuple[InitStep, ...]]:
        """Return the bindings, and the uses that come before them."""
        self._method("__init__", (), False, 0, 0)
        early = tuple(step for name, step in self.before.items() if name in self.bound)
        return tuple(self.bound.values()), early

    def _method(self, name: str, through: tuple[str, ...], is_conditional: bool, skip: int, start: int) -> None:
        found = self._find(name, skip)
        if found is None or name in through:
            return
        place, use = found
        path = (*through, name) if name != "__init__" else through
        for access in use.accesses:
            if access.is_deferred:
                continue
            doubtful = is_conditional or access.is_conditional or not access.is_certain
            step = InitStep(
                attribute=access.attribute,
                path=access.path,
                line=access.line,
                start_line=start or access.line,
                through=path,
                is_conditional=doubtful,
            )
            self.first_use.setdefault(access.attribute, step.start_line)
            if access.kind == "rebind":
                self.bound.setdefault(access.attribute, step)
            elif access.kind == "call" or self._is_property(access.attribute):
                next_place = place + 1 if access.via == "super" else 0
                self._method(access.attribute, path, doubtful, next_place, step.start_line)
            elif access.attribute not in self.bound and not self._is_of_class(access.attribute):
                self.before.setdefault(access.attribute, step)

    def _find(self, name: str, skip: int) -> tuple[int, MethodUse] | None:
        for place, part in enumerate(self.parts[skip:], skip):
            for use in reversed(part.methods):
                if use.name == name:
                    return place, use
        return None

    def _is_property(self, name: str) -> bool:
        found = self._find(name, 0)
        return found is not None and found[1].is_property

    def _is_of_class(self, name: str) -> bool:
        return self._find(name, 0) is not None or any(name in part.attributes for part in self.parts)


def _overrides(
    order: list[ClassSource], subclasses: list[ClassSource], uses: dict[FunctionSource, MethodUse]
) -> Iterator[Override]:
    every = [*subclasses, *order]
    names = dict.fromkeys(name for source in every for name in (*source.methods, *source.attributes))
    for name in names:
        parts = [source for source in every if name in source.methods or name in source.attributes]
        if len(parts) < 2:
            continue
        definitions = [source.methods[name] for source in parts if name in source.methods]
        calls = any(
            access.via == "super" and access.attribute == name for each in definitions for access in uses[each].accesses
        )
        yield Override(name=name, parts=tuple(source.name for source in parts), calls_super=calls)


def _parameter(names: list[str], place: str, offset: int) -> str:
    if place.isdecimal():
        number = int(place) + offset
        return names[number] if number < len(names) else ""
    return place if place in names else ""


def _num_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return (node.end_lineno or node.lineno) - first + 1
