"""Being told of a fork, for what belongs to one process: sockets, locks, shared pages.

In a child, ``after_fork_in_child`` is called on each before any other code runs. From then on it does nothing with what
it has of
its parent, except to close copies of file descriptors; to send raises ``ForkedPublisherError``; to close does nothing.
To ask for the process's number in every call instead would cost a system call per batch.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["ForkAware", "register_for_fork"]


class ForkAware(Protocol):
    """Something with sockets, files or threads that a forked child must not use."""

    def after_fork_in_child(self) -> None:
        """Called in the child, before any other code of it."""
        ...


_told: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_for_fork(owner: ForkAware) -> None:
    """Call ``owner.after_fork_in_child`` in every child that this process forks. This does not keep ``owner`` alive."""
    _told.add(owner)


def _tell_all() -> None:
    for owner in tuple(_told):
        owner.after_fork_in_child()


# A hook at fork can never be taken back: so there is one, and not one for each object.
os.register_at_fork(after_in_child=_tell_all)
