"""The table of rules, and the rules: each reads a parsed file and yields problems.

A rule judges by what one file says. It does not follow a call into another file, and it does not guess: where a file
does not show that something is wrong, nothing is reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import UnionType

import attrs
import msgspec

from scheduler_components.component_lint.class_info import (
    CONSTRUCTORS,
    ClassInfo,
    ClassKind,
    FieldInfo,
    Function,
    ImportedNames,
    is_any,
    last_name,
    methods_of,
    names_bound_in,
    parameters_of,
    read_class,
    root_name,
    unquoted,
)

__all__ = ["RULES", "Limits", "Problem", "Rule", "find_problems"]


class Problem(msgspec.Struct, frozen=True, order=True):
    """One place that breaks one rule.

    Attributes:
        line: counted from 1.
        column: counted from 0.
        code: a key of ``RULES``.
        message: what stands there.
    """

    line: int
    column: int
    code: str
    message: str


class Rule(msgspec.Struct, frozen=True):
    """One rule.

    Attributes:
        code: how flake8 selects and ignores it.
        name: how people speak of it.
        subject: what it looks for.
        hint: what to do instead.
    """

    code: str
    name: str
    subject: str
    hint: str

    def at(self, node: ast.AST, message: str) -> Problem:
        """Make a problem of this rule at a statement or an expression."""
        return Problem(getattr(node, "lineno", 1), getattr(node, "col_offset", 0), self.code, message)


WHOLE_SCHEDULER = Rule(
    "SCH001",
    "whole-scheduler",
    "a field or a method's parameter that holds the whole scheduler, or a use of self.scheduler",
    "ask for a small port with the members that are really read",
)
MIXIN = Rule(
    "SCH002",
    "mixin",
    "a mixin class, a class made of mixins, or a method whose self is annotated as another class",
    "make it a component of its own that is given what it reads",
)
TOO_MANY_FIELDS = Rule(
    "SCH003",
    "too-many-fields",
    "a component with more fields than fit in one head (7, an option)",
    "split it by subject, or group values that travel together",
)
UNTYPED_CALLABLE = Rule(
    "SCH004",
    "untyped-callable",
    "a field that is a Callable without its parameter types",
    "ask for a port with a named method; a bare callable only for one typed, stateless verb such as a clock",
)
MANY_CALLABLES = Rule(
    "SCH005",
    "many-callables",
    "more typed callables in one class than a clock and one other verb (2, an option)",
    "gather what they read in one port, so that no page of lambdas wires it",
)
ANY_FIELD = Rule(
    "SCH006",
    "any-field",
    "a field of a component typed Any",
    "name the type, or a Protocol with the members that are used",
)
AMBIENT_CONTEXT = Rule(
    "SCH007",
    "ambient-context",
    "a value taken from the surroundings: a global get_...(), a singleton, a global statement, the environment",
    "pass the value in where the component is composed",
)
IO_IN_CONSTRUCTOR = Rule(
    "SCH008",
    "io-in-constructor",
    "a socket, thread, process or file opened while an object is constructed",
    "store in the constructor, and open in an open_...() function that hands the resource in",
)
ENABLED_GATE = Rule(
    "SCH009",
    "enabled-gate",
    "a branch on self.enable..., self.enabled or the like",
    "decide once where it is composed, and give a null object where the feature is off",
)
TOO_MANY_PARAMETERS = Rule(
    "SCH010",
    "too-many-parameters",
    "a component's constructor with more parameters than fit in one head (7, an option)",
    "split the component by subject, or pass values that travel together as one",
)

RULES: Mapping[str, Rule] = {
    rule.code: rule
    for rule in (
        WHOLE_SCHEDULER,
        MIXIN,
        TOO_MANY_FIELDS,
        UNTYPED_CALLABLE,
        MANY_CALLABLES,
        ANY_FIELD,
        AMBIENT_CONTEXT,
        IO_IN_CONSTRUCTOR,
        ENABLED_GATE,
        TOO_MANY_PARAMETERS,
    )
}
"""Every rule by its code. A code is never given to another rule."""


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of the rules that count.

    Attributes:
        max_fields: collaborators and settings that a component may ask for; its own state does not count.
        max_parameters: parameters of a component's constructor, ``self`` not counted.
        max_callables: typed callables among the fields.
    """

    max_fields: int = attrs.field(default=7, metadata={"help": "Fields of one component."})
    max_parameters: int = attrs.field(default=7, metadata={"help": "Parameters of a component's constructor."})
    max_callables: int = attrs.field(default=2, metadata={"help": "Callables among the fields of one class."})


def find_problems(tree: ast.Module, filename: str, limits: Limits) -> list[Problem]:
    """Return what is wrong with one file, by line; a problem is told once.

    Args:
        tree: the parsed file.
        filename: decides whether the file may read the environment.
        limits: of the rules that count.
    """
    return sorted(set(_all_problems(tree, filename, limits)))


def _all_problems(tree: ast.Module, filename: str, limits: Limits) -> Iterator[Problem]:
    names = ImportedNames(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    siblings = {node.name: node for node in classes}
    for node in classes:
        facts = read_class(node, names, siblings)
        yield from _check_mixin(node)
        yield from _check_constructors(node, names)
        if facts.kind in (ClassKind.COMPONENT, ClassKind.VALUE):
            yield from _check_whole_scheduler(facts)
            yield from _check_callables(facts, names, limits)
        if facts.kind is ClassKind.COMPONENT:
            yield from _check_counts(facts, limits)
            yield from _check_any(facts, names)
    yield from _check_ambient_context(tree, names, filename)
    yield from _check_enabled_gates(tree)


# Who knows whom.

_MIXIN = re.compile(r"\w*Mixin\d*")
_WHOLE_TYPE = re.compile(r"\w*Scheduler")
_WHOLE_FIELDS = ("scheduler", "_scheduler")


def _check_mixin(node: ast.ClassDef) -> Iterator[Problem]:
    """Find mixins by their names, by the classes made of them, and by a borrowed ``self``."""
    mixins = [name for name in map(last_name, node.bases) if _MIXIN.fullmatch(name)]
    if _MIXIN.fullmatch(node.name):
        yield MIXIN.at(node, f"{node.name} is a mixin: it reads and writes the fields of its host")
        return
    if mixins:
        yield MIXIN.at(node, f"{node.name} is made of mixins ({', '.join(mixins)})")
    borrowed = [method for method in methods_of(node) if _host_of(method) not in {"", "Self", node.name}]
    if borrowed:
        message = f"self is annotated as {_host_of(borrowed[0])} in {len(borrowed)} methods of {node.name}"
        yield MIXIN.at(borrowed[0], message)


def _host_of(method: Function) -> str:
    """Return the class that ``self`` is annotated as; empty for none, and for what reads as a type variable (SelfT)."""
    for parameter in parameters_of(method)[:1]:
        if parameter.arg == "self" and parameter.annotation is not None:
            name = last_name(unquoted(parameter.annotation))
            return name if len(name) > 1 and not name.endswith(("T", "_co", "_contra")) else ""
    return ""


def _check_whole_scheduler(facts: ClassInfo) -> Iterator[Problem]:
    """Find a scheduler among the fields and method parameters of a class."""
    node = facts.node
    uses = _uses_of_scheduler(node)
    found = [field for field in facts.fields if _is_whole(field.name, field.annotation)]
    for field in found:
        yield WHOLE_SCHEDULER.at(field.node, _held(node.name, field, uses))
    told = {field.name for field in facts.fields if field in found or field.annotation is not None}
    for method in methods_of(node):
        if method.name == "__init__" and found:
            continue  # told with the field
        for parameter in parameters_of(method):
            if parameter.arg not in {"self", "cls"} and _is_whole(parameter.arg, parameter.annotation):
                message = f"{node.name}.{method.name} takes the whole scheduler as {parameter.arg!r}"
                yield WHOLE_SCHEDULER.at(parameter, message)
    others = [use for use in uses if use.attr not in told]
    if others:
        first = min(others, key=lambda use: use.lineno)
        yield WHOLE_SCHEDULER.at(first, f"{node.name} uses self.{first.attr} {len(others)} times")


def _held(class_name: str, field: FieldInfo, uses: list[ast.Attribute]) -> str:
    message = f"field {field.name!r} of {class_name} holds the whole scheduler"
    count = sum(use.attr == field.name for use in uses)
    return f"{message}, and {count} uses go through it" if count else message


def _is_whole(name: str, annotation: ast.expr | None) -> bool:
    if annotation is None:
        return name in _WHOLE_FIELDS
    parts = (unquoted(part) for part in ast.walk(annotation) if isinstance(part, ast.expr))
    return any(_WHOLE_TYPE.fullmatch(last_name(part)) for part in parts if not isinstance(part, ast.Subscript))


def _uses_of_scheduler(node: ast.ClassDef) -> list[ast.Attribute]:
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


# What a component asks for.


def _check_counts(facts: ClassInfo, limits: Limits) -> Iterator[Problem]:
    """Count fields, else the constructor's parameters: both would tell of the same thing twice."""
    node = facts.node
    asked = [field for field in facts.fields if not field.is_own_state]
    if len(asked) > limits.max_fields:
        yield TOO_MANY_FIELDS.at(node, f"{node.name} has {len(asked)} fields, more than {limits.max_fields}")
        return
    for method in methods_of(node):
        if method.name == "__init__":
            arguments = method.args
            count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
            if count > limits.max_parameters:
                message = f"{node.name}.__init__ has {count} parameters, more than {limits.max_parameters}"
                yield TOO_MANY_PARAMETERS.at(method, message)


def _check_any(facts: ClassInfo, names: ImportedNames) -> Iterator[Problem]:
    for field in facts.fields:
        if field.annotation is not None and is_any(field.annotation, names):
            yield ANY_FIELD.at(field.node, f"field {field.name!r} of {facts.node.name} is typed Any")


def _check_callables(facts: ClassInfo, names: ImportedNames, limits: Limits) -> Iterator[Problem]:
    typed: list[FieldInfo] = []
    for field in facts.fields:
        if field.callable is None:
            continue
        if _has_parameter_types(field.callable, names):
            typed.append(field)
        else:
            message = f"field {field.name!r} of {facts.node.name} is a callable with untyped parameters or result"
            yield UNTYPED_CALLABLE.at(field.node, message)
    if len(typed) > limits.max_callables:
        listed = ", ".join(field.name for field in typed)
        message = f"{facts.node.name} has {len(typed)} callables as fields ({listed}), more than {limits.max_callables}"
        yield MANY_CALLABLES.at(typed[0].node, message)


def _has_parameter_types(found: ast.expr, names: ImportedNames) -> bool:
    if not isinstance(found, ast.Subscript) or not isinstance(found.slice, ast.Tuple) or len(found.slice.elts) != 2:
        return False
    parameters, result = found.slice.elts
    if not isinstance(parameters, ast.List):
        return isinstance(parameters, ast.Name)  # a ParamSpec
    return not any(is_any(part, names) for part in (*parameters.elts, result))


# What a constructor does.

_OPENERS = {
    "open": "a file",
    "io.open": "a file",
    "os.open": "a file",
    "os.pipe": "a pipe",
    "os.fork": "a process",
    "multiprocessing.shared_memory.SharedMemory": "shared memory",
    "socket.socket": "a socket",
    "socket.socketpair": "a pair of sockets",
    "socket.create_connection": "a socket",
    "socket.create_server": "a socket",
    "zmq.Context": "a ZMQ context with its threads",
    "zmq.Context.instance": "a ZMQ context with its threads",
    "zmq.asyncio.Context": "a ZMQ context with its threads",
    "_thread.start_new_thread": "a thread",
    "concurrent.futures.ThreadPoolExecutor": "threads",
    "concurrent.futures.ProcessPoolExecutor": "processes",
    "multiprocessing.Pool": "processes",
    "subprocess.Popen": "a process",
    "subprocess.run": "a process",
    "subprocess.check_output": "a process",
    "asyncio.create_task": "a task",
    "asyncio.get_event_loop": "an event loop",
    "asyncio.new_event_loop": "an event loop",
    "tempfile.NamedTemporaryFile": "a file",
    "tempfile.TemporaryFile": "a file",
    "tempfile.TemporaryDirectory": "a directory",
    "tempfile.mkdtemp": "a directory",
    "tempfile.mkstemp": "a file",
    "urllib.request.urlopen": "a connection",
}
_STARTED = {"threading.Thread", "threading.Timer", "multiprocessing.Process"}
_OPENING_METHODS = {
    "bind": "a socket",
    "connect": "a socket",
    "socket": "a socket",
    "listen": "a socket",
    "mkdir": "a directory",
    "read_text": "a file",
    "read_bytes": "a file",
    "write_text": "a file",
    "write_bytes": "a file",
}
"""Methods of whatever object: a bare name would be a function, which the table above knows or not."""


def _check_constructors(node: ast.ClassDef, names: ImportedNames) -> Iterator[Problem]:
    """Check constructors, and the methods of the same class that they call on ``self``; data classes too."""
    methods = {method.name: method for method in methods_of(node)}
    for name in CONSTRUCTORS:
        if name in methods:
            for call, resource in _openings(methods[name], methods, names, seen={name}):
                message = f"{node.name}.{name} opens {resource} ({ast.unparse(call.func)})"
                yield IO_IN_CONSTRUCTOR.at(call, message)


def _openings(
    function: Function, methods: Mapping[str, Function], names: ImportedNames, seen: set[str]
) -> Iterator[tuple[ast.Call, str]]:
    startable = _startable_names(function, names)
    for node in _calls_made_by(function):
        resource = _opened_by(node.func, names) or _started_by(node.func, startable)
        if resource:
            yield node, resource
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
            method = methods.get(called.attr)
            if method is not None and called.attr not in seen:
                seen.add(called.attr)
                yield from _openings(method, methods, names, seen)


def _calls_made_by(function: Function) -> Iterator[ast.Call]:
    """Yield the calls that happen when the function runs: not those inside functions that it only defines."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting[:0] = ast.iter_child_nodes(node)


def _startable_names(function: Function, names: ImportedNames) -> set[str]:
    """Local names that hold a thread, which opens nothing until it is started."""
    return {
        last_name(node.targets[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and names.dotted(node.value.func) in _STARTED
    }


def _started_by(function: ast.expr, startable: set[str]) -> str:
    """``x.start()`` of a field or of a thread; a local name may be anything else, such as a regex match."""
    if not isinstance(function, ast.Attribute) or function.attr != "start":
        return ""
    started = function.value
    if isinstance(started, ast.Name):
        return "a thread" if started.id in startable else ""
    return "a thread or a service"


def _opened_by(function: ast.expr, names: ImportedNames) -> str:
    dotted = names.dotted(function.value if isinstance(function, ast.Subscript) else function)
    if dotted in _OPENERS:
        return _OPENERS[dotted]
    if dotted.split(".")[-1].startswith("open_"):
        return "what an open_...() function opens"
    if isinstance(function, ast.Attribute) and function.attr in _OPENING_METHODS:
        return _OPENING_METHODS[function.attr]
    return ""


# What code takes from its surroundings instead of being given it.

_ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.getenvb"}
_ENVIRONMENT_READERS = {"cli", "__main__", "config"}
"""Files (without .py) whose business it is to read the environment, and pass on what it says."""
_SINGLETON_GETTERS = {"instance", "get_instance"}
_SINGLETON_FIELDS = {"_instance", "instance", "_singleton"}
_GLOBAL_GETTER = re.compile(r"get_(global_\w+|(\w+_)?(singleton|instance))")
_OF_TEXT = frozenset(dir(str))


def _check_ambient_context(tree: ast.Module, names: ImportedNames, filename: str) -> Iterator[Problem]:
    """Check a whole file, its functions and its module level."""
    reads_environment = PurePath(filename).stem in _ENVIRONMENT_READERS
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            listed = ", ".join(node.names)
            yield AMBIENT_CONTEXT.at(node, f"the module's {listed} is rebound from a function: a singleton")
        elif isinstance(node, ast.Attribute | ast.Name) and names.dotted(node) in _ENVIRONMENT:
            if not reads_environment:
                yield AMBIENT_CONTEXT.at(node, "the environment is read")
        elif isinstance(node, ast.Attribute) and _keeps_only_object(node):
            yield AMBIENT_CONTEXT.at(node, f"the class keeps its only object in {ast.unparse(node)}")
    yield from _Getters(tree, names).problems()


def _keeps_only_object(node: ast.Attribute) -> bool:
    """True for ``cls._instance = ...`` and ``Thing.instance = ...``."""
    if (
        node.attr not in _SINGLETON_FIELDS
        or not isinstance(node.ctx, ast.Store)
        or not isinstance(node.value, ast.Name)
    ):
        return False
    return node.value.id == "cls" or node.value.id[:1].isupper()


class _Getters:
    """The calls of ``get_...()`` in one file, and how their results are used.

    The name alone says little: ``get_traceback()`` makes a new text at each call. A call takes a value from the
    surroundings when one of these holds:

    - this file defines the getter, and the getter reads what a ``global`` statement of this file rebinds;
    - its name says so (``get_global_x``, ``get_x_instance``, ``X.instance``);
    - somewhere in this file the code looks into a result of it (an attribute, an item, a call) or decides by one (a
      test, a comparison). Text methods, slices and ``in`` do not count: they are how text is used.

    Only getters that are imported from outside the standard library are asked the last two, and only calls without
    arguments: who passes arguments says what the answer depends on.
    """

    def __init__(self, tree: ast.Module, names: ImportedNames) -> None:
        self._tree = tree
        self._names = names
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._own = _getters_of_globals(tree)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each call of an ambient getter."""
        doubtful: dict[str, list[ast.Call]] = {}
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Call) or node.args or node.keywords:
                continue
            name = last_name(node.func)
            if isinstance(node.func, ast.Name) and name in self._own and not self._is_local(name, node):
                yield self._taken(node)
            elif self._is_singleton_of_class(node.func) and self._is_in_class(node):
                yield AMBIENT_CONTEXT.at(node, f"{ast.unparse(node.func)}() is a singleton")
            elif name.startswith("get_") and self._is_foreign(node):
                doubtful.setdefault(self._names.dotted(node.func), []).append(node)
        for calls in doubtful.values():
            if _GLOBAL_GETTER.fullmatch(last_name(calls[0].func)) or any(map(self._is_consulted, calls)):
                yield from map(self._taken, calls)

    def _taken(self, call: ast.Call) -> Problem:
        return AMBIENT_CONTEXT.at(call, f"{ast.unparse(call.func)}() takes a value from the surroundings")

    def _is_foreign(self, call: ast.Call) -> bool:
        """True for an imported name, and within a class for a function of an imported module."""
        function = call.func
        if self._names.is_standard(function):
            return False
        root = root_name(function)
        if not self._names.is_imported(root) or self._is_local(root, call):
            return False
        if isinstance(function, ast.Name):
            return True
        owner = self._names.dotted(function.value) if isinstance(function, ast.Attribute) else ""
        return owner.split(".")[-1].islower() and self._is_in_class(call)

    def _is_singleton_of_class(self, function: ast.expr) -> bool:
        if not isinstance(function, ast.Attribute) or function.attr not in _SINGLETON_GETTERS:
            return False
        owner = self._names.dotted(function.value)
        return owner.split(".")[-1][:1].isupper() and not self._names.is_standard(function.value)

    def _is_consulted(self, node: ast.expr) -> bool:
        """True when the code looks into this value or decides by it, here or by a name that it is given."""
        parent = self._parents[node]
        if isinstance(parent, ast.Await):
            return self._is_consulted(parent)
        if isinstance(parent, ast.NamedExpr) and self._is_looked_into(parent):
            return True
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr) and parent.value is node:
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return any(self._is_looked_into(use) for target in targets for use in self._uses_of(target))
        return self._is_looked_into(node)

    def _is_looked_into(self, node: ast.expr) -> bool:
        match self._parents[node]:
            case ast.Attribute(attr=attribute):
                return attribute not in _OF_TEXT
            case ast.Call(func=function):
                return function is node
            case ast.Subscript(value=value, slice=index):
                return value is node and not isinstance(index, ast.Slice)
            case ast.Compare(ops=operators):
                return not any(isinstance(operator, ast.In | ast.NotIn) for operator in operators)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                return test is node
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.Match():
                return True
        return False

    def _uses_of(self, target: ast.expr) -> Iterator[ast.expr]:
        """Yield what reads a local name in its function, a module's name in the file, a field in its class."""
        is_field = isinstance(target, ast.Attribute) and root_name(target) == "self"
        scope = self._enclosing(target, ast.ClassDef if is_field else Function) or self._tree
        wanted = ast.dump(target).replace("ctx=Store()", "ctx=Load()")
        for node in ast.walk(scope):
            if type(node) is type(target) and ast.dump(node) == wanted:
                yield node

    def _is_local(self, name: str, node: ast.AST) -> bool:
        """True when a function around the node binds the name, as a parameter or by a store."""
        function = self._enclosing(node, Function)
        while function is not None:
            assert isinstance(function, Function)
            if name in names_bound_in(function) or name in {each.arg for each in parameters_of(function)}:
                return True
            function = self._enclosing(function, Function)
        return False

    def _is_in_class(self, node: ast.AST) -> bool:
        return self._enclosing(node, ast.ClassDef) is not None

    def _enclosing(self, node: ast.AST, kinds: type[ast.ClassDef] | UnionType) -> ast.AST | None:
        around = self._parents.get(node)
        while around is not None and not isinstance(around, kinds):
            around = self._parents.get(around)
        return around


def _getters_of_globals(tree: ast.Module) -> set[str]:
    """Functions of this file that read what a ``global`` statement of it rebinds, and are called get_..."""
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return {
        function.name
        for function in tree.body
        if isinstance(function, Function)
        and function.name.startswith("get_")
        and any(isinstance(part, ast.Name) and part.id in rebound for part in ast.walk(function))
    }


# Branches on whether a feature is on.

_GATE = re.compile(r"_?(is_)?(enabled?|disabled?)(_\w+)?|_?\w+_(enabled|disabled)")


def _check_enabled_gates(tree: ast.Module) -> Iterator[Problem]:
    """Find ``if``, ``while`` and conditional expressions that ask an object's own fields whether something is on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Attribute) and _is_of_self(part) and _GATE.fullmatch(part.attr):
                    yield ENABLED_GATE.at(part, f"a branch on {ast.unparse(part)}")


def _is_of_self(node: ast.Attribute) -> bool:
    root = node.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id == "self"
