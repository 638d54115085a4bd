"""An index of source files: their classes, functions and imports, parsed with `ast` and never imported.

Analysis reads the standard library's tree, because formatting does not matter here: it parses ten times faster than a
tree that keeps comments.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypeAlias

from scheduler_components.errors import ConfigError

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True, kw_only=True, eq=False)
class FunctionSource:
    """A function, or a method as a class defines it."""

    name: str
    path: str
    node: FunctionNode
    owner: ClassSource | None = None

    @property
    def is_static(self) -> bool:
        """Whether it is a ``staticmethod``."""
        return "staticmethod" in self.decorators

    @property
    def is_class_method(self) -> bool:
        """Whether its first parameter is the class."""
        return "classmethod" in self.decorators or self.name in ("__new__", "__init_subclass__", "__class_getitem__")

    @property
    def is_property(self) -> bool:
        """Whether an object reads it without a call."""
        return any(
            name in ("property", "cached_property") or name.endswith((".cached_property", ".setter", ".getter"))
            for name in self.decorators
        )

    @property
    def decorators(self) -> tuple[str, ...]:
        """The decorators as text, without arguments."""
        return tuple(
            ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in self.node.decorator_list
        )

    @property
    def parameters(self) -> list[ast.arg]:
        """All parameters that a caller can name or place, in order."""
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


@dataclass(slots=True, kw_only=True, eq=False)
class ClassSource:
    """A class: its bases as text, its methods, and its class attributes.

    `definitions` has all functions of its body, in order. `methods` has one per name, the last, without setters.
    """

    name: str
    path: str
    node: ast.ClassDef
    bases: tuple[str, ...]
    definitions: list[FunctionSource] = field(default_factory=list)
    methods: dict[str, FunctionSource] = field(default_factory=dict)
    attributes: dict[str, ast.stmt] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleSource:
    """A parsed file. `imports` maps a bound name to its module and, for ``from``, the name there."""

    path: str
    tree: ast.Module
    classes: dict[str, ClassSource] = field(default_factory=dict)
    functions: dict[str, FunctionSource] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


def parse_module(path: str, text: str) -> ModuleSource:
    """Parse one file and list its top level, with the branches of ``if`` and ``try`` there.

    Raises:
        ConfigError: it is not Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError("path", path, f"is not Python ({error})", "leave the file out or mend it") from error
    module = ModuleSource(path=path, tree=tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = absolute_module(path, node)
            for alias in node.names:
                module.imports[alias.asname or alias.name] = (source, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                module.imports[bound] = (alias.name if alias.asname else bound, "")
    for statement in _top_level(tree.body):
        if isinstance(statement, ast.ClassDef):
            module.classes.setdefault(statement.name, _read_class(path, statement))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions[statement.name] = FunctionSource(name=statement.name, path=path, node=statement)
    return module


def dotted_name(node: ast.expr) -> str:
    """Return a name with dots, such as ``torch.no_grad``; empty for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value)):
        return f"{base}.{node.attr}"
    return ""


@dataclass(slots=True, kw_only=True)
class SourceIndex:
    """Parsed files, and the classes and functions behind the names in them.

    Args:
        modules: parsed files by path.
        find_module: reads the file of a base class that is not in `modules` yet: takes the module's dotted name and the
            path of the importing file, and returns path and text, or nothing.
    """

    modules: dict[str, ModuleSource] = field(default_factory=dict)
    find_module: Callable[[str, str], tuple[str, str] | None] = lambda _module, _importer: None
    _by_stem: dict[str, list[str]] = field(default_factory=dict)
    _is_reading: bool = False

    @classmethod
    def parse(cls, tree: Mapping[str, str], on_file: Callable[[str], None] = lambda _path: None) -> SourceIndex:
        """Parse files. `on_file` is called with the path of each after it is parsed."""
        index = cls()
        for path, text in tree.items():
            index.add(parse_module(path, text))
            on_file(path)
        return index

    def add(self, module: ModuleSource) -> None:
        """Add a parsed file."""
        self.modules[module.path] = module
        self._by_stem.setdefault(_module_parts(module.path)[-1], []).append(module.path)

    def resolve_class(self, path: str, name: str) -> ClassSource | None:
        """Return the class that a dotted name denotes in a file, through imports and re-exports."""
        found = self._resolve(path, name, 0)
        return found if isinstance(found, ClassSource) else None

    def resolve_function(self, path: str, name: str) -> FunctionSource | None:
        """Return the function that a dotted name denotes in a file, through imports and re-exports."""
        found = self._resolve(path, name, 0)
        return found if isinstance(found, FunctionSource) else None

    def find_classes(self, name: str) -> list[ClassSource]:
        """Return all classes of that name, by path."""
        return [module.classes[name] for _, module in sorted(self.modules.items()) if name in module.classes]

    def linearize(self, source: ClassSource) -> tuple[list[ClassSource], list[str]]:
        """Return the class and its known bases in Python's method resolution order, and the names of unknown bases.

        Unknown bases are left out, so the order is exact if there are none besides ``object``.
        """
        unknown: list[str] = []
        self._is_reading = True
        order = self._merge(source, unknown, ())
        self._is_reading = False
        return order, list(dict.fromkeys(unknown))

    def all_classes(self) -> Iterator[ClassSource]:
        """Yield every class of the top levels."""
        for module in list(self.modules.values()):
            yield from module.classes.values()

    def _merge(self, source: ClassSource, unknown: list[str], below: tuple[ClassSource, ...]) -> list[ClassSource]:
        if source in below:
            raise ConfigError("host", source.name, "is its own base", "mend the bases of the class")
        bases: list[ClassSource] = []
        for name in source.bases:
            base = self.resolve_class(source.path, name)
            if base is not None:
                bases.append(base)
            elif name not in ("object", "Generic", "Protocol", "ABC", "abc.ABC", "typing.Generic", "typing.Protocol"):
                unknown.append(name)
        rows = [self._merge(base, unknown, (*below, source)) for base in bases]
        rows.append(bases)
        order = [source]
        while rows := [row for row in rows if row]:
            head = next((row[0] for row in rows if not any(row[0] in other[1:] for other in rows)), None)
            if head is None:
                raise ConfigError("host", source.name, "has bases without a consistent order", "mend the bases")
            order.append(head)
            rows = [[each for each in row if each is not head] for row in rows]
        return order

    def _resolve(self, path: str, name: str, depth: int) -> ClassSource | FunctionSource | None:
        module = self.modules.get(path)
        if module is None or depth > 8:
            return None
        first, _, rest = name.partition(".")
        if not rest:
            local = module.classes.get(first) or module.functions.get(first)
            is_stub = isinstance(local, ClassSource) and not local.definitions and first in module.imports
            if local is not None and not is_stub:  # a stub replaces an import where that import fails
                return local
        if first not in module.imports:
            return None
        source, imported = module.imports[first]
        if imported:
            if not rest:
                found = self.file_of(source, path)
                return self._resolve(found, imported, depth + 1) if found else None
            source = f"{source}.{imported}"
        *modules, last = rest.split(".")
        found = self.file_of(".".join([source, *modules]), path)
        return self._resolve(found, last, depth + 1) if found and last else None

    def file_of(self, module: str, importer: str) -> str | None:
        """Return the path that ends as the dotted name does, the importer's neighbour first, or read the file."""
        parts = tuple(module.strip(".").split("."))
        fitting = [path for path in self._by_stem.get(parts[-1], ()) if _module_parts(path)[-len(parts) :] == parts]
        if fitting:
            return min(fitting, key=lambda path: (PurePosixPath(path).parent != PurePosixPath(importer).parent, path))
        read = self.find_module(module, importer) if self._is_reading else None
        if read is None:
            return None
        path, text = read
        if path not in self.modules:
            self.add(parse_module(path, text))
        return path


def _module_parts(path: str) -> tuple[str, ...]:
    parts = PurePosixPath(path).with_suffix("").parts
    parts = tuple(part for part in parts if part not in ("/", "."))
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def absolute_module(path: str, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module that an import statement of a file names."""
    if not node.level:
        return node.module or ""
    package = list(PurePosixPath(path).parts)[: -node.level]
    package = [part for part in package if part not in ("/", ".")]
    return ".".join([*package, *((node.module or "").split(".") if node.module else [])])


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
        elif isinstance(statement, ast.Try):
            for part in (statement.body, *(handler.body for handler in statement.handlers), statement.orelse):
                yield from _top_level(part)


def _read_class(path: str, node: ast.ClassDef) -> ClassSource:
    bases = tuple(
        dotted_name(base.value if isinstance(base, ast.Subscript) else base) or ast.unparse(base) for base in node.bases
    )
    source = ClassSource(name=node.name, path=path, node=node, bases=bases)
    for statement in _top_level(node.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            method = FunctionSource(name=statement.name, path=path, node=statement, owner=source)
            source.definitions.append(method)
            if not any(name.endswith((".setter", ".deleter")) for name in method.decorators):
                source.methods[statement.name] = method
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            source.attributes[statement.target.id] = statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    source.attributes[target.id] = statement
    return source
