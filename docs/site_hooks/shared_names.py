"""Describes a name that several packages export on one page alone: that of the innermost package.

On the other pages it stands with its signature, its first sentence and a link there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from griffe import Alias, AliasResolutionError, Class, Docstring, Extension, Function, Module


class SharedNames(Extension):
    """The extension that mkdocstrings loads, after what completes the classes themselves."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Names can be compared only when all modules of the package are read."""
        del kwargs
        homes: dict[str, Alias] = {}
        exported = [alias for door in _doors(pkg) for alias in _exported(door)]
        for alias in exported:
            other = homes.get(alias.final_target.path, alias)
            homes[alias.final_target.path] = max(other, alias, key=lambda each: each.path.count("."))
        for alias in exported:
            home = homes[alias.final_target.path]
            if home is not alias:
                _refer(alias, home)


def _doors(module: Module) -> Iterator[Module]:
    if module.is_init_module and module.exports:
        yield module
    for member in module.members.values():
        if isinstance(member, Module):
            yield from _doors(member)


def _exported(door: Module) -> Iterator[Alias]:
    """What a package exports of its own package's modules; a name of another one is described here."""
    for name in map(str, door.exports or ()):
        member = door.members.get(name)
        if isinstance(member, Alias) and _leads_somewhere(member):
            yield member


def _leads_somewhere(alias: Alias) -> bool:
    try:
        return bool(alias.final_target)
    except AliasResolutionError:
        return False


def _refer(alias: Alias, home: Alias) -> None:
    """Put a short entry in the place of ``alias``."""
    target, door = alias.final_target, alias.parent
    assert isinstance(door, Module)
    summary = target.docstring.value.partition("\n\n")[0] if target.docstring else ""
    words = Docstring(f"{summary}\n\nDescribed in [`{home.path}`][{home.path}].")
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
    entry.parent = door
    door.members[alias.name] = entry
