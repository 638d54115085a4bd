"""Carry out a `Move`: check that no step changes the meaning of the code, then move bodies and rewrite callers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler_refactor import body_checks, code_edits
from scheduler_refactor.host_access import Access, Escape
from scheduler_refactor.host_tree import HostTree, class_of, find_in_tree
from scheduler_refactor.leave_order import rebindings_after_start
from scheduler_refactor.measurement import MethodUse, find_host, measure_host
from scheduler_refactor.recipe import ClassRef, Move
from scheduler_refactor.refusals import Refusals
from scheduler_refactor.source_index import (
    ClassSource,
    FunctionSource,
    SourceIndex,
    dotted_name,
    parse_module,
)
from scheduler_refactor.text_edits import TextEdits

_LONGEST_ANNOTATION = 300
_LOOKS_AT = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def move_methods(tree: Mapping[str, str], step: Move) -> dict[str, str]:
    """Return the tree after a move.

    Raises:
        RefusedError: it would change the meaning of the code, or a name of the recipe is not there.
        ConfigError: a file is not Python.
    """
    return _Mover(tree=tree, step=step, refusals=Refusals(step.accepted)).move()


@dataclass(slots=True, kw_only=True)
class _Mover:
    """One move: first all checks, with the edits that they find, then the changed files."""

    tree: Mapping[str, str]
    step: Move
    refusals: Refusals
    edits: dict[str, TextEdits] = field(default_factory=dict)

    def move(self) -> dict[str, str]:
        step = self.step
        names = {step.source.name, step.component.name, *step.methods, *step.states}
        host = HostTree.read(self.tree, step.host, names)
        source = class_of(host.index, step.source)
        component = class_of(host.index, step.component)
        moved = [each for each in source.definitions if each.name in step.methods]
        self._check_presence(source, component)
        self._check_members(host, source, component)
        for method in moved:
            body_checks.check_body(method, source, self.refusals)
        self._check_bodies(host)
        self._check_callers(host)
        imports = self._check_names(host.index, moved, component)
        self.refusals.check()
        return self._write(host, moved, imports)

    # Checks

    def _check_presence(self, source: ClassSource, component: ClassSource) -> None:
        for name in self.step.methods:
            if name not in source.methods:
                self._refuse(source, "missing-method", name, f"{source.name} has no method {name}")
            elif name in component.methods or name in component.attributes:
                self._refuse(component, "name-clash", name, f"{component.name} has a {name} already")
        routed = {*self.step.routes.values(), *([self.step.whole] if self.step.whole else [])}
        for name in sorted({*routed, *self.step.facts, *self.step.states}):
            if name not in component.attributes:
                self._refuse(component, "missing-field", name, f"{component.name} has no field {name}")

    def _check_members(self, host: HostTree, source: ClassSource, component: ClassSource) -> None:
        step = self.step
        members = {*step.methods, *step.states}
        order, _ = host.index.linearize(host.host)
        if source not in order:
            self._refuse(source, "no-mixin", source.name, f"{source.name} is no base of {step.host.name}")
        for override in host.measurement.overrides:
            if override.name in members:
                parts = ", ".join(override.parts)
                message = f"{override.name} has several definitions ({parts}); give each its own name first"
                self._refuse(source, "override", override.name, message)
        for reach in host.measurement.reached:
            if reach.name in step.methods and reach.how != "reference" and reach.name not in step.delegates:
                message = f"{reach.name} is reached by its name; keep a delegate or change the name"
                self.refusals.add(reach.path, reach.line, "by-name", reach.name, message)
        for name in step.states:
            for part in order:
                if name in part.attributes and name not in _defaulted(component):
                    message = f"{part.name} gives {name} a value that the field of {component.name} does not have"
                    self.refusals.add(part.path, part.attributes[name].lineno, "class-attribute", name, message)
        for name, rebinding in rebindings_after_start(host.measurement).items():
            if name in step.facts:
                message = f"{name} is bound again here, so {component.name} would keep an old one; route it to a port"
                self.refusals.add(rebinding.path, rebinding.line, "fact-rebound", name, message)

    def _check_bodies(self, host: HostTree) -> None:
        for use in host.methods_of(self.step.source.name):
            if use.name not in self.step.methods:
                continue
            for access in use.accesses:
                if access.via in ("parameter", "field"):
                    self._check_caller(access)
                else:
                    self._check_inner(use, access)
            for unnamed in use.indirect:
                message = f"{use.name} uses a member whose name the syntax does not say: {unnamed.text}"
                self.refusals.add(unnamed.path, unnamed.line, "indirect", use.name, message)
            for escape in use.escapes:
                if escape.via not in ("parameter", "field"):
                    self._check_escape(use, escape)
            self._check_bare(use)

    def _check_inner(self, use: MethodUse, access: Access) -> None:
        """Check one use inside of a moved body, and route it."""
        step, name = self.step, access.attribute
        if access.via in ("super", "class"):
            message = f"{use.name} reaches {name} through a class"
            self.refusals.add(access.path, access.line, access.via, name, message)
        elif name in step.facts and access.kind in ("rebind", "delete"):
            message = f"{use.name} binds {name}, which the host would not see; route it to a port"
            self.refusals.add(access.path, access.line, "fact-rebound", name, message)
        elif name in step.methods or name in step.facts or name in step.states:
            if access.via == "getattr" and name in step.states:
                message = f"{use.name} asks for {name} by its name; a slot of the component answers in another way"
                self.refusals.add(access.path, access.line, "by-name", name, message)
        elif name not in step.routes:
            message = f"{use.name} uses {name}, which the component does not have; route it or make it a field"
            self.refusals.add(access.path, access.line, "unrouted", name, message)
        elif not access.is_certain and (access.is_named or access.via == "getattr"):
            message = f"{use.name} uses {name} of an object that may be another one"
            self.refusals.add(access.path, access.line, "uncertain", name, message)
        elif access.is_named:
            self._edits(access.path).insert(access.line, access.column, f"{step.routes[name]}.")
        elif access.via == "getattr":
            self._route_getattr(access)

    def _route_getattr(self, access: Access) -> None:
        for node in ast.walk(parse_module(access.path, self.tree[access.path]).tree):
            if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (access.line, access.column):
                owner = node.args[0] if node.args else None
                if isinstance(owner, ast.Name) and dotted_name(node.func) in _LOOKS_AT:
                    line, column = owner.end_lineno or 0, owner.end_col_offset or 0
                    self._edits(access.path).insert(line, column, f".{self.step.routes[access.attribute]}")
                    return
        message = f"{access.attribute} is reached by its name in a form that cannot be rewritten"
        self.refusals.add(access.path, access.line, "by-name", access.attribute, message)

    def _check_escape(self, use: MethodUse, escape: Escape) -> None:
        where = f"to {escape.callee}" if escape.callee else f"({escape.how})"
        name_length = _name_length(self.tree[escape.path], escape.line, escape.column)
        if not self.step.whole:
            message = f"{use.name} passes the whole host {where}; name a port for it with `whole`"
            self.refusals.add(escape.path, escape.line, "whole-host", use.name, message)
        elif not escape.is_certain or not name_length:
            message = f"{use.name} passes an object {where} that may be the host"
            self.refusals.add(escape.path, escape.line, "uncertain", use.name, message)
        else:
            self._edits(escape.path).insert(escape.line, escape.column + name_length, f".{self.step.whole}")

    def _check_bare(self, use: MethodUse) -> None:
        """Refuse a bare ``self`` in a place that no other check handles: a comparison, a condition, a text."""
        path = self.step.source.file
        for function in ast.walk(parse_module(path, self.tree[path]).tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.lineno != use.line:
                continue
            listed = {(each.line, each.column) for each in use.escapes}
            for name in _bare_selves(function, listed):
                message = f"{use.name} looks at the whole host"
                self.refusals.add(path, name.lineno, "whole-host", use.name, message)

    def _check_callers(self, host: HostTree) -> None:
        members = {*self.step.methods, *self.step.states}
        for _, _, access in host.uses_outside(self.step.source.name, self.step.methods):
            if access.attribute in members:
                self._check_caller(access)
        for other in host.other_uses(members):
            site = other.site
            if other.receiver in self.step.receivers:
                self._edits(site.path).insert(site.line, site.column, f"{self.step.attribute}.")
            elif not other.is_own and site.name not in self.step.delegates:
                message = f"{other.receiver}.{site.name} may be the host's; name the receiver or keep a delegate"
                self.refusals.add(site.path, site.line, "unknown-receiver", site.name, message)

    def _check_caller(self, access: Access) -> None:
        """Check one use of a moved member outside of the moved bodies, and send it through the component."""
        name = access.attribute
        if name not in self.step.methods and name not in self.step.states:
            return
        kept = name in self.step.delegates
        if access.via == "super" or (access.via == "class" and not kept):
            message = f"{name} is reached through a class, which will not have it"
            self.refusals.add(access.path, access.line, access.via, name, message)
        elif access.via == "getattr" and not kept:
            message = f"{name} is reached by its name; keep a delegate or change the name"
            self.refusals.add(access.path, access.line, "by-name", name, message)
        elif access.is_named and not access.is_certain and not kept:
            message = f"{name} is used of an object that may be another one; keep a delegate"
            self.refusals.add(access.path, access.line, "uncertain", name, message)
        elif access.is_named and access.is_certain and access.via != "class":
            self._edits(access.path).insert(access.line, access.column, f"{self.step.attribute}.")

    def _check_names(
        self, index: SourceIndex, moved: list[FunctionSource], component: ClassSource
    ) -> tuple[list[str], list[str]]:
        """Check the globals of the bodies; return the imports that the target file needs, and those for types."""
        source, target = index.modules[self.step.source.file], index.modules[self.step.component.file]
        for method in moved:
            body_checks.check_evaluated_early(method, source, target, component.node, self.refusals)
        if source is target or not moved:
            return [], []
        needed: dict[str, bool] = {}
        for method in moved:
            for name in body_checks.annotation_names(method):
                needed.setdefault(name, True)
            for name in body_checks.global_names(self.tree[source.path], source.path, method):
                needed[name] = False
        if body_checks.has_future_annotations(source.tree) and not body_checks.has_future_annotations(target.tree):
            message = f"annotations are evaluated in {target.path}, and not here"
            self.refusals.add(source.path, 1, "annotations", "annotations", message)
        return body_checks.check_names(needed, source, target, moved[0].node.lineno, self.refusals)

    # Edits

    def _edits(self, path: str) -> TextEdits:
        return self.edits.setdefault(path, TextEdits())

    def _refuse(self, source: ClassSource, rule: str, name: str, message: str) -> None:
        node = source.methods[name].node if name in source.methods else source.node
        self.refusals.add(source.path, node.lineno, rule, name, message)

    def _write(
        self, host: HostTree, moved: list[FunctionSource], imports: tuple[list[str], list[str]]
    ) -> dict[str, str]:
        step = self.step
        after = dict(self.tree)
        delegates = _delegate_code(step, moved, host, self.refusals)
        self.refusals.check()
        for path, edits in self.edits.items():
            after[path] = edits.apply(after[path])
        check_construction(after, step.host, step.attribute, self.refusals)  # lines are still those of the code
        module = code_edits.parse_code(after[step.source.file])
        module, functions = code_edits.take_functions(module, step.source.name, step.methods)
        after[step.source.file] = module.code
        module = code_edits.parse_code(after[step.component.file])
        module = code_edits.add_imports(module, imports[0])
        module = code_edits.add_imports(module, imports[1], types=True)
        after[step.component.file] = code_edits.append_functions(module, step.component.name, functions).code
        if delegates:
            module = code_edits.parse_code(after[step.host.file])
            after[step.host.file] = code_edits.add_delegates(module, step.host.name, delegates).code
        if step.source != step.host and code_edits.is_empty_class(
            code_edits.parse_code(after[step.source.file]), step.source.name
        ):
            self._remove_mixin(after)
        for path in {step.source.file, step.component.file, step.host.file}:
            after[path] = _without_idle_type_imports(self.tree[path], after[path])
        self.refusals.check()
        return after

    def _remove_mixin(self, after: dict[str, str]) -> None:
        """Remove the emptied mixin, its base and its imports."""
        step, name = self.step, self.step.source.name
        module = code_edits.parse_code(after[step.source.file])
        for comment in code_edits.lost_comments(module, name):
            self.refusals.add(step.source.file, 1, "comment", name, f"the comment would go with the class: {comment}")
        after[step.source.file] = code_edits.remove_class(module, name).code
        module = code_edits.parse_code(after[step.host.file])
        after[step.host.file] = code_edits.drop_base(module, step.host.name, name).code
        for path in sorted(after):
            if name not in after[path]:
                continue
            bound = _bound_as(after[path], name)
            for line in _lines_with_name(self.tree.get(path, ""), {name, *bound}, step):
                message = f"{name} is gone, and this line still names it"
                self.refusals.add(path, line, "mixin-name", name, message)
            if bound:
                after[path] = code_edits.drop_imports(code_edits.parse_code(after[path]), bound).code


def check_construction(tree: Mapping[str, str], host: ClassRef, attribute: str, refusals: Refusals) -> None:
    """Refuse a constructor that uses the component before it is made."""
    index = SourceIndex.parse({host.file: tree[host.file]})
    index.find_module = lambda module, _importer: find_in_tree(tree, module)
    measurement = measure_host(index, find_host(index, f"{host.file}:{host.name}"))
    for step in measurement.read_before_bound:
        if step.attribute == attribute:
            message = f"self.{attribute} is used here before it is made"
            refusals.add(step.path, step.line, "before-construction", attribute, message)


def _delegate_code(step: Move, moved: list[FunctionSource], host: HostTree, refusals: Refusals) -> str:
    """Return the code of the host's forwarding members, without indentation."""
    note = f"  # forwards {step.delegate_note}: use self.{step.attribute}" if step.delegate_note else ""
    same_names = step.host.file == step.source.file or body_checks.has_future_annotations(
        host.index.modules[step.host.file].tree
    )
    code: list[str] = []
    by_name = {method.name: method for method in moved}
    for name in step.delegates:
        if name in step.states:
            code += [
                f"@property\ndef {name}(self):{note}\n    return self.{step.attribute}.{name}\n",
                f"@{name}.setter\ndef {name}(self, value):\n    self.{step.attribute}.{name} = value\n",
            ]
        elif name in by_name:
            code.append(_delegate(step, by_name[name], note, refusals, annotated=same_names))
        else:
            message = f"{name} does not move, so it cannot be delegated"
            refusals.add(step.source.file, 1, "missing-method", name, message)
    return "\n\n".join(code)


def _delegate(step: Move, method: FunctionSource, note: str, refusals: Refusals, *, annotated: bool) -> str:
    node = method.node
    arguments = node.args
    for default in [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]:
        if not isinstance(default, ast.Constant):
            message = f"the delegate of {method.name} would compute this default a second time"
            refusals.add(method.path, default.lineno, "delegate-default", method.name, message)
    if method.is_static or method.is_class_method:
        refusals.add(method.path, node.lineno, "static", method.name, f"{method.name} is called without an object")
        return ""
    shown = ast.parse(ast.unparse(ast.Module(body=[_bare_signature(node, annotated=annotated)], type_ignores=[])))
    (bare,) = shown.body
    head = ast.unparse(bare).removesuffix("...").rstrip()
    is_generator = any(isinstance(child, ast.Yield | ast.YieldFrom) for child in _own_nodes(node))
    awaited = "await " if isinstance(node, ast.AsyncFunctionDef) and not is_generator else ""
    if is_generator:
        head = head.replace("async def ", "def ", 1)
    call = f"self.{step.attribute}.{method.name}" + ("" if method.is_property else f"({_forwarded(arguments)})")
    decorator = "@property\n" if method.is_property else ""
    return f"{decorator}{head}{note}\n    return {awaited}{call}\n"


def _bare_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, annotated: bool) -> ast.stmt:
    bare = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(bare, ast.FunctionDef | ast.AsyncFunctionDef)
    bare.decorator_list = []
    bare.body = [ast.Expr(value=ast.Constant(value=...))]
    every = [*bare.args.posonlyargs, *bare.args.args]
    every[0].annotation = None
    if not annotated:
        bare.returns = None
        extra = [each for each in (bare.args.vararg, bare.args.kwarg) if each is not None]
        for parameter in (*every, *bare.args.kwonlyargs, *extra):
            parameter.annotation = None
    return bare


def _forwarded(arguments: ast.arguments) -> str:
    placed = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][1:]
    if arguments.vararg is not None:
        placed.append(f"*{arguments.vararg.arg}")
    placed += [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        placed.append(f"**{arguments.kwarg.arg}")
    return ", ".join(placed)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(child)


def _defaulted(component: ClassSource) -> set[str]:
    """Return the fields of a component that have a default."""
    found = set()
    for name, statement in component.attributes.items():
        value = statement.value if isinstance(statement, ast.AnnAssign) else None
        words = {word.arg for word in value.keywords} if isinstance(value, ast.Call) else set()
        if value is not None and not (isinstance(value, ast.Call) and not words & {"default", "default_factory"}):
            found.add(name)
    return found


def _name_length(text: str, line: int, column: int) -> int:
    """Return the length in bytes of the name at a place; 0 if another expression is there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and (node.lineno, node.col_offset) == (line, column):
            return len(node.id.encode())
    return 0


def _bare_selves(function: ast.FunctionDef | ast.AsyncFunctionDef, listed: set[tuple[int, int]]) -> Iterator[ast.Name]:
    placed = [*function.args.posonlyargs, *function.args.args]
    if not placed:
        return
    owner = placed[0].arg
    parents = {id(child): parent for parent in ast.walk(function) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Name) or node.id != owner or not isinstance(node.ctx, ast.Load):
            continue
        parent = parents[id(node)]
        known = (
            isinstance(parent, ast.Attribute | ast.NamedExpr)
            or (isinstance(parent, ast.Assign | ast.AnnAssign) and parent.value is node)
            or (isinstance(parent, ast.Tuple) and isinstance(parents[id(parent)], ast.Assign))
            or (isinstance(parent, ast.Call) and dotted_name(parent.func) in _LOOKS_AT and parent.args[0] is node)
            or (node.lineno, node.col_offset) in listed
        )
        if not known:
            yield node


def _bound_as(text: str, name: str) -> set[str]:
    """Return the names under which a file imports a class."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == name
    }


def _lines_with_name(text: str, names: set[str], step: Move) -> list[int]:
    """Return the lines that name a class, without its definition, its imports and its place among the host's bases."""
    found = set()
    tree = ast.parse(text)
    bases = {
        id(base)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == step.host.name
        for base in node.bases
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name() if node.id in names and id(node) not in bases:
                found.add(node.lineno)
            case ast.Attribute() if node.attr in names and id(node) not in bases:
                found.add(node.lineno)
            case ast.Constant(value=str() as word) if word.rpartition(".")[2] in names:
                found.add(node.lineno)
    return sorted(found)


def _without_idle_type_imports(before: str, after: str) -> str:
    """Remove imports for types that nothing uses any more."""
    bound = {name for name, (_, is_type) in body_checks.import_statements(ast.parse(after)).items() if is_type}
    idle = {name for name in bound if _is_used(before, name) and not _is_used(after, name)}
    if not idle:
        return after
    module = code_edits.drop_imports(code_edits.parse_code(after), idle, only_types=True)
    if not _is_used(module.code, "TYPE_CHECKING"):
        module = code_edits.drop_imports(module, {"TYPE_CHECKING"})
    return module.code


def _is_used(text: str, name: str) -> bool:
    """Whether a file uses a name, in code or in an annotation that is a string."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id == name:
            return True
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if len(text) < _LONGEST_ANNOTATION and name in re.findall(r"\w+", text):
            return True
    return False
