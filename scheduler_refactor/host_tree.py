"""The part of a tree that a step touches, parsed and measured, and the callers of the host's members in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from scheduler_refactor.host_access import Access
from scheduler_refactor.measurement import Measurement, MethodUse, Part, measure_host
from scheduler_refactor.recipe import ClassRef
from scheduler_refactor.refusals import Refusal, RefusedError
from scheduler_refactor.source_index import ClassSource, SourceIndex, dotted_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A place that names a member of the host, and has to change when the member goes elsewhere.

    Args:
        path: file of the place.
        line: line of the member's name.
        column: column of the member's name, in bytes.
        name: the member.
    """

    path: str
    line: int
    column: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUse:
    """An attribute of that name on an object that is not known to be the host.

    Args:
        site: the place.
        receiver: the object, as text.
        is_own: whether it is ``self`` of a class that defines the name itself.
    """

    site: CallSite
    receiver: str
    is_own: bool


@dataclass(slots=True, kw_only=True)
class HostTree:
    """A measured host with the files that may name its members."""

    index: SourceIndex
    host: ClassSource
    measurement: Measurement

    @classmethod
    def read(cls, tree: Mapping[str, str], host: ClassRef, names: Collection[str]) -> HostTree:
        """Parse and measure the files of the tree that name the host, its classes or one of `names`.

        Raises:
            RefusedError: the host is not there.
            ConfigError: a file is not Python.
        """
        index = SourceIndex.parse(files_that_name(tree, {host.name, *names}))
        index.find_module = lambda module, _importer: find_in_tree(tree, module)
        found = class_of(index, host)
        return cls(index=index, host=found, measurement=measure_host(index, found))

    def methods_of(self, owner: str) -> list[MethodUse]:
        """Return the functions of one of the host's classes."""
        return [use for part in self.measurement.parts if part.name == owner and part.role != "component"
                for use in part.methods]  # fmt: skip

    def uses_outside(self, owner: str, methods: Collection[str]) -> Iterator[tuple[Part, MethodUse, Access]]:
        """Yield each use of the host that is not in one of the methods of a class."""
        for part in self.measurement.parts:
            for use in part.methods:
                if part.name == owner and part.role != "component" and use.name in methods:
                    continue
                for access in use.accesses:
                    yield part, use, access

    def other_uses(self, names: Collection[str]) -> Iterator[OtherUse]:
        """Yield attributes of those names whose object is not measured as the host."""
        known = {
            (access.path, access.line, access.column)
            for part in self.measurement.parts
            for use in part.methods
            for access in use.accesses
            if access.is_named
        }
        family = {part.name for part in self.measurement.parts if part.role in ("host", "mixin", "base", "subclass")}
        for path, module in sorted(self.index.modules.items()):
            for node, owner in _attributes(module.tree, None):
                if node.attr not in names:
                    continue
                line, column = node.end_lineno or node.lineno, (node.end_col_offset or 0) - len(node.attr.encode())
                if (path, line, column) in known or _is_module(module.imports, node.value):
                    continue
                receiver = ast.unparse(node.value)
                own = module.classes.get(owner or "") if receiver == "self" and owner not in family else None
                yield OtherUse(
                    site=CallSite(path=path, line=line, column=column, name=node.attr),
                    receiver=receiver,
                    is_own=own is not None and self._defines(own, node.attr),
                )

    def _defines(self, source: ClassSource, name: str) -> bool:
        order, _ = self.index.linearize(source)
        for each in order:
            if name in each.methods or name in each.attributes:
                return True
            for node in ast.walk(each.node):
                if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                    continue
                if dotted_name(node) == f"self.{name}":
                    return True
        return False


def files_that_name(tree: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the files with one of the names as a whole word."""
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
    return {path: text for path, text in tree.items() if words.search(text)}


def class_of(index: SourceIndex, ref: ClassRef) -> ClassSource:
    """Return a class at the top level of a file.

    Raises:
        RefusedError: it is not there.
    """
    module = index.modules.get(ref.file)
    if module is not None and ref.name in module.classes:
        return module.classes[ref.name]
    message = f"{ref.name} is no class at the top level of this file"
    raise RefusedError((Refusal(path=ref.file, line=1, rule="missing-class", name=ref.name, message=message),))


def find_in_tree(tree: Mapping[str, str], module: str) -> tuple[str, str] | None:
    """Return path and text of a module's file in a tree."""
    end = module.strip(".").replace(".", "/")
    for suffix in (f"{end}.py", f"{end}/__init__.py"):
        for path in sorted(tree):
            if path == suffix or path.endswith(f"/{suffix}"):
                return path, tree[path]
    return None


def _is_module(imports: Mapping[str, tuple[str, str]], node: ast.expr) -> bool:
    """Whether an object is a module that ``import`` bound."""
    root = dotted_name(node).partition(".")[0]
    return root in imports and not imports[root][1]


def _attributes(node: ast.AST, owner: str | None) -> Iterator[tuple[ast.Attribute, str | None]]:
    """Yield the attributes below a node, with the class in whose methods they are."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute):
            yield child, owner
        yield from _attributes(child, child.name if isinstance(child, ast.ClassDef) else owner)
