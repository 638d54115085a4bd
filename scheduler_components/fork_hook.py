"""Being told of a fork, for what belongs to one process. To ask for the process's number in every call costs more."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

__all__ = ["call_in_children"]

_methods: set[weakref.WeakMethod[Callable[[], None]]] = set()


def call_in_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child that this process forks, before any other code of the child.

    The method's object is not kept alive by this, and is forgotten with its end.
    """
    _methods.add(weakref.WeakMethod(method, _methods.discard))


def _call_all() -> None:
    for reference in tuple(_methods):
        method = reference()
        if method is not None:
            method()


# A hook at fork can never be taken back: so there is one, and not one for each object.
os.register_at_fork(after_in_child=_call_all)
