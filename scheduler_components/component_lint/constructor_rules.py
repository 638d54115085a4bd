"""The rule for constructors: they store; sockets, threads, processes and files are opened elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from scheduler_components.component_lint.class_facts import CONSTRUCTORS, ClassFacts, Function, methods_of
from scheduler_components.component_lint.finding import Finding, finding
from scheduler_components.component_lint.names import ImportedNames, last_name

__all__ = ["check_constructors"]

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


def check_constructors(facts: ClassFacts, names: ImportedNames) -> Iterator[Finding]:
    """Check constructors, and the methods of the same class that they call on ``self``."""
    methods = {method.name: method for method in methods_of(facts.node)}
    for name in CONSTRUCTORS:
        if name in methods:
            for node, resource in _openings(methods[name], methods, names, seen={name}):
                message = f"{facts.node.name}.{name} opens {resource} ({ast.unparse(node.func)})"
                yield finding("io-in-constructor", node.lineno, message)


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
            helper = methods.get(called.attr)
            if helper is not None and called.attr not in seen:
                seen.add(called.attr)
                yield from _openings(helper, methods, names, seen)


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
