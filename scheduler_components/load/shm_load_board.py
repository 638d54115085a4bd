"""Load reports in shared memory, for dispatchers on the scheduler's machine: no socket, no queue, nothing to be late.

A board is a directory, best on a memory file system such as ``/dev/shm``, with one file a rank. Who makes the
directory removes it; a rank that ends leaves its last report, which its age shows to be old.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.load.board_page import PAGE_BYTES, LoadPage
from scheduler_components.load.shm_page_file import ShmPageFile, open_shm_page_file
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["BoardEntry", "ShmLoadBoard", "ShmLoadSink", "open_shm_load_sink"]

_LOOKS = 16
"""At two copies of a microsecond each, a writer that overtakes a reader so often writes nothing else."""


class BoardEntry(msgspec.Struct, frozen=True, gc=False):
    """One rank's newest report; ``sequence`` goes on over restarts of the rank."""

    sequence: int
    load: LoadSnapshot

    def age_s(self, now: float) -> float:
        """Seconds since the counts were read; ``now`` is the wall clock, which all processes of a machine share."""
        return max(0.0, now - self.load.timestamp)


class _MappedPage:
    """A rank's file, mapped into a reader's process."""

    __slots__ = ("_map", "_view", "page")

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        self.page = LoadPage(self._view)

    def close(self) -> None:
        self._view.release()
        self._map.close()


class ShmLoadSink:
    """A ``LoadSink`` that writes one rank's page. Made by ``open_shm_load_sink``.

    Attributes:
        sequence: of the last report written.
    """

    __slots__ = ("_file", "_page", "sequence")

    def __init__(self, file: ShmPageFile) -> None:
        self._file = file
        self._page = LoadPage(file.memory)
        self.sequence = _last_sequence(self._page)

    def send(self, load: LoadSnapshot) -> None:
        """Write one report; readers see it, whole, at once.

        Raises:
            ValueError: the report is larger than a page, or the sink is closed; the last report stands.
            ForkedPublisherError: this is a child of the process that opened the sink; its page has another writer.
        """
        self._file.check_owner()
        self._page.write(load, self.sequence + 1)
        self.sequence += 1

    def close(self) -> None:
        """Let go of the page and of the right to write it; the last report stays. Safe to call twice."""
        self._file.close()

    def __repr__(self) -> str:
        return f"<ShmLoadSink: {self.sequence} reports>"


def open_shm_load_sink(directory: Path, rank: int) -> ShmLoadSink:
    """Take the page of ``rank`` (``ParallelState.kv_stream_index``), and go on after its last report.

    Raises:
        StartError: another writer has the page, or the directory cannot be written to, or has no room.
    """
    return ShmLoadSink(open_shm_page_file(_page_file(directory, rank), PAGE_BYTES))


def _last_sequence(page: LoadPage) -> int:
    try:
        last = page.read()
    except DecodeError:
        return 0  # the file held something else; it is ours now
    return 0 if last is None else last[0]


@dataclass(slots=True, kw_only=True)
class ShmLoadBoard:
    """Reads the newest reports of all ranks of one engine; a rank that has not come yet is looked for again.

    Attributes:
        directory: the board.
        num_ranks: pages to look for, rank 0 to ``num_ranks - 1``.
        unread: looks that found a page and no report in it: the writer was quicker, or the page is not a report's.
    """

    directory: Path
    num_ranks: int
    unread: int = field(default=0, init=False)
    _pages: dict[int, _MappedPage] = field(default_factory=dict, init=False, repr=False)
    _newest: dict[int, BoardEntry] = field(default_factory=dict, init=False, repr=False)

    def read(self) -> dict[int, BoardEntry]:
        """Return rank -> newest report, of the ranks that have written one. A rank's sequence never goes back."""
        for rank in range(self.num_ranks):
            mapped = self._pages.get(rank) or self._map(rank)
            if mapped is not None:
                self._look(rank, mapped.page)
        return dict(self._newest)

    def stale_ranks(self, *, now: float, max_age_s: float) -> list[int]:
        """Return the ranks whose newest report, by the last ``read``, is older than ``max_age_s``, or missing."""
        newest = self._newest
        return [rank for rank in range(self.num_ranks) if rank not in newest or newest[rank].age_s(now) > max_age_s]

    def _look(self, rank: int, page: LoadPage) -> None:
        known = self._newest.get(rank)
        for _ in range(_LOOKS):
            try:
                found = page.read()
            except DecodeError:
                break
            if found is not None:
                if known is None or found[0] > known.sequence:
                    self._newest[rank] = BoardEntry(*found)
                return
        self.unread += 1

    def _map(self, rank: int) -> _MappedPage | None:
        try:
            descriptor = os.open(_page_file(self.directory, rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(descriptor).st_size < PAGE_BYTES:
                return None  # its writer is about to size it
            mapped = self._pages[rank] = _MappedPage(descriptor)
        finally:
            os.close(descriptor)
        return mapped

    def close(self) -> None:
        """Let go of the pages. Safe to call twice."""
        for mapped in self._pages.values():
            mapped.close()
        self._pages.clear()


def _page_file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.load"
