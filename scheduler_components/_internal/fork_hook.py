"""Notify objects of a fork that belong to one process: sockets, locks and shared pages.

In a forked child, each registered method is called before any other code runs. From then on
the object does not use the resources of its parent; it only closes its copies of file descriptors. Sending raises
``ForkedPublisherError``; closing does nothing. Comparing process ids instead would cost one system call per batch.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TypeAlias

from scheduler_components.errors import ForkedPublisherError

__all__ = ["ForkGuard", "register_for_fork"]


_Methods: TypeAlias = dict[int, weakref.WeakMethod[Callable[[], None]]]

_registered: _Methods = {}
_numbers = count()


def register_for_fork(give_up: Callable[[], None]) -> None:
    """Call this method in every child that this process forks. Keep only a weak reference to its object."""
    number = next(_numbers)
    _registered[number] = weakref.WeakMethod(give_up, partial(_forget, _registered, number))


def _forget(registered: _Methods, number: int, _: object) -> None:
    """Runs also at the exit of the interpreter, when this module has no globals any more."""
    registered.pop(number, None)


class ForkGuard:
    """Refuse a sender's calls in a forked child. The sender keeps the guard, and asks it before it uses its socket.

    Attributes:
        is_forked: True in a child of the process that made the guard.
    """

    __slots__ = ("__weakref__", "_owner_pid", "is_forked")

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self.is_forked = False
        register_for_fork(self.after_fork_in_child)

    def check(self) -> None:
        """Raise ForkedPublisherError in a forked child. No system call."""
        if self.is_forked:
            raise ForkedPublisherError(self._owner_pid)

    def after_fork_in_child(self) -> None:
        """Let every ``check`` raise from now on."""
        self.is_forked = True


def _notify_all() -> None:
    for method in tuple(_registered.values()):
        if (give_up := method()) is not None:
            give_up()


# A hook cannot be unregistered, so one hook serves all objects.
os.register_at_fork(after_in_child=_notify_all)
