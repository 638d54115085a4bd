"""Read which attributes of an object one function uses, and how, from its syntax and its scopes.

The object is the *host*: the scheduler that a mixin's ``self`` is, or that a function gets as an argument. The rules:

- A use has one kind. ``self.x`` alone reads. ``self.x = ...`` rebinds, in every place that can bind: a tuple, ``for``,
  ``with ... as``, a comprehension. ``self.x += 1`` reads and rebinds. ``del self.x`` deletes. ``self.x()`` calls.
- A change of what is reached through ``x`` mutates it: ``self.x.y = 1``, ``self.x[0] += 1``, ``del self.x[0]``, and a
  call of a method that changes a built-in container (``self.x.append(1)``). Any other call of a method of the value
  (``self.x.run()``) invokes it: whether that changes the value is unknown.
- A local name that is bound to the host or to such a chain is an alias, in nested functions too. With several
  bindings, or a condition, its uses are not certain. What a loop takes out of a container is no alias.
- A name in a string counts where it is a literal or a loop over literals: ``getattr(self, "x")``. Else it is unknown.
- A bare host that is passed, returned or stored is listed. It is followed into functions and classes that are known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from scheduler_refactor.source_index import FunctionNode, dotted_name

AccessKind: TypeAlias = Literal["read", "rebind", "mutate", "call", "invoke", "delete"]
Via: TypeAlias = Literal["self", "alias", "getattr", "super", "class", "field", "parameter"]

MUTATING_METHODS = frozenset(
    {
        *("append", "appendleft", "extend", "extendleft", "insert", "remove", "pop", "popleft", "popitem", "clear"),
        *("update", "add", "discard", "setdefault", "sort", "reverse", "rotate", "put", "put_nowait", "subtract"),
        *("difference_update", "intersection_update", "symmetric_difference_update", "move_to_end"),
    }
)
"""Methods that change a built-in container."""

_BY_NAME: dict[str, AccessKind] = {
    "getattr": "read",
    "hasattr": "read",
    "setattr": "rebind",
    "delattr": "delete",
    "patch.object": "rebind",
    "monkeypatch.setattr": "rebind",
    "monkeypatch.delattr": "delete",
}
_BRANCHES = (ast.If, ast.While, ast.Try, ast.TryStar, ast.Match)
_HARMLESS = frozenset({"isinstance", "id", "type", "callable", "issubclass", "super"})


class Access(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One use of a host attribute.

    Args:
        path: file of the use.
        line: its line, from 1.
        column: its column, from 0, in bytes of UTF-8.
        attribute: the host's attribute.
        kind: what the use does.
        via: how the host is reached.
        member: for ``invoke`` and ``mutate`` by a call, the method of the value.
        is_named: whether the attribute's name is written there, and not an alias of its value or a string.
        is_certain: false if the object may be another one.
        is_deferred: whether it is inside of a nested function or lambda, which runs later.
        is_conditional: whether it is inside of a branch or a loop.
    """

    path: str
    line: int
    column: int
    attribute: str
    kind: AccessKind
    via: Via = "self"
    member: str = ""
    is_named: bool = True
    is_certain: bool = True
    is_deferred: bool = False
    is_conditional: bool = False


class Escape(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A place where the bare host goes elsewhere.

    Args:
        path: file of the place.
        line: its line.
        column: its column, of the host's name.
        how: an argument, a return value, or stored.
        callee: the called expression of an argument, as text.
        parameter: the argument's place, from 0, or its name; ``*`` for a starred one.
        via: how the host is reached.
        is_certain: false if the object may be another one.
    """

    path: str
    line: int
    column: int
    how: Literal["argument", "returned", "stored"]
    callee: str = ""
    parameter: str = ""
    via: Via = "self"
    is_certain: bool = True


class Indirect(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A use whose attribute the syntax does not say.

    Args:
        path: file of the use.
        line: its line.
        text: the expression.
    """

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Origin:
    """What an expression denotes: the host, what an attribute of it reaches, or a component that holds the host."""

    what: Literal["host", "attribute", "component", "super"]
    name: str = ""
    via: Via = "self"
    is_certain: bool = True

    def doubted(self) -> Origin:
        """Return the same origin, as one of several."""
        return Origin(self.what, self.name, self.via, False)

    def aliased(self) -> Origin:
        """Return the same origin under another name."""
        return Origin(self.what, self.name, "alias" if self.via == "self" else self.via, self.is_certain)


Binding: TypeAlias = ast.expr | Origin | None
_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


@dataclass(slots=True)
class _Scope:
    """The names that one function, lambda, class body or comprehension binds."""

    parent: _Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    is_class: bool = False

    def bind(self, name: str, value: Binding) -> None:
        self.bindings.setdefault(name, []).append(value)


@dataclass(slots=True, kw_only=True)
class AccessReader:  # noqa: SCH003 - the scope of one function
    """Collects the uses in one function.

    Args:
        path: the file of the function.
        parameters: parameters that hold an origin, such as ``self``.
        class_name: the class whose private names (``__x``) the function uses.
        is_host_class: whether a name of this file is a class of the host.
        host_fields: fields of the component through which its methods reach the host.
        accesses, escapes, indirect: what the read functions do with the host, in the order of evaluation.
    """

    path: str
    parameters: dict[str, Origin]
    class_name: str = ""
    is_host_class: Callable[[str], bool] = lambda _name: False
    host_fields: frozenset[str] = frozenset()
    accesses: list[Access] = field(default_factory=list)
    escapes: list[Escape] = field(default_factory=list)
    indirect: list[Indirect] = field(default_factory=list)
    _depth: int = 0
    _branches: int = 0
    _evaluating: set[tuple[int, str]] = field(default_factory=set)

    def read(self, function: FunctionNode) -> None:
        """Read the body of the function. Its decorators and defaults belong to the scope around it."""
        scope = _Scope(parent=None)
        _bind_parameters(function.args, scope, self.parameters)
        _bind_all(function.body, scope)
        self._statements(function.body, scope)

    def read_module(self, tree: ast.Module) -> None:
        """Read the statements of a module, without its functions and classes."""
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        body = [statement for statement in tree.body if not isinstance(statement, defined)]
        scope = _Scope(parent=None)
        _bind_all(body, scope)
        scope.bindings = {name: values for name, values in scope.bindings.items() if not self.is_host_class(name)}
        self._statements(body, scope)

    # Statements

    def _statements(self, body: list[ast.stmt], scope: _Scope) -> None:
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: _Scope) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._uses(node.decorator_list, scope)
                self._function(node.args, node.body, scope)
            case ast.ClassDef():
                self._class(node, scope)
            case ast.Assign():
                self._assigned(node.value, node.targets, scope)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assigned(node.value, [node.target], scope)
            case ast.AugAssign():
                self._use(node.value, scope)
                self._augmented(node.target, scope)
            case ast.For() | ast.AsyncFor():
                self._use(node.iter, scope)
                self._branches += 1
                self._use(node.target, scope, "rebind")
                self._statements([*node.body, *node.orelse], scope)
                self._branches -= 1
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._use(item.context_expr, scope)
                    self._uses([item.optional_vars], scope, "rebind")
                self._statements(node.body, scope)
            case ast.Delete():
                self._uses(node.targets, scope, "delete")
            case ast.Return(value=ast.expr() as value):
                self._returned(value, scope)
            case _:
                self._branch(node, scope)

    def _class(self, node: ast.ClassDef, scope: _Scope) -> None:
        self._uses((*node.decorator_list, *node.bases, *(word.value for word in node.keywords)), scope)
        inner = _Scope(parent=scope, is_class=True)
        _bind_all(node.body, inner)
        outer_class, self.class_name = self.class_name, node.name
        self._statements(node.body, inner)
        self.class_name = outer_class

    def _branch(self, node: ast.stmt, scope: _Scope) -> None:
        condition = _condition(node)
        self._uses([condition], scope)
        is_branch = isinstance(node, _BRANCHES)
        self._branches += is_branch
        for child in ast.iter_child_nodes(node):
            if child is not condition:
                self._child(child, scope)
        self._branches -= is_branch

    def _child(self, child: ast.AST, scope: _Scope) -> None:
        if isinstance(child, ast.stmt):
            self._statement(child, scope)
        elif isinstance(child, ast.expr):
            self._use(child, scope)
        else:  # an exception handler, a case, a pattern
            for grandchild in ast.iter_child_nodes(child):
                self._child(grandchild, scope)

    def _assigned(self, value: ast.expr, targets: list[ast.expr], scope: _Scope) -> None:
        if any(not isinstance(target, ast.Name) for target in targets):
            self._bare(value, scope, "stored")
        self._use(value, scope)
        self._uses(targets, scope, "rebind")

    def _returned(self, value: ast.expr, scope: _Scope) -> None:
        self._bare(value, scope, "returned")
        self._use(value, scope)

    def _augmented(self, target: ast.expr, scope: _Scope) -> None:
        if isinstance(target, ast.Attribute) and any(o.what == "host" for o in self._origins(target.value, scope)):
            self._use(target, scope, "read")
            self._use(target, scope, "rebind")
        elif isinstance(target, ast.Name):  # in place only if the value is mutable
            for origin in self._lookup(target.id, scope):
                if origin.what == "attribute":
                    self._record(origin.doubted(), origin.name, "mutate", target)
        else:
            self._use(target, scope, "rebind")

    def _function(self, arguments: ast.arguments, body: list[ast.stmt], scope: _Scope) -> None:
        self._uses((*arguments.defaults, *arguments.kw_defaults), scope)
        inner = _Scope(parent=scope)
        _bind_parameters(arguments, inner, self._defaults(arguments, scope))
        _bind_all(body, inner)
        self._depth += 1
        self._statements(body, inner)
        self._depth -= 1

    def _defaults(self, arguments: ast.arguments, scope: _Scope) -> dict[str, Origin]:
        """Return the parameters of a nested function whose default is the host: ``lambda s=self: s.x``."""
        placed = [*arguments.posonlyargs, *arguments.args]
        placed = placed[len(placed) - len(arguments.defaults) :]
        pairs = [*zip(placed, arguments.defaults, strict=True)]
        named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        pairs += [(parameter, default) for parameter, default in named if default is not None]
        found = {name.arg: self._origins(default, scope) for name, default in pairs}
        return {name: origins[0].aliased().doubted() for name, origins in found.items() if origins}

    # Expressions

    def _uses(self, nodes: Iterable[ast.expr | None], scope: _Scope, kind: AccessKind = "read") -> None:
        for node in nodes:
            if node is not None:
                self._use(node, scope, kind)

    def _stored(self, nodes: list[ast.expr], scope: _Scope, kind: AccessKind = "read") -> None:
        for node in nodes:
            self._bare(node, scope, "stored")
            self._use(node, scope, kind)

    def _use(self, node: ast.expr, scope: _Scope, kind: AccessKind = "read", member: str = "") -> None:
        """Record the uses in an expression. `kind` is what the code does with its value."""
        binding: AccessKind = kind if kind in ("rebind", "delete") else "read"
        match node:
            case ast.Name():
                self._name(node, scope, kind, member)
            case ast.Attribute():
                self._attribute(node, scope, kind, member)
            case ast.Subscript():
                self._use(node.slice, scope)
                self._use(node.value, scope, *_through(kind, member, of_call=False))
            case ast.Call():
                self._call(node, scope, kind, member)
            case ast.Starred():
                self._use(node.value, scope, binding)
            case ast.Tuple() | ast.List() | ast.Set():
                self._stored(node.elts, scope, binding)
            case ast.Dict():
                self._uses(node.keys, scope)
                self._stored(node.values, scope)
            case ast.NamedExpr() | ast.IfExp() | ast.BoolOp():
                if isinstance(node, ast.IfExp):
                    self._use(node.test, scope)
                for part in _alternatives(node):
                    self._use(part, scope, kind, member)
            case ast.Lambda():
                returned = ast.copy_location(ast.Return(value=node.body), node.body)
                self._function(node.args, [returned], scope)
            case ast.Yield(value=ast.expr() as value):
                self._returned(value, scope)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node, scope)
            case _:
                for inner in ast.iter_child_nodes(node):
                    self._child(inner, scope)

    def _name(self, node: ast.Name, scope: _Scope, kind: AccessKind, member: str) -> None:
        for origin in self._lookup(node.id, scope):
            if origin.what == "attribute" and kind in ("mutate", "invoke", "call"):
                self._record(origin, origin.name, kind, node, member)

    def _comprehension(self, node: _Comprehension, scope: _Scope) -> None:
        inner = _Scope(parent=scope)
        for generator in node.generators:
            for name in _target_names(generator.target):
                inner.bind(name, None)
        for number, generator in enumerate(node.generators):
            self._use(generator.iter, inner if number else scope)
            self._use(generator.target, inner, "rebind")
            self._uses(generator.ifs, inner)
        self._stored([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inner)

    def _attribute(self, node: ast.Attribute, scope: _Scope, kind: AccessKind, member: str) -> None:
        name = self._mangled(node.attr)
        hosts = [origin for origin in self._origins(node.value, scope) if origin.what in ("host", "super")]
        if hosts and name == "__dict__":
            self._note_unknown(node)
        elif hosts and name != "__class__":
            for origin in hosts:
                self._record(origin, name, kind, node, member)
        self._use(node.value, scope, *_through(kind, node.attr if kind == "call" else member))

    def _call(self, node: ast.Call, scope: _Scope, kind: AccessKind, member: str) -> None:
        called = dotted_name(node.func)
        if _by_name_kind(called) and node.args and self._hosts(node.args[0], scope):
            self._by_name(node, scope, kind, member)
            return
        if called == "object.__setattr__" and len(node.args) > 1 and self._hosts(node.args[0], scope):
            self._named(node, node.args[1], self._hosts(node.args[0], scope), "rebind", scope)
            self._use(node.args[-1], scope)
            return
        if called == "vars" and node.args and self._hosts(node.args[0], scope):
            self._note_unknown(node)
            return
        if self._called_by_getter(node, scope):
            return
        self._use(node.func, scope, "call")
        of_class = self._is_method_of_host_class(node.func)  # Mixin.method(self)
        for place, argument in enumerate(node.args):
            if called not in _HARMLESS and not of_class:
                starred = isinstance(argument, ast.Starred)
                self._bare(argument, scope, "argument", called or "...", "*" if starred else str(place))
            self._use(argument, scope)
            of_class = self._is_method_of_host_class(argument)  # partial(Mixin.method, self)
        for keyword in node.keywords:
            self._bare(keyword.value, scope, "argument", called or "...", keyword.arg or "**")
            self._use(keyword.value, scope)

    def _by_name(self, node: ast.Call, scope: _Scope, kind: AccessKind, member: str) -> None:
        """Record ``getattr(self, "x")`` and its like; the value of ``getattr`` may be called or changed."""
        called = dotted_name(node.func)
        done = _by_name_kind(called) or "read"
        if called == "getattr" and kind in ("call", "mutate", "invoke"):
            done = kind
        if len(node.args) > 1:
            self._named(node, node.args[1], self._hosts(node.args[0], scope), done, scope, member)
        self._uses(node.args[isinstance(node.args[0], ast.Name) :], scope)

    def _named(
        self,
        node: ast.Call,
        name: ast.expr,
        hosts: list[Origin],
        kind: AccessKind,
        scope: _Scope,
        member: str = "",
    ) -> None:
        words = self._strings(name, scope)
        if words is None:
            self._note_unknown(node)
            return
        for word in words:
            for origin in hosts:
                certain = origin.is_certain and len(words) == 1
                self._record(Origin("host", via="getattr", is_certain=certain), word, kind, node, member)

    def _called_by_getter(self, node: ast.Call, scope: _Scope) -> bool:
        """Record ``attrgetter("x")(self)`` and ``methodcaller("x")(self)``."""
        maker = node.func
        if not (isinstance(maker, ast.Call) and node.args and (hosts := self._hosts(node.args[0], scope))):
            return False
        made = dotted_name(maker.func).rpartition(".")[2]
        if made not in ("attrgetter", "methodcaller") or not maker.args:
            return False
        self._named(node, maker.args[0], hosts, "call" if made == "methodcaller" else "read", scope)
        return True

    # Names

    def _hosts(self, node: ast.expr, scope: _Scope) -> list[Origin]:
        return [origin for origin in self._origins(node, scope) if origin.what == "host"]

    def _origins(self, node: ast.expr, scope: _Scope) -> list[Origin]:
        """Return what an expression may denote; nothing for a value that is none of the host's."""
        match node:
            case ast.Name():
                return self._lookup(node.id, scope)
            case ast.Attribute():
                return self._attribute_origins(node, scope)
            case ast.Subscript() | ast.Starred() | ast.Await():
                inner = self._origins(node.value, scope)
                return [origin for origin in inner if origin.what == "attribute"]
            case ast.NamedExpr():
                return self._origins(node.value, scope)
            case ast.IfExp() | ast.BoolOp():
                return [o.doubted() for part in _alternatives(node) for o in self._origins(part, scope)]
            case ast.Call():
                return self._call_origins(node, scope)
            case _:
                return []

    def _attribute_origins(self, node: ast.Attribute, scope: _Scope) -> list[Origin]:
        found: list[Origin] = []
        for origin in self._origins(node.value, scope):
            match origin.what:
                case "host" if node.attr == "__class__":
                    found.append(Origin("host", via="class", is_certain=origin.is_certain))
                case "host":
                    found.append(Origin("attribute", self._mangled(node.attr), origin.via, origin.is_certain))
                case "attribute":
                    found.append(origin)
                case "component" if node.attr in self.host_fields:
                    found.append(Origin("host", via="field", is_certain=origin.is_certain))
        return found

    def _call_origins(self, node: ast.Call, scope: _Scope) -> list[Origin]:
        called = dotted_name(node.func)
        if called == "super":
            return [Origin("super", via="super")] if self._in_host(node, scope) else []
        if called == "type" and len(node.args) == 1:
            return [Origin("host", via="class", is_certain=o.is_certain) for o in self._hosts(node.args[0], scope)]
        if called == "getattr" and len(node.args) > 1 and (hosts := self._hosts(node.args[0], scope)):
            words = self._strings(node.args[1], scope) or []
            certain = len(words) == 1
            return [Origin("attribute", word, "getattr", certain and o.is_certain) for word in words for o in hosts]
        return []

    def _in_host(self, node: ast.Call, scope: _Scope) -> bool:
        if len(node.args) == 2:
            return bool(self._hosts(node.args[1], scope))
        return any(origin.what == "host" and origin.via != "parameter" for origin in self.parameters.values())

    def _lookup(self, name: str, scope: _Scope | None) -> list[Origin]:
        start = scope
        while scope is not None:
            visible = not scope.is_class or scope is start
            if name in scope.bindings and name not in scope.outside and visible:
                return self._bound(name, scope)
            scope = scope.parent
        return [Origin("host", via="class")] if self.is_host_class(name) else []

    def _bound(self, name: str, scope: _Scope) -> list[Origin]:
        key = (id(scope), name)
        if key in self._evaluating:
            return []
        bindings = scope.bindings[name]
        self._evaluating.add(key)
        found: list[Origin] = []
        for value in bindings:
            if isinstance(value, Origin):
                found.append(value)
            elif value is not None:
                found += [origin.aliased() for origin in self._origins(value, scope)]
        self._evaluating.discard(key)
        if len(bindings) > 1 and (len(set(found)) > 1 or len(found) < len(bindings)):
            found = [origin.doubted() for origin in found]
        return list(dict.fromkeys(found))

    def _strings(self, node: ast.expr, scope: _Scope | None) -> list[str] | None:
        """Return the strings that an expression may be, if the syntax says all of them."""
        match node:
            case ast.Constant(value=str() as word):
                return [word]
            case ast.IfExp():
                parts = [self._strings(node.body, scope), self._strings(node.orelse, scope)]
                return None if None in parts else [word for part in parts if part for word in part]
            case ast.Name():
                while scope is not None and node.id not in scope.bindings:
                    scope = scope.parent
                if scope is None or (id(scope), node.id) in self._evaluating:
                    return None
                words: list[str] = []
                for value in scope.bindings[node.id]:
                    part = self._strings(value, None) if isinstance(value, ast.expr) else None
                    if part is None:
                        return None
                    words += part
                return words
            case _:
                return None

    def _is_method_of_host_class(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and self.is_host_class(dotted_name(node.value))

    def _mangled(self, name: str) -> str:
        if name.startswith("__") and not name.endswith("__") and self.class_name.strip("_"):
            return f"_{self.class_name.lstrip('_')}{name}"
        return name

    def _record(self, origin: Origin, name: str, kind: AccessKind, node: ast.expr, member: str = "") -> None:
        if kind == "invoke" and member in MUTATING_METHODS:
            kind = "mutate"
        access = Access(
            path=self.path,
            line=_line(node),
            column=_column(node),
            attribute=name,
            kind=kind,
            via=origin.via,
            member=member if kind in ("invoke", "mutate") else "",
            is_named=isinstance(node, ast.Attribute),
            is_certain=origin.is_certain,
            is_deferred=self._depth > 0,
            is_conditional=self._branches > 0,
        )
        self.accesses.append(access)

    def _note_unknown(self, node: ast.expr) -> None:
        self.indirect.append(Indirect(path=self.path, line=node.lineno, text=ast.unparse(node)))

    def _bare(
        self,
        node: ast.expr,
        scope: _Scope,
        how: Literal["argument", "returned", "stored"],
        callee: str = "",
        parameter: str = "",
    ) -> None:
        if isinstance(node, ast.Call | ast.NamedExpr):
            return
        self.escapes += [
            Escape(
                path=self.path,
                line=node.lineno,
                column=node.col_offset,
                how=how,
                callee=callee,
                parameter=parameter,
                via=origin.via,
                is_certain=origin.is_certain,
            )
            for origin in self._hosts(node, scope)
            if origin.via != "class"
        ]


def _line(node: ast.expr) -> int:
    """Return the line on which the attribute's own name is: the last of a chain that is cut over lines."""
    return (node.end_lineno or node.lineno) if isinstance(node, ast.Attribute) else node.lineno


def _column(node: ast.expr) -> int:
    if isinstance(node, ast.Attribute):
        return (node.end_col_offset or 0) - len(node.attr.encode())
    return node.col_offset


def _by_name_kind(called: str) -> AccessKind | None:
    return _BY_NAME.get(called) or _BY_NAME.get(".".join(called.split(".")[-2:]))


def _condition(node: ast.stmt) -> ast.expr | None:
    """Return what a branch evaluates in any case."""
    if isinstance(node, ast.If | ast.While):
        return node.test
    return node.subject if isinstance(node, ast.Match) else None


def _through(kind: AccessKind, member: str, *, of_call: bool = True) -> tuple[AccessKind, str]:
    """Return what using a part of a value in some way does with the value."""
    if kind in ("rebind", "delete", "mutate"):
        return "mutate", ""
    if kind == "call" and of_call:
        return "invoke", member
    if kind == "invoke":
        return "invoke", member
    return "read", ""


def _bind_parameters(arguments: ast.arguments, scope: _Scope, origins: dict[str, Origin]) -> None:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for parameter in every:
        if parameter is not None:
            scope.bind(parameter.arg, origins.get(parameter.arg))


def _alternatives(node: ast.NamedExpr | ast.IfExp | ast.BoolOp) -> list[ast.expr]:
    """Return the expressions of which one is the value of the whole."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return node.values if isinstance(node, ast.BoolOp) else [node.value]


def _bind_all(body: list[ast.stmt], scope: _Scope) -> None:
    """Bind every name that the statements bind in their scope, without those of nested scopes."""
    for node in _own_nodes(body):
        for target, value in _bound_targets(node):
            _bind_target(target, value, scope)
        for name in _bound_names(node):
            scope.bind(name, None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _bind_nonlocal(node, scope)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.outside.update(node.names)


def _bound_targets(node: ast.AST) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return the targets of a statement with their values; None for an unknown value."""
    match node:
        case ast.Assign():
            return [(target, node.value) for target in node.targets]
        case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
            return [(node.target, node.value)]
        case ast.AugAssign():
            return [(node.target, None)]
        case ast.For() | ast.AsyncFor():
            values = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else [None]
            return [(node.target, value) for value in values]
        case ast.withitem(optional_vars=ast.expr() as target):
            return [(target, None)]
        case _:
            return []


def _bound_names(node: ast.AST) -> list[str]:
    """Return the names that a statement or pattern binds without a target."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        case (
            ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name)
        ):
            return [name]
        case ast.MatchMapping(rest=str() as name):
            return [name]
        case _:
            return []


def _bind_nonlocal(function: FunctionNode, scope: _Scope) -> None:
    names = {name for node in ast.walk(function) if isinstance(node, ast.Nonlocal) for name in node.names}
    for name in names & scope.bindings.keys():
        scope.bind(name, None)


def _bind_target(target: ast.expr, value: ast.expr | None, scope: _Scope) -> None:
    match target:
        case ast.Name():
            scope.bind(target.id, value)
        case ast.Tuple() | ast.List():
            paired = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            exact = paired and not any(isinstance(each, ast.Starred) for each in target.elts)
            for place, element in enumerate(target.elts):
                part = value.elts[place] if exact and isinstance(value, ast.Tuple | ast.List) else None
                _bind_target(element, None if isinstance(part, ast.Starred) else part, scope)
        case ast.Starred():
            _bind_target(target.value, None, scope)


def _target_names(target: ast.expr) -> Iterator[str]:
    yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of one scope. A walrus inside of a comprehension belongs to the scope around it."""
    stack: list[ast.AST] = list(reversed(body))
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        stack.extend(reversed(list(ast.iter_child_nodes(node))))
