"""Describe a name that several modules export on one page only: the page of the innermost module.

The other pages show its signature, its first sentence and a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Alias, AliasResolutionError, Class, Docstring, Extension, Function, Module, Object

Name = Alias | Object

PAGES = (Path(__file__).parent.parent / "reference").glob("*.md")
DOCUMENTED = {found for page in PAGES for found in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}
"""The packages and modules of the reference."""


class SharedNames(Extension):
    """The extension that mkdocstrings loads after the extensions that complete classes."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Compare names once all modules of the package have been read."""
        del kwargs
        exported = [name for module in _documented(pkg) for name in _exported(module)]
        homes: dict[str, Name] = {}
        for name in exported:
            other = homes.get(name.canonical_path, name)
            homes[name.canonical_path] = max(other, name, key=lambda each: each.path.count("."))
        for name in exported:
            home = homes[name.canonical_path]
            if isinstance(name, Alias) and home is not name:
                _refer(name, home.path)


def _documented(module: Module) -> Iterator[Module]:
    """Yield the modules that a page of the reference shows."""
    if module.exports and module.path in DOCUMENTED:
        yield module
    for member in module.members.values():
        if isinstance(member, Module):
            yield from _documented(member)


def _exported(module: Module) -> Iterator[Name]:
    """Yield the exported names of a module that this package defines."""
    for name in map(str, module.exports or ()):
        member = module.members.get(name)
        if member is not None and (not isinstance(member, Alias) or _is_resolved(member)):
            yield member


def _is_resolved(alias: Alias) -> bool:
    """Return whether griffe has read the definition. It has not when another package defines the name."""
    try:
        return bool(alias.final_target)
    except AliasResolutionError:
        return False


def _refer(alias: Alias, home: str) -> None:
    """Replace ``alias`` by a short entry."""
    target, module = alias.final_target, alias.parent
    assert isinstance(module, Module)
    summary = target.docstring.value.partition("\n\n")[0] if target.docstring else ""
    words = Docstring(f"{summary}\n\nDescribed in [`{home}`][{home}].")
    entry: Class | Function
    if isinstance(target, Class):
        entry = Class(alias.name, lineno=alias.alias_lineno, docstring=words)
        init = target.all_members.get("__init__")
        if isinstance(init, Function | Alias):
            entry.set_member("__init__", Function("__init__", parameters=init.parameters, parent=entry))
    elif isinstance(target, Function):
        entry = Function(
            alias.name, lineno=alias.alias_lineno, docstring=words, parameters=target.parameters, returns=target.returns
        )
    else:
        return
    words.parent = entry
    entry.parent = module
    module.members[alias.name] = entry
