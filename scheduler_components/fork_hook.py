"""Notify objects of a fork that belong to one process: sockets, locks and shared pages.

In a forked child, ``after_fork_in_child`` is called on each registered object before any other code runs. From then on
the object does not use the resources of its parent; it only closes its copies of file descriptors. Sending raises
``ForkedPublisherError``; closing does nothing. Comparing process ids instead would cost one system call per batch.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["ForkAware", "register_for_fork"]


class ForkAware(Protocol):
    """An object with sockets, files or threads that a forked child must not use."""

    def after_fork_in_child(self) -> None:
        """Give up the parent's resources. Called in the child before any other code runs."""
        ...


_registered: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_for_fork(owner: ForkAware) -> None:
    """Call ``owner.after_fork_in_child`` in every child that this process forks. Keep only a weak reference to it."""
    _registered.add(owner)


def _notify_all() -> None:
    for owner in tuple(_registered):
        owner.after_fork_in_child()


# A hook cannot be unregistered, so one hook serves all objects.
os.register_at_fork(after_in_child=_notify_all)
