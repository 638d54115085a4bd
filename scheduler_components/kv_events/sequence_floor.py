"""SequenceFloor: a lower bound of a stream's numbers that survives its process, whatever the wall clock does. Pure: it
has no file.

A plain consumer drops batches whose number is at or below the last number that it saw. So a new epoch of a stream must
start above every number of every earlier epoch. The wall clock alone ensures that only while it is not set back. A
small file ensures it always: it holds the lowest number that no epoch can have used, with a checksum.

A publisher reserves numbers before it uses them, so the file is always ahead of the sent batches, also after a kill.
The publisher writes it at the start, at the close, and once per two billion batches, never per batch.
"""

from __future__ import annotations

import logging
import re
from typing import Protocol
from zlib import crc32

from scheduler_components.errors import StartError

__all__ = ["FloorFile", "SequenceFloor", "open_floor"]

_log = logging.getLogger(__name__)

_RESERVED = 1 << 32
"""Numbers reserved together. An epoch that is killed wastes them: as many as 72 minutes of the clock in microseconds.
"""

_RETRY_AFTER = 1 << 20
"""Numbers until the next attempt after a reservation failed."""

_HIGHEST = 1 << 62
"""Readers accept numbers below 2^63, which no clock approaches."""

_CONTENT = re.compile(rb"(\d{1,19})(?: ([0-9a-f]{8}))?\n")
"""A number and its CRC-32, as this module writes them. An operator may leave the checksum out, not the newline."""


class FloorFile(Protocol):
    """The file of a floor, open for one publisher."""

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        ...

    @property
    def is_open(self) -> bool:
        """False after ``close``, and in a forked child."""
        ...

    def read(self) -> bytes | None:
        """Return the content; None if there is no file yet.

        Raises:
            OSError, StartError: it cannot be read.
        """
        ...

    def replace(self, content: bytes) -> None:
        """Replace the content atomically: a kill leaves either the old content or the new one.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def close(self) -> None:
        """Let another publisher use the file."""
        ...


class SequenceFloor:
    """The floor of one stream in one epoch. The sender of the numbers closes it.

    Args:
        file: keeps the floor.
        first: the first number of the epoch.
    """

    __slots__ = ("_file", "_renew_at", "first")

    def __init__(self, file: FloorFile, first: int) -> None:
        self._file = file
        self._renew_at = first + _RESERVED // 2
        self.first = first

    def reserve_above(self, next_sequence: int) -> None:
        """Reserve more numbers when ``next_sequence`` approaches the end of the reservation. Cheap; never raises."""
        if next_sequence < self._renew_at:
            return
        try:
            self._file.replace(_content(next_sequence + _RESERVED))
            self._renew_at = next_sequence + _RESERVED // 2
        except OSError as error:
            self._renew_at = next_sequence + _RETRY_AFTER
            _log.error("cannot reserve sequence numbers in %s: %s", self._file.name, error)

    def close(self, next_sequence: int) -> None:
        """Return unused numbers and close the file. Safe to call twice; never raises."""
        if not self._file.is_open:
            return
        try:
            self._file.replace(_content(next_sequence))
        except OSError as error:  # the numbers stay reserved: the next epoch starts higher than necessary
            _log.warning("cannot return sequence numbers to %s: %s", self._file.name, error)
        self._file.close()


def open_floor(file: FloorFile, *, wanted: int) -> SequenceFloor:
    """Choose the first number of an epoch: at least ``wanted``, and above all numbers of earlier epochs with this file.

    Raises:
        OSError: the file cannot be read or written.
        StartError: its content is damaged.
    """
    first = max(wanted, _number_in(file.read(), file.name))
    file.replace(_content(first + _RESERVED))
    return SequenceFloor(file, first)


def _number_in(content: bytes | None, name: str) -> int:
    if content is None:
        return 0
    found = _CONTENT.fullmatch(content)
    if found is None or int(found[1]) >= _HIGHEST or (found[2] is not None and int(found[2], 16) != crc32(found[1])):
        hint = "give another file, or write a number and a newline into it, above all numbers ever sent"
        raise StartError(name, "holds no sequence number, or a damaged one", hint)
    return int(found[1])


def _content(number: int) -> bytes:
    digits = b"%d" % number
    return b"%s %08x\n" % (digits, crc32(digits))
