"""Write the recipe that prepares or moves a mixin, from a measurement. A person may edit it before it is applied.

A member that is bound once, before the component is made, becomes a fact. State that only the mixin binds becomes the
component's. All else goes through one port, which a later commit splits by origin.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scheduler_components.errors import ConfigError
from scheduler_refactor import body_checks
from scheduler_refactor.host_tree import files_that_name, find_in_tree
from scheduler_refactor.leave_order import LeavePlan, plan_leaving
from scheduler_refactor.measurement import InitOrder, Measurement, find_host, measure_host
from scheduler_refactor.recipe import Accepted, ClassRef, ComponentField, Move, Port, Prepare
from scheduler_refactor.source_index import ClassSource, ModuleSource, SourceIndex


@dataclass(slots=True, kw_only=True)
class MovePlanner:
    """Plans one mixin of one host.

    Args:
        tree: text by path from the root of the repository.
        host: the host's class, as ``CLASS`` or ``FILE:CLASS``.
        mixin: name of the mixin.
        component: name of the component's class.
        attribute: the host's attribute for it.
        port: name of the port.
    """

    tree: Mapping[str, str]
    host: str
    mixin: str
    component: str
    attribute: str
    port: str = "host"

    def prepare(self, doc: str = "") -> Prepare:
        """Return the step that writes the component into the mixin's file.

        Raises:
            ConfigError: a class is not there.
        """
        index, host, measurement = self._measure()
        source = self._class_of(index, host)
        plan = next(plan for plan in plan_leaving(measurement) if plan.part == self.mixin)
        before, facts = self._place(measurement, host, plan)
        module = index.modules[source.path]
        types = _TypeNames(index, module)
        states = [
            ComponentField(name=name, annotation=types.of_attribute(measurement, name), kind="state")
            for name in plan.own_state
            if name not in source.attributes
        ]
        fields = [
            ComponentField(name=name, annotation=types.of_attribute(measurement, name), kind="fact") for name in facts
        ]
        members = {
            need.name: types.declaration(measurement, need.name)
            for need in plan.needs
            if need.name not in facts and not (need.name.startswith("__") and need.name.endswith("__"))
        }
        ports = (Port(name=self.port, protocol=f"{self.component}Host", members=members),) if members else ()
        escapes = any(use.escapes for part in measurement.parts if part.name == self.mixin for use in part.methods)
        if escapes and not ports:
            ports = (Port(name=self.port, protocol=f"{self.component}Host", members={}),)
        lazy = body_checks.has_future_annotations(module.tree)
        return Prepare(
            component=ClassRef(file=source.path, name=self.component),
            doc=doc
            or (ast.get_docstring(source.node) or f"{self.component} of the scheduler.").strip().splitlines()[0],
            host=ClassRef(file=host.path, name=host.name),
            attribute=self.attribute,
            before=before,
            above=self.mixin,
            ports=ports,
            fields=(*fields, *states),
            imports=tuple(sorted(each for each in types.imports if not lazy or each.startswith("from typing "))),
            type_imports=tuple(sorted(each for each in types.imports if lazy and not each.startswith("from typing "))),
            host_import=self._host_import(index, host, source),
        )

    def move(
        self,
        *,
        receivers: Sequence[str] = (),
        delegates: Sequence[str] = (),
        delegate_note: str = "",
        accepted: Sequence[Accepted] = (),
    ) -> Move:
        """Return the step that moves all methods of the mixin into the prepared component.

        Raises:
            ConfigError: a class is not there.
        """
        index, host, measurement = self._measure()
        source = self._class_of(index, host)
        found = [each for each in index.find_classes(self.component) if each.path == source.path]
        found = found or index.find_classes(self.component)
        if len(found) != 1:
            raise ConfigError("component", self.component, f"is the name of {len(found)} classes", "prepare it first")
        (component,) = found
        protocols = _protocol_members(index.modules[component.path])
        routes: dict[str, str] = {}
        ports: list[str] = []
        facts: list[str] = []
        states: list[str] = []
        for name, statement in component.attributes.items():
            if not isinstance(statement, ast.AnnAssign):
                continue
            protocol = ast.unparse(statement.annotation).strip("'\"")
            if protocol in protocols:
                ports.append(name)
                routes |= dict.fromkeys(protocols[protocol], name)
            elif statement.value is not None:
                states.append(name)
            else:
                facts.append(name)
        escapes = any(use.escapes for part in measurement.parts if part.name == self.mixin for use in part.methods)
        return Move(
            source=ClassRef(file=source.path, name=self.mixin),
            component=ClassRef(file=component.path, name=component.name),
            host=ClassRef(file=host.path, name=host.name),
            attribute=self.attribute,
            methods=tuple(dict.fromkeys(each.name for each in source.definitions)),
            routes=routes,
            facts=tuple(facts),
            states=tuple(states),
            whole=ports[0] if escapes and len(ports) == 1 else "",
            receivers=tuple(receivers),
            delegates=tuple(delegates),
            delegate_note=delegate_note,
            accepted=tuple(accepted),
        )

    def _measure(self) -> tuple[SourceIndex, ClassSource, Measurement]:
        name = self.host.rpartition(":")[2]
        index = SourceIndex.parse(files_that_name(self.tree, {name, self.mixin, self.component}))
        index.find_module = lambda module, _importer: find_in_tree(self.tree, module)
        host = find_host(index, self.host)
        return index, host, measure_host(index, host)

    def _class_of(self, index: SourceIndex, host: ClassSource) -> ClassSource:
        order, _ = index.linearize(host)
        found = [each for each in order[1:] if each.name == self.mixin]
        if not found:
            known = ", ".join(each.name for each in order[1:]) or "nothing"
            raise ConfigError("mixin", self.mixin, f"is no base of {host.name}", f"it has {known}")
        return found[0]

    def _place(self, measurement: Measurement, host: ClassSource, plan: LeavePlan) -> tuple[str, list[str]]:
        """Return the statement before which the component is made, and the facts that are bound by then."""
        init = host.methods.get("__init__")
        if init is None:
            raise ConfigError("host", host.name, "has no constructor", "write `__init__` first")
        order = InitOrder(list(measurement.own_parts()))
        order.walk()
        mine = {use.name for part in measurement.parts if part.name == self.mixin for use in part.methods}
        used = [order.first_use[name] for name in {*mine, *plan.own_state} if name in order.first_use]
        if not used:
            return "", []
        statement = next(each for each in init.node.body if (each.end_lineno or each.lineno) >= min(used))
        lines = self.tree[host.path].split("\n")
        facts = []
        for need in plan.needs:
            step = order.bound.get(need.name)
            if (
                need.kind == "fact"
                and step is not None
                and step.start_line < statement.lineno
                and not step.is_conditional
            ):
                facts.append(need.name)
        return lines[statement.lineno - 1].split("  #")[0].strip(), facts

    def _host_import(self, index: SourceIndex, host: ClassSource, source: ClassSource) -> str:
        if host.path == source.path:
            return ""
        statement, _ = body_checks.import_statements(index.modules[host.path].tree).get(self.mixin, ("", False))
        if not statement.startswith("from "):
            raise ConfigError("mixin", self.mixin, "is imported in a form that is unknown", "write `from ... import`")
        return f"{statement.partition(' import ')[0]} import {self.component}"


class _TypeNames:
    """Finds annotations of members that the component's file can have, and the imports that they need."""

    def __init__(self, index: SourceIndex, target: ModuleSource) -> None:
        self._index = index
        self._known = {
            *body_checks.import_statements(target.tree),
            *body_checks.module_bindings(target.tree),
        }
        self.imports: set[str] = set()

    def of_attribute(self, measurement: Measurement, name: str) -> str:
        """Return the type with which a class of the host declares an attribute, or ``Any``."""
        for part in measurement.own_parts():
            module = self._index.modules[part.path]
            source = module.classes[part.name]
            for node in ast.walk(source.node):
                if not isinstance(node, ast.AnnAssign):
                    continue
                target = node.target
                of_self = (
                    isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and target.attr == name
                )
                if of_self or (isinstance(target, ast.Name) and target.id == name and node in source.node.body):
                    return self._usable(node.annotation, module)
        return self._any()

    def declaration(self, measurement: Measurement, name: str) -> str:
        """Return the declaration of a member in a Protocol."""
        for part in measurement.own_parts():
            module = self._index.modules[part.path]
            method = module.classes[part.name].methods.get(name)
            if method is None:
                continue
            bare = ast.parse(ast.unparse(method.node)).body[0]
            assert isinstance(bare, ast.FunctionDef | ast.AsyncFunctionDef)
            if method.is_property:
                return f"{name}: {self._usable(bare.returns, module)}"
            for parameter in _parameters(bare):
                if parameter.annotation is not None:
                    parameter.annotation = ast.parse(self._usable(parameter.annotation, module), mode="eval").body
            if bare.args.args:
                bare.args.args[0].annotation = None
            if bare.returns is not None:
                bare.returns = ast.parse(self._usable(bare.returns, module), mode="eval").body
            bare.args.defaults = [ast.Constant(value=...) for _ in bare.args.defaults]
            bare.args.kw_defaults = [
                None if each is None else ast.Constant(value=...) for each in bare.args.kw_defaults
            ]
            bare.decorator_list = []
            bare.body = [ast.Expr(value=ast.Constant(value=...))]
            head, _, _ = ast.unparse(bare).rpartition("\n")
            return re.sub(r"(: [^,=]+)=\.\.\.", r"\1 = ...", f"{head} ...")
        return f"{name}: {self.of_attribute(measurement, name)}"

    def _usable(self, annotation: ast.expr | None, module: ModuleSource) -> str:
        if annotation is None:
            return self._any()
        text = ast.unparse(annotation)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            text = annotation.value
        imported = body_checks.import_statements(module.tree)
        wanted: set[str] = set()
        for node in ast.walk(ast.parse(text, mode="eval")):
            if not isinstance(node, ast.Name) or node.id in self._known or body_checks.is_builtin(node.id):
                continue
            statement, _ = imported.get(node.id, ("from .", False))
            if statement.startswith("from ."):
                return self._any()
            wanted.add(statement)
        self.imports |= wanted
        return text

    def _any(self) -> str:
        if "Any" not in self._known:
            self.imports.add("from typing import Any")
        return "Any"


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.arg]:
    arguments = node.args
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (each for each in (arguments.vararg, arguments.kwarg) if each is not None)


def _protocol_members(module: ModuleSource) -> dict[str, list[str]]:
    """Return the members of each Protocol of a file."""
    return {
        source.name: [*source.attributes, *source.methods]
        for source in module.classes.values()
        if any(base.rpartition(".")[2] == "Protocol" for base in source.bases)
    }
