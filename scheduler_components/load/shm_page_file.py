"""A page of shared memory as a file with one writer: opened, locked and mapped, from birth to close."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from scheduler_components.errors import ForkedPublisherError, StartError
from scheduler_components.fork_hook import tell_of_forks

__all__ = ["ShmPageFile", "open_shm_page_file"]


class ShmPageFile:
    """The writer's end of a page. Made by ``open_shm_page_file``.

    The page is mapped, so that a write costs no system call. Whoever cuts the file short meanwhile ends the writer,
    with SIGBUS at its next write; its readers go on, for they copy (``ShmPageReader``).

    A child forked from this process has no part in the page: there, the file is closed at once.

    Attributes:
        memory: the page; released by ``close``, after which writing to it is a ValueError.
    """

    __slots__ = ("__weakref__", "_descriptor", "_is_forked", "_map", "_pid", "memory")

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._map = mmap.mmap(descriptor, num_bytes)
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._is_forked = False
        self.memory = memoryview(self._map)
        tell_of_forks(self)

    def check_owner(self) -> None:
        """Call it before each write; costs no system call.

        Raises:
            ForkedPublisherError: this is a child of the process that opened the page, which is the one writer.
        """
        if self._is_forked:
            raise ForkedPublisherError(self._pid)

    def close(self) -> None:
        """Let go of the page and of the right to write it; what it says stays. Safe to call twice."""
        if self._descriptor >= 0:
            self.memory.release()
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def disown(self) -> None:
        """In a forked child: close its copies. The lock must end with its owner, not with the last child."""
        self._is_forked = True
        self.close()


def open_shm_page_file(path: Path, num_bytes: int) -> ShmPageFile:
    """Take the page at ``path``, or make it, all zero; only its owner may read it.

    Raises:
        StartError: another writer has the page, or the directory cannot be written to, or has no room.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        mend = "make the directory first, best under /dev/shm"
        raise StartError(str(path), f"cannot be opened ({error.strerror})", mend) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _fill_up(descriptor, num_bytes)
        return ShmPageFile(descriptor, num_bytes)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StartError(str(path), "another process writes there", "stop it, or give each rank its own") from error
    except OSError as error:
        os.close(descriptor)
        raise StartError(str(path), f"cannot be mapped ({error.strerror})", "make room in the file system") from error


def _fill_up(descriptor: int, num_bytes: int) -> None:
    """Write the zeros instead of only sizing the file: without room, that fails here and not, fatally, in a step."""
    size = os.fstat(descriptor).st_size
    while size < num_bytes:
        size += os.pwrite(descriptor, bytes(num_bytes - size), size)
