"""Being told of a fork, for what belongs to one process: sockets, locks, shared pages.

In a child, ``disown`` is called on each before any other code runs. From then on it does nothing with what it has of
its parent, except to close copies of file descriptors; to send raises ``ForkedPublisherError``; to close does nothing.
To ask for the process's number in every call instead would cost a system call per batch.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["ProcessBound", "tell_of_forks"]


class ProcessBound(Protocol):
    """Something with sockets, files or threads that a forked child must not use."""

    def disown(self) -> None:
        """Called in the child, before any other code of it."""
        ...


_told: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


def tell_of_forks(owner: ProcessBound) -> None:
    """Call ``owner.disown`` in every child that this process forks. This does not keep ``owner`` alive."""
    _told.add(owner)


def _tell_all() -> None:
    for owner in tuple(_told):
        owner.disown()


# A hook at fork can never be taken back: so there is one, and not one for each object.
os.register_at_fork(after_in_child=_tell_all)
