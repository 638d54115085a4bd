"""Names of a package that are imported when they are first asked for, so that its door stays cheap to open."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(package: str, modules: dict[str, str]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``: each name of ``modules`` is taken from its module when it is first used.

    Args:
        package: ``__name__`` of the package.
        modules: names of a module, separated by spaces, by the module's full name; the module's own name is the module.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(module_of[name])
        return module if module.__name__ == f"{package}.{name}" else getattr(module, name)

    return get
