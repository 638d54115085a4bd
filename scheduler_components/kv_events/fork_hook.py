"""Being told of a fork, for what belongs to one process. To ask for the process's number in every call costs more."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

__all__ = ["call_in_children"]


def call_in_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child that this process forks, before any other code of the child.

    Python never lets go of what is registered; so it is small, and does not keep the method's object alive.
    """
    reference = weakref.WeakMethod(method)

    def in_child() -> None:
        inherited = reference()
        if inherited is not None:
            inherited()

    os.register_at_fork(after_in_child=in_child)
