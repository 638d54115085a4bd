"""One holder per file: the lock that the system keeps on an open file (``flock``), free as soon as its holder dies.

The package ``filelock`` keeps the open file to itself and polls while it waits; here the locked file is often the
data itself (a page in shared memory, a ledger), and some lock files leave with their holder.

Linux and other systems with ``flock``; local file systems and NFS 4. The lock belongs to the open file: two
``FileLock`` objects of one process exclude each other, two threads with one object do not.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scheduler_components.fork_hook import register_for_fork

__all__ = ["FileLock", "open_file_lock", "acquire_file_lock"]

_CLOSED = -1  # no file: the system refuses it, where the old number could be somebody else's file by now


class FileLock:
    """An open file and its lock. Made by ``open_file_lock`` (not held yet) or ``acquire_file_lock`` (held).

    In a forked child it is closed at once: a lock ends with its owner, not with the owner's last child.

    Attributes:
        path: of the file.
        descriptor: of the open file, for reading and writing; -1 once it is closed.
    """

    __slots__ = ("__weakref__", "descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        register_for_fork(self)

    @property
    def is_open(self) -> bool:
        """False once it is closed, and in a forked child."""
        return self.descriptor != _CLOSED

    def acquire(self, *, wait: bool) -> None:
        """Take the lock, if necessary after its holder.

        Args:
            wait: for the holder to let go, without a limit.

        Raises:
            BlockingIOError: not ``wait``, and somebody else holds it.
            OSError: the file is closed, or its file system has no locks.
        """
        if not self.is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path))
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def release(self) -> None:
        """Let go of the lock; the file stays open."""
        if self.is_open:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock within a ``with`` block; waits for it. Raises OSError as ``acquire`` does."""
        self.acquire(wait=True)
        try:
            yield
        finally:
            self.release()

    def remove(self) -> None:
        """Remove the file of a lock that is held, then close it. Whoever waits for it makes a file of their own."""
        if self.is_open:
            with suppress(FileNotFoundError):  # whoever cleaned the directory removed it too
                self.path.unlink()
            self.close()

    def close(self) -> None:
        """Close the file, and with it let go of the lock. Safe to call twice."""
        if self.is_open:
            os.close(self.descriptor)
            self.descriptor = _CLOSED

    def after_fork_in_child(self) -> None:
        """In a forked child: close its copy of the file. The owner keeps the lock."""
        self.close()


def open_file_lock(path: Path) -> FileLock:
    """Open the file at ``path``, or make it, empty and for its owner alone; the lock is not taken yet.

    Raises:
        OSError: it cannot be opened, or is a symbolic link.
    """
    return FileLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def acquire_file_lock(path: Path) -> FileLock:
    """Open the file at ``path``, or make it, and take its lock at once.

    Raises:
        BlockingIOError: somebody else holds it.
        OSError: the file cannot be opened, is a symbolic link, or its file system has no locks.
    """
    while True:
        lock = open_file_lock(path)
        try:
            lock.acquire(wait=False)
            if _is_at(path, lock.descriptor):
                return lock
        except OSError:
            lock.close()
            raise
        lock.close()  # its holder removed it between our opening and our locking: a lock on it excludes nobody


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
