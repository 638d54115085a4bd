"""SequenceFloor: a lower bound of a stream's numbers that survives its process, whatever the wall clock does.

A plain consumer drops batches whose number is at or below the last number that it saw. So a new epoch of a stream must
start above every number of every earlier epoch. The wall clock alone ensures that only while it is not set back. A
small file ensures it always: it holds the lowest number that no epoch can have used, with a checksum.

A publisher reserves numbers before it uses them, so the file is always ahead of the sent batches, also after a kill.
The publisher writes it at the start, at the close, and once per two billion batches, never per batch.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path
from zlib import crc32

from scheduler_components.errors import StartError
from scheduler_components.file_lock import FileLock, acquire_file_lock

__all__ = ["SequenceFloor", "open_sequence_floor"]

_log = logging.getLogger(__name__)

_RESERVED = 1 << 32
"""Numbers reserved together. An epoch that is killed wastes them: as many as 72 minutes of the clock in microseconds.
"""

_RETRY_AFTER = 1 << 20
"""Numbers until the next attempt after a reservation failed."""

_HIGHEST = 1 << 62
"""Readers accept numbers below 2^63, which no clock approaches."""

_MAX_FILE_BYTES = 32

_CONTENT = re.compile(rb"(\d{1,19})(?: ([0-9a-f]{8}))?\n")
"""A number and its CRC-32, as this module writes them. An operator may leave the checksum out, not the newline."""


class SequenceFloor:
    """The floor of one stream in one epoch. ``open_sequence_floor`` opens it; the sender of the numbers closes it."""

    __slots__ = ("_lock", "_path", "_renew_at", "first")

    def __init__(self, path: Path | None, lock: FileLock | None, first: int) -> None:
        self._path = path
        self._lock = lock
        self._renew_at = first + _RESERVED // 2 if path else _HIGHEST
        self.first = first

    def reserve_above(self, next_sequence: int) -> None:
        """Reserve more numbers when ``next_sequence`` approaches the end of the reservation. Cheap; never raises."""
        if next_sequence < self._renew_at or self._path is None:
            return
        try:
            _write(self._path, next_sequence + _RESERVED)
            self._renew_at = next_sequence + _RESERVED // 2
        except OSError as error:
            self._renew_at = next_sequence + _RETRY_AFTER
            _log.error("cannot reserve sequence numbers in %s: %s", self._path, error)

    def close(self, next_sequence: int) -> None:
        """Return unused numbers and close the file. Safe to call twice; never raises."""
        if self._path is None or self._lock is None or not self._lock.is_open:
            return
        try:
            _write(self._path, next_sequence)
        except OSError as error:  # the numbers stay reserved: the next epoch starts higher than necessary
            _log.warning("cannot return sequence numbers to %s: %s", self._path, error)
        self._lock.remove()


def open_sequence_floor(path: Path | None, *, wanted: int) -> SequenceFloor:
    """Choose the first number of an epoch: at least ``wanted``, and above all numbers of earlier epochs with this file.

    Args:
        path: the file, created if it is absent; None keeps no floor and returns ``wanted``.
        wanted: for example the wall clock in microseconds.

    Raises:
        StartError: another publisher uses the file, it is no regular file or is damaged, or it cannot be written.
    """
    if path is None:
        return SequenceFloor(None, None, wanted)
    try:
        lock = acquire_file_lock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError as error:
        raise StartError(
            str(path), "another publisher uses this sequence floor", "give each publisher its own file"
        ) from error
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        first = max(wanted, _read(path))
        _write(path, first + _RESERVED)
    except StartError:
        lock.remove()
        raise
    except OSError as error:
        lock.remove()
        raise _unusable(path, error) from error
    return SequenceFloor(path, lock, first)


def _unusable(path: Path, error: OSError) -> StartError:
    hint = "give a file in a directory that this process may write to"
    return StartError(str(path), f"cannot keep the sequence floor ({error.strerror})", hint)


def _read(path: Path) -> int:
    try:
        # Without O_NONBLOCK the opening of a FIFO waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StartError(str(path), "is no regular file", "give a file in a directory of the publisher's own")
        content = file.read(_MAX_FILE_BYTES + 1)
    found = _CONTENT.fullmatch(content)
    if found is None or int(found[1]) >= _HIGHEST or (found[2] is not None and int(found[2], 16) != crc32(found[1])):
        hint = "give another file, or write a number and a newline into it, above all numbers ever sent"
        raise StartError(str(path), "holds no sequence number, or a damaged one", hint)
    return int(found[1])


def _write(path: Path, number: int) -> None:
    """Replace the file atomically: a kill leaves either the old number or the new one."""
    new = path.with_name(f"{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        digits = b"%d" % number
        file.write(b"%s %08x\n" % (digits, crc32(digits)))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
