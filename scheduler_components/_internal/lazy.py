"""Import the names of a package on first use, so that importing the package stays cheap."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from scheduler_components._internal.old_names import old_names

__all__ = ["lazy_exports"]


def lazy_exports(package: str, modules: dict[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports each name of `modules` on first use.

    Args:
        package: `__name__` of the package.
        modules: full name of a module -> its names, separated by spaces. The module's own name gives the module.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            return old_names(package)(name)
        module = import_module(module_of[name])
        return module if module.__name__ == f"{package}.{name}" else getattr(module, name)

    return get
