"""The file of a sequence floor on a disk. ``sequence_floor`` has the rules."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from scheduler_components._internal.file_lock import FileLock, acquire_file_lock
from scheduler_components.errors import StartError
from scheduler_components.kv_events.sequence_floor import SequenceFloor, open_floor

__all__ = ["LockedFloorFile", "open_sequence_floor"]

_MAX_FILE_BYTES = 32


class LockedFloorFile:
    """The file of a floor, and the lock that admits one publisher.

    Args:
        path: created if it is absent.
        lock: held.
    """

    __slots__ = ("_lock", "_path")

    def __init__(self, path: Path, lock: FileLock) -> None:
        self._path = path
        self._lock = lock

    @property
    def name(self) -> str:
        """The file's path, for messages."""
        return str(self._path)

    @property
    def is_open(self) -> bool:
        """False after ``close``, and in a forked child."""
        return self._lock.is_open

    def read(self) -> bytes | None:
        """Return the content; None if there is no file yet.

        Raises:
            OSError, StartError: it cannot be read, or is no regular file.
        """
        path = self._path
        try:
            # Without O_NONBLOCK the opening of a FIFO waits for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StartError(str(path), "is no regular file", "give a file in a directory of the publisher's own")
            return file.read(_MAX_FILE_BYTES + 1)

    def replace(self, content: bytes) -> None:
        """Replace the content atomically: a kill leaves either the old content or the new one.

        Raises:
            OSError: it cannot be written.
        """
        path = self._path
        new = path.with_name(f"{path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Release and remove the lock. Safe to call twice."""
        self._lock.remove()


def open_sequence_floor(path: Path, *, wanted: int) -> SequenceFloor:
    """Choose the first number of an epoch: at least ``wanted``, and above all numbers of earlier epochs with this file.

    Args:
        path: the file, created if it is absent.
        wanted: for example the wall clock in microseconds.

    Raises:
        StartError: another publisher uses the file, it is no regular file or is damaged, or it cannot be written.
    """
    try:
        lock = acquire_file_lock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError as error:
        raise StartError(
            str(path), "another publisher uses this sequence floor", "give each publisher its own file"
        ) from error
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        return open_floor(LockedFloorFile(path, lock), wanted=wanted)
    except StartError:
        lock.remove()
        raise
    except OSError as error:
        lock.remove()
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> StartError:
    hint = "give a file in a directory that this process may write to"
    return StartError(str(path), f"cannot keep the sequence floor ({error.strerror})", hint)
