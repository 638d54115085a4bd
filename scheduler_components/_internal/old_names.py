"""The finder of names that moved in 0.5: they work at their old place until 0.6, and warn with the new one.

``scheduler_components`` appends ``OldNameFinder`` to the finders of Python's import system, which asks it only for
modules that no file defines. The table is loaded for the first old name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["OldNameFinder", "old_names"]


class OldNameFinder(MetaPathFinder, Loader):
    """Finds a module at its old path, and reads its names at the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module that moved, or a module of a package that moved; None for any other."""
        if not fullname.startswith(("scheduler_components.", "observability.")):
            return None
        from scheduler_components._internal.old_name_table import OLD_NAMES

        parent, _, last = fullname.rpartition(".")
        if fullname in OLD_NAMES:
            new = OLD_NAMES[fullname]
        elif parent in OLD_NAMES:
            new = f"{OLD_NAMES[parent]}.{last}"
        else:
            return None
        return ModuleSpec(fullname, self, loader_state=new, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Warn, and let the module read its names when they are asked for."""
        assert module.__spec__ is not None
        _warn(module.__name__, module.__spec__.loader_state)
        module.__dict__["__getattr__"] = old_names(module.__name__, module.__spec__.loader_state)


def old_names(module: str, new_module: str | None = None) -> Callable[[str], Any]:
    """Return a ``__getattr__`` that reads the names of a module that moved.

    Args:
        module: ``__name__`` of the module.
        new_module: where the names are that the table does not list; None if the module is still where it was.
    """

    def read(name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, such as for ``__path__``
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from scheduler_components._internal.old_name_table import OLD_NAMES, REMOVED_NAMES

        old = f"{module}.{name}"
        if old in REMOVED_NAMES:
            raise AttributeError(f"{old} was removed in 0.5: {REMOVED_NAMES[old]}")
        if old in OLD_NAMES:
            _warn(old, OLD_NAMES[old])
            home, _, new_name = OLD_NAMES[old].rpartition(".")
            return getattr(import_module(home), new_name)
        if new_module is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(new_module), name)

    return read


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now, and goes in 0.6", DeprecationWarning, stacklevel=3)
