"""A lock between the polling thread and the threads that query a subscriber."""

from __future__ import annotations

import threading
from types import TracebackType

__all__ = ["FairRLock"]


class FairRLock:
    """A reentrant lock that admits waiting threads between two messages.

    The polling thread holds the lock while it reads a slice of messages, and calls ``yield_to_waiters`` between two of
    them. Without that call a query would wait for the whole slice, because a thread that only releases and acquires a
    lock usually gets it back itself.

    The lock is reentrant, so that a listener, which runs under it, may query too.
    """

    __slots__ = ("_depth", "_holder", "_lock", "_turn")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held while waiting for the lock, so that the waiter gets it next
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder != me:  # only this thread ever writes this value
            with self._turn:
                self._lock.acquire()
            self._holder = me
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()

    def yield_to_waiters(self) -> None:
        """Admit a waiting thread, if any, then acquire the lock again. Call it at depth one."""
        if self._turn.locked():
            self.__exit__(None, None, None)
            self.__enter__()
