"""Carry out a `Prepare`: write a component with its ports, and construct it in the host. Nothing else changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from textwrap import indent

from scheduler_refactor import body_checks, code_edits
from scheduler_refactor.host_tree import HostTree, class_of, find_in_tree
from scheduler_refactor.leave_order import rebindings_after_start
from scheduler_refactor.measurement import Measurement, find_host, measure_host
from scheduler_refactor.recipe import ComponentField, Port, Prepare
from scheduler_refactor.refusals import Refusal, Refusals, RefusedError
from scheduler_refactor.source_index import SourceIndex, parse_module

_LINE_LENGTH = 88


def prepare_component(tree: Mapping[str, str], step: Prepare) -> dict[str, str]:
    """Return the tree with the component and its construction.

    Raises:
        RefusedError: a name is taken, a fact is not bound in time or bound again later, or a place is not found.
        ConfigError: a file is not Python.
    """
    refusals = Refusals(step.accepted)
    host = HostTree.read(tree, step.host, [step.attribute])
    _check_names(tree, step, host, refusals)
    _check_fields(step, host.measurement, refusals)
    refusals.check()
    after = dict(tree)
    after[step.component.file] = _with_component(after.get(step.component.file, ""), step)
    module = code_edits.parse_code(after[step.host.file])
    if step.host_import:
        module = code_edits.add_imports(module, [step.host_import])
    code = construction_code(step)
    module, num_places = code_edits.insert_in_method(module, step.host.name, step.method, step.before, code)
    if num_places != 1:
        what = f"{num_places} statements that begin with {step.before!r}" if step.before else "no block of statements"
        message = f"{step.host.name}.{step.method} has {what}"
        place = Refusal(
            path=step.host.file,
            line=host.host.node.lineno,
            rule="place",
            name=step.before or step.method,
            message=message,
        )
        raise RefusedError((place,))
    after[step.host.file] = module.code
    _check_bound(after, step, refusals)
    refusals.check()
    return after


def component_code(step: Prepare) -> str:
    """Return the code of the Protocols and of the component."""
    blocks = [_protocol_code(port, step.component.name) for port in step.ports]
    lines = [f"{port.name}: {port.protocol}" for port in step.ports]
    lines += [_field_line(field) for field in step.fields if field.kind == "fact"]
    lines += [_field_line(field) for field in step.fields if field.kind == "state"]
    body = "\n".join([f'"""{step.doc}"""', "", *lines] if lines else [f'"""{step.doc}"""'])
    blocks.append(f"@dataclass(slots=True, kw_only=True)\nclass {step.component.name}:\n{indent(body, '    ')}\n")
    return "\n\n".join(blocks)


def construction_code(step: Prepare) -> str:
    """Return the statement that makes the component."""
    arguments = [f"{port.name}=self" for port in step.ports]
    arguments += [f"{each.name}={each.value or f'self.{each.name}'}" for each in step.fields if each.kind == "fact"]
    short = f"self.{step.attribute} = {step.component.name}({', '.join(arguments)})\n"
    if len(short) + 8 <= _LINE_LENGTH:
        return short
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"self.{step.attribute} = {step.component.name}(\n{inner})\n"


def _protocol_code(port: Port, component: str) -> str:
    declarations = list(port.members.values())
    lines = [f'"""The members of the scheduler that `{component}` uses."""', ""]
    lines += [line for line in declarations if not line.lstrip().startswith(("def ", "async def ", "@"))]
    for line in declarations:
        if line.lstrip().startswith(("def ", "async def ", "@")):
            lines += ["", line] if lines[-1] else [line]
    body = indent("\n".join(lines).rstrip(), "    ")
    return f"class {port.protocol}(Protocol):\n{body}\n"


def _field_line(field: ComponentField) -> str:
    declared = f"{field.name}: {field.annotation}"
    if field.kind == "fact":
        return declared
    if not field.value:
        return f"{declared} = field(init=False, repr=False)"
    try:
        ast.literal_eval(field.value)
        is_plain = not isinstance(ast.parse(field.value, mode="eval").body, ast.List | ast.Dict | ast.Set)
    except (ValueError, SyntaxError):
        is_plain = False
    return f"{declared} = {field.value}" if is_plain else f"{declared} = field(default_factory=lambda: {field.value})"


def _with_component(text: str, step: Prepare) -> str:
    if not text:
        text = f'"""{step.doc}"""\n\nfrom __future__ import annotations\n'
    used = ["from dataclasses import dataclass"]
    code = component_code(step)
    if " field(" in code:
        used.append("from dataclasses import field")
    if step.ports:
        used.append("from typing import Protocol")
    module = code_edits.add_imports(code_edits.parse_code(text), [*used, *step.imports])
    module = code_edits.add_imports(module, step.type_imports, types=True)
    return code_edits.add_statements(module, code, step.above).code


def _check_names(tree: Mapping[str, str], step: Prepare, host: HostTree, refusals: Refusals) -> None:
    line = host.host.node.lineno
    for part in host.measurement.parts:
        for use in part.methods:
            for access in use.accesses:
                if access.attribute == step.attribute:
                    message = f"the host has a {step.attribute} already"
                    refusals.add(access.path, access.line, "name-clash", step.attribute, message)
        if part.is_own or part.role == "subclass":
            for name in (*part.attributes, *(use.name for use in part.methods)):
                if name == step.attribute:
                    message = f"{part.name} defines {name} already"
                    refusals.add(part.path, part.line, "name-clash", name, message)
    if "__slots__" in host.host.attributes:
        message = f"{step.host.name} has slots; add {step.attribute} to them first"
        refusals.add(step.host.file, line, "slots", step.attribute, message)
    written = [step.component.name, *(port.protocol for port in step.ports)]
    fields = [*(port.name for port in step.ports), *(field.name for field in step.fields)]
    for name in sorted({name for name in (*written, *fields) if (written + fields).count(name) > 1}):
        refusals.add(step.component.file, 1, "name-clash", name, f"the recipe has two {name}")
    if step.component.file in tree:
        module = parse_module(step.component.file, tree[step.component.file])
        bound = body_checks.module_bindings(module.tree)
        imported = body_checks.import_statements(module.tree)
        for name in written:
            if name in bound or name in imported:
                message = f"the file has a {name} already"
                refusals.add(step.component.file, bound.get(name, [1])[0], "name-clash", name, message)
        if step.above and step.above not in module.classes:
            refusals.add(step.component.file, 1, "missing-class", step.above, f"there is no class {step.above}")
        if not body_checks.has_future_annotations(module.tree):
            _check_annotations(step, {*bound, *imported}, refusals)


def _check_annotations(step: Prepare, known: set[str], refusals: Refusals) -> None:
    """In a file that evaluates annotations, their names must be there."""
    texts = [*step.imports, *step.type_imports]
    fresh = {name for text in texts for name in body_checks.import_statements(ast.parse(text))}
    code = ast.parse(component_code(step))
    for node in ast.walk(code):
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        for child in ast.walk(annotation) if annotation is not None else ():
            if isinstance(child, ast.Name) and not body_checks.is_builtin(child.id):
                own = {port.protocol for port in step.ports}
                if child.id not in known | fresh | own:
                    message = f"the annotation {child.id} is evaluated in this file, which does not have it"
                    refusals.add(step.component.file, 1, "annotation", child.id, message)


def _check_fields(step: Prepare, measurement: Measurement, refusals: Refusals) -> None:
    rebound = rebindings_after_start(measurement)
    known = set(_known_members(measurement))
    for field in step.fields:
        if field.kind == "fact" and not field.value and field.name in rebound:
            place = rebound[field.name]
            message = f"{field.name} is bound again here, so the component would keep an old one; route it to a port"
            refusals.add(place.path, place.line, "fact-rebound", field.name, message)
    for port in step.ports:
        for member in port.members:
            if member not in known:
                message = f"no class of the host defines or binds {member}"
                refusals.add(step.host.file, 1, "unknown-member", member, message)


def _known_members(measurement: Measurement) -> Iterator[str]:
    for part in measurement.parts:
        if part.is_own:
            yield from part.attributes
            yield from (use.name for use in part.methods)
        for use in part.methods:
            yield from (access.attribute for access in use.accesses if access.kind == "rebind")


def _check_bound(tree: Mapping[str, str], step: Prepare, refusals: Refusals) -> None:
    """Refuse a fact that the constructor has not bound where the component is made."""
    index = SourceIndex.parse({step.host.file: tree[step.host.file]})
    index.find_module = lambda module, _importer: find_in_tree(tree, module)
    host = class_of(index, step.host)
    measurement = measure_host(index, find_host(index, f"{step.host.file}:{step.host.name}"))
    first, last = _construction_lines(host.node, step)
    early = {each.attribute: each for each in measurement.read_before_bound}
    of_start = {each.attribute for each in measurement.init_order} | {
        name for part in measurement.own_parts() for name in (*part.attributes, *(use.name for use in part.methods))
    }
    for use in host.methods[step.method].node.body if step.method in host.methods else ():
        for node in ast.walk(use):
            if isinstance(node, ast.Attribute) and first <= node.lineno <= last and isinstance(node.ctx, ast.Load):
                if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    continue
                late = node.attr in early and first <= early[node.attr].line <= last
                if late or (step.method == "__init__" and node.attr not in of_start):
                    message = f"self.{node.attr} is not bound where the component is made; name another place"
                    refusals.add(step.host.file, node.lineno, "fact-unbound", node.attr, message)


def _construction_lines(host: ast.ClassDef, step: Prepare) -> tuple[int, int]:
    for node in ast.walk(host):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{step.attribute}":
            return node.lineno, node.end_lineno or node.lineno
    return 0, 0
