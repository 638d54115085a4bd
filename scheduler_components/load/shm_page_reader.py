"""Reads the newest report of each rank from the pages of a board, which other processes write, and may damage."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from scheduler_components.errors import DecodeError
from scheduler_components.failure_log import FailureLog
from scheduler_components.load.double_buffer import ReadAt

__all__ = ["DecodeBody", "LookAt", "ShmPageReader"]

Entry = TypeVar("Entry")

LookAt: TypeAlias = Callable[[ReadAt, int], tuple[int, bytes] | None]
"""``read_newest`` of one kind of page, given the sequence that is known. Raises DecodeError: it is no such page."""

DecodeBody: TypeAlias = Callable[[int, bytes], Entry]
"""Reads the report of a sequence. Raises DecodeError: it is none."""

_LOOKS = 16
"""At two copies of a microsecond each, a writer that overtakes a reader so often writes nothing else."""


class ShmPageReader(Generic[Entry]):
    """The readers' end of the pages of one board.

    Pages are copied and not mapped: one that is cut short under the reader is an error then, and in mapped memory a
    signal that ends the process. They stay open from one read to the next; one that was removed meanwhile is let go
    of, and looked for again by the next read. One thread at a time may use a reader.

    Args:
        subject: what the pages hold, for the log.
        path_of: tells where the page of a rank is.
        look_at, decode: know what is in a page.
        logger: of the board.

    Attributes:
        unread: reads of single pages that found a page and no report in it; the boards say why that may be.
        failures: pages refused, logged once an episode.
    """

    __slots__ = ("_decode", "_known", "_look_at", "_newest", "_pages", "_path_of", "_subject", "failures", "unread")

    def __init__(
        self,
        *,
        subject: str,
        path_of: Callable[[int], Path],
        look_at: LookAt,
        decode: DecodeBody[Entry],
        logger: logging.Logger,
    ) -> None:
        self._subject = subject
        self._path_of = path_of
        self._look_at = look_at
        self._decode = decode
        self._pages: dict[int, tuple[FileIO, ReadAt]] = {}
        self._known: dict[int, tuple[int, bytes]] = {}
        self._newest: dict[int, Entry] = {}
        self.unread = 0
        self.failures = FailureLog(logger)

    def newest(self) -> dict[int, Entry]:
        """Return rank -> newest report, of what was read so far; a copy."""
        return dict(self._newest)

    def read(self, num_ranks: int) -> None:
        """Look at the pages of rank 0 to ``num_ranks - 1``. Never raises."""
        for rank in range(num_ranks):
            try:
                self._read_page(rank)
            except (OSError, DecodeError) as error:
                self.unread += 1
                self.failures.failed(self._activity(rank), error)
                self._let_go(rank)

    def close(self) -> None:
        """Let go of the pages; the next read opens them again. Safe to call twice."""
        for rank in list(self._pages):
            self._let_go(rank)

    def _read_page(self, rank: int) -> None:
        page = self._pages.get(rank) or self._open(rank)
        if page is None:
            return
        file, read_at = page
        known = self._known.get(rank)
        known_sequence = 0 if known is None else known[0]
        for _ in range(_LOOKS):
            found = self._look_at(read_at, known_sequence)
            if found is not None:
                break
        else:
            self.unread += 1
        if found is not None and found != known:
            self._newest[rank] = self._decode(*found)
            self._known[rank] = found
        elif os.fstat(file.fileno()).st_nlink == 0:  # no news: perhaps the page is no longer the rank's
            self._let_go(rank)
        if found is not None and self.failures.counts:  # even a call that finds nothing to do is part of a read's cost
            self.failures.succeeded(self._activity(rank))

    def _open(self, rank: int) -> tuple[FileIO, ReadAt] | None:
        """Open a rank's page; None while its writer has not come, or is about to fill the file."""
        try:
            file = FileIO(str(self._path_of(rank)), opener=_open_to_read)
        except FileNotFoundError:
            return None
        status = os.fstat(file.fileno())
        if status.st_size == 0 and stat.S_ISREG(status.st_mode):
            file.close()
            return None
        page = self._pages[rank] = file, partial(os.pread, file.fileno())
        return page

    def _let_go(self, rank: int) -> None:
        page = self._pages.pop(rank, None)
        if page is not None:
            page[0].close()

    def _activity(self, rank: int) -> str:
        return f"reading the {self._subject} of rank {rank}"


def _open_to_read(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe that somebody put there would wait for its writer.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
