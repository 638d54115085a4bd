"""FileLock: an exclusive lock on an open file (``flock``), which the system releases when its holder dies.

The package ``filelock`` does not fit: it hides the open file and polls while it waits. Here the locked file is often
the data itself (a page in shared memory, an allocation log), and some lock files are removed with their holder.

Works on Linux and other systems with ``flock``, on local file systems and NFS 4. The lock belongs to the open file: two
``FileLock`` objects of one process exclude each other; two threads that share one object do not.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scheduler_components._internal.fork_hook import register_for_fork

__all__ = ["FileLock", "open_file_lock", "acquire_file_lock"]

_CLOSED = -1  # the system refuses -1, while the old descriptor may belong to another file by now


class FileLock:
    """An open file and its lock. ``open_file_lock`` returns it unlocked, ``acquire_file_lock`` locked.

    A forked child closes its copy immediately, so the lock ends with its owner and not with the owner's last child.

    Attributes:
        path: the file's path.
        descriptor: the open file, for reading and writing; -1 after it is closed.
    """

    __slots__ = ("__weakref__", "descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        register_for_fork(self.after_fork_in_child)

    @property
    def is_open(self) -> bool:
        """False after ``close``, and in a forked child."""
        return self.descriptor != _CLOSED

    def acquire(self, *, wait: bool) -> None:
        """Acquire the lock.

        Args:
            wait: wait without a limit until the holder releases it.

        Raises:
            BlockingIOError: ``wait`` is False and another process or object holds the lock.
            OSError: the file is closed, or its file system has no locks.
        """
        if not self.is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path))
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def release(self) -> None:
        """Release the lock; the file stays open."""
        if self.is_open:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it within a ``with`` block. Raises OSError as ``acquire`` does."""
        self.acquire(wait=True)
        try:
            yield
        finally:
            self.release()

    def remove(self) -> None:
        """Remove the file of a held lock, then close it. A process that waits for the lock creates a new file."""
        if self.is_open:
            with suppress(FileNotFoundError):  # another process has cleaned the directory
                self.path.unlink()
            self.close()

    def close(self) -> None:
        """Close the file and thereby release the lock. Safe to call twice."""
        if self.is_open:
            os.close(self.descriptor)
            self.descriptor = _CLOSED

    def after_fork_in_child(self) -> None:
        """Close the child's copy of the file. The owner keeps the lock."""
        self.close()


def open_file_lock(path: Path) -> FileLock:
    """Open the file at ``path`` without locking it. Create it if it is absent: empty, accessible to its owner only.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link.
    """
    return FileLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def acquire_file_lock(path: Path) -> FileLock:
    """Open or create the file at ``path`` and acquire its lock without waiting.

    Raises:
        BlockingIOError: another process or object holds the lock.
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
        lock.close()  # its holder removed the file after it was opened here: a lock on it excludes no other process


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
