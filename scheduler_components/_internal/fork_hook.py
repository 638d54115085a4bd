"""Notify objects of a fork that belong to one process: sockets, locks and shared pages.

In a forked child, ``after_fork_in_child`` is called on each registered object before any other code runs. From then on
the object does not use the resources of its parent; it only closes its copies of file descriptors. Sending raises
``ForkedPublisherError``; closing does nothing. Comparing process ids instead would cost one system call per batch.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from scheduler_components.errors import ForkedPublisherError

__all__ = ["ForkAware", "ForkGuard", "register_for_fork"]


class ForkAware(Protocol):
    """An object with sockets, files or threads that a forked child must not use."""

    def after_fork_in_child(self) -> None:
        """Give up the parent's resources. Called in the child before any other code runs."""
        ...


_registered: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_for_fork(owner: ForkAware) -> None:
    """Call ``owner.after_fork_in_child`` in every child that this process forks. Keep only a weak reference to it."""
    _registered.add(owner)


class ForkGuard:
    """Refuse a sender's calls in a forked child. The sender keeps the guard, and asks it before it uses its socket.

    Attributes:
        is_forked: True in a child of the process that made the guard.
    """

    __slots__ = ("__weakref__", "_owner_pid", "is_forked")

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self.is_forked = False
        register_for_fork(self)

    def check(self) -> None:
        """Raise ForkedPublisherError in a forked child. No system call."""
        if self.is_forked:
            raise ForkedPublisherError(self._owner_pid)

    def after_fork_in_child(self) -> None:
        """Let every ``check`` raise from now on."""
        self.is_forked = True


def _notify_all() -> None:
    for owner in tuple(_registered):
        owner.after_fork_in_child()


# A hook cannot be unregistered, so one hook serves all objects.
os.register_at_fork(after_in_child=_notify_all)
