"""Describes a name that several packages export on one page alone: that of the innermost package.

On the other pages it stands with its signature, its first sentence and a link there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from griffe import Alias, AliasResolutionError, Class, Docstring, Extension, Function, Module, Object

Name = Alias | Object


class SharedNames(Extension):
    """The extension that mkdocstrings loads, after what completes the classes themselves.

    Args:
        modules: modules that have a page without being packages.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        super().__init__()
        self._modules = frozenset(modules)

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Names can be compared only when all modules of the package are read."""
        del kwargs
        exported = [name for door in self._doors(pkg) for name in _exported(door)]
        homes: dict[str, Name] = {}
        for name in exported:
            other = homes.get(name.canonical_path, name)
            homes[name.canonical_path] = max(other, name, key=lambda each: each.path.count("."))
        for name in exported:
            home = homes[name.canonical_path]
            if isinstance(name, Alias) and home is not name:
                _refer(name, home.path)

    def _doors(self, module: Module) -> Iterator[Module]:
        if module.exports and (module.is_init_module or module.path in self._modules):
            yield module
        for member in module.members.values():
            if isinstance(member, Module):
                yield from self._doors(member)


def _exported(door: Module) -> Iterator[Name]:
    """What a page shows; without names of another package, which are described here."""
    for name in map(str, door.exports or ()):
        member = door.members.get(name)
        if member is not None and (not isinstance(member, Alias) or _leads_somewhere(member)):
            yield member


def _leads_somewhere(alias: Alias) -> bool:
    """Whether griffe has read what the name stands for; it has not where that is another wing's."""
    try:
        return bool(alias.final_target)
    except AliasResolutionError:
        return False


def _refer(alias: Alias, home: str) -> None:
    """Put a short entry in the place of ``alias``."""
    target, door = alias.final_target, alias.parent
    assert isinstance(door, Module)
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
    entry.parent = door
    door.members[alias.name] = entry
