"""Carry out a `Rename` of a member, and a `RenameFile`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from scheduler_refactor.host_tree import HostTree
from scheduler_refactor.recipe import Rename, RenameFile
from scheduler_refactor.refusals import Refusals
from scheduler_refactor.source_index import SourceIndex, absolute_module
from scheduler_refactor.text_edits import TextEdits


def rename_member(tree: Mapping[str, str], step: Rename) -> dict[str, str]:
    """Return the tree in which a member of a class has its new name.

    Raises:
        RefusedError: the new name is taken, or a user of the old one cannot be rewritten.
    """
    refusals = Refusals(step.accepted)
    host = HostTree.read(tree, step.owner, [step.old, step.new])
    edits: dict[str, TextEdits] = {}
    for override in host.measurement.overrides:
        if override.name == step.old:
            message = f"{step.old} has several definitions: {', '.join(override.parts)}"
            refusals.add(step.owner.file, host.host.node.lineno, "override", step.old, message)
    for part in host.measurement.parts:
        for use in part.methods:
            for access in use.accesses:
                if access.attribute == step.new:
                    message = f"{step.new} is in use already"
                    refusals.add(access.path, access.line, "name-clash", step.new, message)
                if access.attribute != step.old:
                    continue
                if access.is_named and access.is_certain:
                    _edit(edits, access.path, access.line, access.column, step)
                elif access.is_named or access.via in ("getattr", "class"):
                    message = f"{step.old} is used of an object that may be another one, or by its name"
                    refusals.add(access.path, access.line, "by-name", step.old, message)
    for reach in host.measurement.reached:
        if reach.name == step.old and reach.how == "string":
            refusals.add(reach.path, reach.line, "by-name", step.old, f"{step.old} is written in a string")
    for other in host.other_uses([step.old]):
        if other.receiver in step.receivers:
            _edit(edits, other.site.path, other.site.line, other.site.column, step)
        elif not other.is_own:
            message = f"{other.receiver}.{step.old} may be this one; name the receiver or accept it"
            refusals.add(other.site.path, other.site.line, "unknown-receiver", step.old, message)
    _rename_definition(tree, step, host, edits, refusals)
    refusals.check()
    return dict(tree) | {path: each.apply(tree[path]) for path, each in edits.items()}


def rename_file(tree: Mapping[str, str], step: RenameFile) -> dict[str, str]:
    """Return the tree in which a file has its new path, and imports name its new module.

    Raises:
        RefusedError: the file is not there, the path is taken, or a use cannot be rewritten.
    """
    refusals = Refusals(step.accepted)
    if step.file not in tree:
        refusals.add(step.file, 1, "missing-file", step.file, "there is no such file")
    if step.to in tree:
        refusals.add(step.to, 1, "name-clash", step.to, "there is a file already")
    refusals.check()
    old, new = PurePosixPath(step.file), PurePosixPath(step.to)
    index = SourceIndex.parse({path: text for path, text in tree.items() if old.stem in text or path == step.file})
    if old.parent != new.parent:
        for node in ast.walk(index.modules[step.file].tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                refusals.add(step.file, node.lineno, "relative-import", node.module or ".", "the folder changes")
    in_string = re.compile(rf"\.{re.escape(old.stem)}(\.|$)")
    after = {path: text for path, text in tree.items() if path != step.file} | {step.to: tree[step.file]}
    for path, module in index.modules.items():
        edits = TextEdits()
        lines = tree[path].encode().split(b"\n")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                _rewrite_from(index, path, node, lines, step, edits, refusals)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if index.file_of(alias.name, path) == step.file:
                        refusals.add(path, node.lineno, "import", alias.name, "write it as `from ... import` first")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and in_string.search(node.value):
                refusals.add(path, node.lineno, "by-name", old.stem, "a string names the module")
        if edits:
            after[step.to if path == step.file else path] = edits.apply(tree[path])
    refusals.check()
    return after


def _edit(edits: dict[str, TextEdits], path: str, line: int, column: int, step: Rename) -> None:
    edits.setdefault(path, TextEdits()).replace(line, column, len(step.old.encode()), step.new)


def _rename_definition(
    tree: Mapping[str, str], step: Rename, host: HostTree, edits: dict[str, TextEdits], refusals: Refusals
) -> None:
    if step.new in host.host.methods or step.new in host.host.attributes:
        refusals.add(step.owner.file, host.host.node.lineno, "name-clash", step.new, f"{step.new} is defined already")
    order, _ = host.index.linearize(host.host)
    for source in order:
        lines = tree[source.path].encode().split(b"\n")
        for method in source.definitions:
            if method.name == step.old:
                number = method.node.lineno
                found = re.search(rb"\bdef\s+", lines[number - 1][method.node.col_offset :])
                if found is not None:
                    _edit(edits, source.path, number, method.node.col_offset + found.end(), step)
        statement = source.attributes.get(step.old)
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(statement, ast.Assign):
            target = next(each for each in statement.targets if isinstance(each, ast.Name) and each.id == step.old)
        if target is not None:
            _edit(edits, source.path, target.lineno, target.col_offset, step)
            message = f"{step.old} may be an argument of a constructor; rename it there, too"
            refusals.add(source.path, target.lineno, "keyword", step.old, message)


def _rewrite_from(
    index: SourceIndex,
    path: str,
    node: ast.ImportFrom,
    lines: list[bytes],
    step: RenameFile,
    edits: TextEdits,
    refusals: Refusals,
) -> None:
    old, new = PurePosixPath(step.file), PurePosixPath(step.to)
    module = absolute_module(path, node)
    if index.file_of(module, path) == step.file:
        written = re.match(rb"from\s+\.*([\w.]+)\s+import", lines[node.lineno - 1][node.col_offset :])
        if written is None or old.parent != new.parent:
            refusals.add(path, node.lineno, "import", module, "this form of import cannot be rewritten")
            return
        end = node.col_offset + written.end(1)
        edits.replace(node.lineno, end - len(old.stem.encode()), len(old.stem.encode()), new.stem)
        return
    for alias in node.names:
        if alias.name == old.stem and index.file_of(f"{module}.{alias.name}", path) == step.file:
            refusals.add(path, node.lineno, "import", alias.name, "write it as `from MODULE import NAME` first")
