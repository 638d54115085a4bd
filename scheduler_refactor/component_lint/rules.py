"""The table of rules, and their checks. Each check reads a parsed file and yields problems.

A rule uses one file only. It does not follow a call into another file and does not guess: it reports a problem only if
the file itself shows it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

import attrs
import msgspec

from scheduler_refactor.component_lint.ambient_getters import AmbientGetters
from scheduler_refactor.component_lint.class_info import (
    CONSTRUCTORS,
    ClassInfo,
    ClassKind,
    FieldInfo,
    Function,
    ImportedNames,
    is_any,
    last_name,
    methods_of,
    parameters_of,
    read_class,
    unquoted,
)


class Problem(msgspec.Struct, frozen=True, order=True):
    """One violation of one rule.

    Attributes:
        line: counted from 1.
        column: counted from 0.
        code: a key of ``RULES``.
        message: what the code does.
    """

    line: int
    column: int
    code: str
    message: str


class LintRule(msgspec.Struct, frozen=True):
    """One rule.

    Attributes:
        code: the code for flake8's selection.
        name: the name in texts.
        subject: the code that the rule reports.
        hint: the repair.
    """

    code: str
    name: str
    subject: str
    hint: str

    def at(self, node: ast.AST, message: str) -> Problem:
        """Return a problem of this rule at a statement or an expression."""
        return Problem(getattr(node, "lineno", 1), getattr(node, "col_offset", 0), self.code, message)


WHOLE_SCHEDULER = LintRule(
    "SCH001",
    "whole-scheduler",
    "a field or a method's parameter that holds the whole scheduler, or a use of self.scheduler",
    "ask for a small port with only the members that the class uses",
)
MIXIN = LintRule(
    "SCH002",
    "mixin",
    "a mixin class, a class made of mixins, or a method whose self is annotated as another class",
    "turn it into a component whose constructor takes what it reads",
)
TOO_MANY_FIELDS = LintRule(
    "SCH003",
    "too-many-fields",
    "a component with more fields than the limit (an option, default 7)",
    "split it by subject, or group values that belong together",
)
UNTYPED_CALLABLE = LintRule(
    "SCH004",
    "untyped-callable",
    "a field that is a Callable without its parameter types",
    "ask for a port with a named method; use a bare callable only for one typed, stateless verb such as a clock",
)
MANY_CALLABLES = LintRule(
    "SCH005",
    "many-callables",
    "a class with more typed callables as fields than the limit (an option, default 2)",
    "replace them by one port that has a method for each",
)
ANY_FIELD = LintRule(
    "SCH006",
    "any-field",
    "a field of a component typed Any",
    "name the type, or a Protocol with the members that the class uses",
)
AMBIENT_CONTEXT = LintRule(
    "SCH007",
    "ambient-context",
    "a value from ambient context: a global get_...(), a singleton, a global statement, the environment",
    "pass the value to the constructor",
)
IO_IN_CONSTRUCTOR = LintRule(
    "SCH008",
    "io-in-constructor",
    "a socket, thread, process or file that a constructor opens",
    "open the resource in an open_...() function and pass it to the constructor",
)
ENABLED_GATE = LintRule(
    "SCH009",
    "enabled-gate",
    "a branch on self.enable..., self.enabled or the like",
    "decide once when the component is composed, and pass a null object if the feature is off",
)
TOO_MANY_PARAMETERS = LintRule(
    "SCH010",
    "too-many-parameters",
    "a component whose constructor has more parameters than the limit (an option, default 7)",
    "split the component by subject, or pass values that belong together as one value",
)
NO_SLOTS = LintRule(
    "SCH011",
    "no-slots",
    "a component that is a dataclass or an attrs class without slots",
    "declare it with slots=True, so that no other class can add fields to it",
)

RULES: Mapping[str, LintRule] = {
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
        NO_SLOTS,
    )
}
"""Every rule by its code. A code is never used for another rule."""


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of the rules that count.

    Attributes:
        max_fields: collaborators and settings of a component, without its own state.
        max_parameters: parameters of a component's constructor, without ``self``.
        max_callables: typed callables among the fields.
    """

    max_fields: int = attrs.field(default=7, metadata={"help": "Fields of one component."})
    max_parameters: int = attrs.field(default=7, metadata={"help": "Parameters of a component's constructor."})
    max_callables: int = attrs.field(default=2, metadata={"help": "Callables among the fields of one class."})


def find_problems(tree: ast.Module, filename: str, limits: Limits) -> list[Problem]:
    """Return the problems of one file by line, each once.

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
            if facts.lacks_slots:
                yield NO_SLOTS.at(node, f"{node.name} has no slots, so that any other class can add fields to it")
    yield from _check_ambient_context(tree, names, filename)
    yield from _check_enabled_gates(tree)


# Dependencies on the scheduler and between classes.

_MIXIN = re.compile(r"\w*Mixin\d*")
_WHOLE_TYPE = re.compile(r"\w*Scheduler")
_WHOLE_FIELDS = ("scheduler", "_scheduler")


def _check_mixin(node: ast.ClassDef) -> Iterator[Problem]:
    """Find mixins by their names, their subclasses, and a ``self`` that is annotated as another class."""
    mixins = [name for name in map(last_name, node.bases) if _MIXIN.fullmatch(name)]
    if _MIXIN.fullmatch(node.name):
        yield MIXIN.at(node, f"{node.name} is a mixin: it reads and writes the fields of its host class")
        return
    if mixins:
        yield MIXIN.at(node, f"{node.name} inherits from mixins ({', '.join(mixins)})")
    borrowed = [method for method in methods_of(node) if _host_of(method) not in {"", "Self", node.name}]
    if borrowed:
        message = f"self is annotated as {_host_of(borrowed[0])} in {len(borrowed)} methods of {node.name}"
        yield MIXIN.at(borrowed[0], message)


def _host_of(method: Function) -> str:
    """Return the class in the annotation of ``self``; empty without one, and for a type variable such as SelfT."""
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
    reported = {field.name for field in facts.fields if field in found or field.annotation is not None}
    for method in methods_of(node):
        if method.name == "__init__" and found:
            continue  # The field is reported already.
        for parameter in parameters_of(method):
            if parameter.arg not in {"self", "cls"} and _is_whole(parameter.arg, parameter.annotation):
                message = f"{node.name}.{method.name} takes the whole scheduler as {parameter.arg!r}"
                yield WHOLE_SCHEDULER.at(parameter, message)
    others = [use for use in uses if use.attr not in reported]
    if others:
        first = min(others, key=lambda use: use.lineno)
        yield WHOLE_SCHEDULER.at(first, f"{node.name} uses self.{first.attr} {len(others)} times")


def _held(class_name: str, field: FieldInfo, uses: list[ast.Attribute]) -> str:
    message = f"field {field.name!r} of {class_name} holds the whole scheduler"
    count = sum(use.attr == field.name for use in uses)
    return f"{message} and is used {count} times" if count else message


def _is_whole(name: str, annotation: ast.expr | None) -> bool:
    if annotation is None:
        return name in _WHOLE_FIELDS
    parts = (unquoted(part) for part in ast.walk(annotation) if isinstance(part, ast.expr))
    return any(_WHOLE_TYPE.fullmatch(last_name(part)) for part in parts if not isinstance(part, ast.Subscript))


def _uses_of_scheduler(node: ast.ClassDef) -> list[ast.Attribute]:
    """Return every ``self.scheduler`` in an expression ``self.scheduler.x``."""
    return [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Attribute)
        and isinstance(part.value.value, ast.Name)
        and part.value.value.id == "self"
        and part.value.attr in _WHOLE_FIELDS
    ]


# Fields and parameters of a component.


def _check_counts(facts: ClassInfo, limits: Limits) -> Iterator[Problem]:
    """Count the fields, or else the constructor's parameters: to report both would report one problem twice."""
    node = facts.node
    given = [field for field in facts.fields if not field.is_own_state]
    if len(given) > limits.max_fields:
        yield TOO_MANY_FIELDS.at(node, f"{node.name} has {len(given)} fields, more than {limits.max_fields}")
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
            message = f"field {field.name!r} of {facts.node.name} is a callable without parameter and result types"
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


# Effects of a constructor.

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
"""Methods of any object. ``_OPENERS`` lists functions."""


def _check_constructors(node: ast.ClassDef, names: ImportedNames) -> Iterator[Problem]:
    """Check the constructors of any class, and the methods that they call on ``self``."""
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
    """Yield the calls of a function's body, without the calls inside functions that it only defines."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting[:0] = ast.iter_child_nodes(node)


def _startable_names(function: Function, names: ImportedNames) -> set[str]:
    """Return the local names of threads, which open nothing before their start."""
    return {
        last_name(node.targets[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and names.dotted(node.value.func) in _STARTED
    }


def _started_by(function: ast.expr, startable: set[str]) -> str:
    """Return the resource of ``x.start()`` if x is a field or a thread: a local name may also be a regex match."""
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
        return "the resource of an open_...() function"
    if isinstance(function, ast.Attribute) and function.attr in _OPENING_METHODS:
        return _OPENING_METHODS[function.attr]
    return ""


# Ambient context.

_ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.getenvb"}
_ENVIRONMENT_READERS = {"cli", "__main__", "config"}
"""Files (without .py) that may read the environment and pass its values on."""
_SINGLETON_FIELDS = {"_instance", "instance", "_singleton"}


def _check_ambient_context(tree: ast.Module, names: ImportedNames, filename: str) -> Iterator[Problem]:
    """Find ambient context in functions and at module level."""
    reads_environment = PurePath(filename).stem in _ENVIRONMENT_READERS
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            listed = ", ".join(node.names)
            yield AMBIENT_CONTEXT.at(node, f"a function rebinds the module's {listed}: a singleton")
        elif isinstance(node, ast.Attribute | ast.Name) and names.dotted(node) in _ENVIRONMENT:
            if not reads_environment:
                yield AMBIENT_CONTEXT.at(node, "the code reads the environment")
        elif isinstance(node, ast.Attribute) and _keeps_only_object(node):
            yield AMBIENT_CONTEXT.at(node, f"the class stores its only object in {ast.unparse(node)}")
    for call, message in AmbientGetters(tree, names).calls():
        yield AMBIENT_CONTEXT.at(call, message)


def _keeps_only_object(node: ast.Attribute) -> bool:
    """Whether the node is the target of ``cls._instance = ...`` or ``Thing.instance = ...``."""
    if (
        node.attr not in _SINGLETON_FIELDS
        or not isinstance(node.ctx, ast.Store)
        or not isinstance(node.value, ast.Name)
    ):
        return False
    return node.value.id == "cls" or node.value.id[:1].isupper()


# Branches on a feature flag.

_GATE = re.compile(r"_?(is_)?(enabled?|disabled?)(_\w+)?|_?\w+_(enabled|disabled)")


def _check_enabled_gates(tree: ast.Module) -> Iterator[Problem]:
    """Find ``if``, ``while`` and conditional expressions that test a flag among the object's own fields."""
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
