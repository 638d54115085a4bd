"""Load reports in shared memory, for dispatchers on the scheduler's machine: no socket, no queue, nothing to be late.

A board is a directory, best on a memory file system such as ``/dev/shm``, with one file a rank. Who makes the
directory removes it; a rank that ends leaves its last report, which its age shows to be old.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from scheduler_components.errors import DecodeError, FailureLog
from scheduler_components.shm_board import (
    DoubleBuffer,
    ReadAt,
    ShmPageFile,
    ShmPageReader,
    open_shm_page_file,
    read_newest,
)
from scheduler_components.values import LoadSnapshot

__all__ = [
    "PAGE_BYTES",
    "LoadPage",
    "decode_load",
    "look_at_load_page",
    "BoardEntry",
    "ShmLoadBoard",
    "ShmLoadSink",
    "open_shm_load_sink",
]

# One rank's page of a shared-memory load board: a ``DoubleBuffer`` of msgpack. Pure: works on any writable memory.

PAGE_BYTES = 32 * 1024
"""Two buffers of 16 KiB: a report with every part and the watermarks of 64 dispatchers has some 8 KiB."""

_BUFFER_BYTES = PAGE_BYTES // 2

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoadSnapshot).decode


class LoadPage:
    """The writer's end of a page, of which there is one.

    Args:
        memory: ``PAGE_BYTES`` bytes; all zero at first. The caller keeps it mapped for as long as the page is used.
    """

    __slots__ = ("_reports",)

    def __init__(self, memory: memoryview) -> None:
        self._reports = DoubleBuffer(memory, start=0, buffer_bytes=_BUFFER_BYTES)

    def write(self, load: LoadSnapshot, sequence: int) -> None:
        """Write report ``sequence``, which must be one above the last written.

        Raises:
            ValueError: the report does not fit; the last one stands.
        """
        self._reports.write(_encode(load), sequence)

    def last_sequence(self) -> int:
        """Return the sequence of the last report, after which a new writer goes on; 0 when there is none."""
        return self._reports.last_sequence()


def look_at_load_page(read_at: ReadAt, known_sequence: int = 0) -> tuple[int, bytes] | None:
    """Return the newest whole report of a page and its sequence, as ``read_newest`` does, which says more."""
    return read_newest(read_at, 0, _BUFFER_BYTES, known_sequence)


def decode_load(body: bytes) -> LoadSnapshot:
    """Read one report.

    Raises:
        DecodeError: it is none: not this kit wrote it.
    """
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a load report: {error}") from error


logger = logging.getLogger(__name__)


class BoardEntry(msgspec.Struct, frozen=True, gc=False):
    """One rank's newest report; ``sequence`` goes on over restarts of the rank."""

    sequence: int
    load: LoadSnapshot

    def age_s(self, now: float) -> float:
        """Seconds since the counts were read; ``now`` is the wall clock, which all processes of a machine share."""
        return max(0.0, now - self.load.timestamp)


class ShmLoadSink:
    """A ``LoadSink`` that writes one rank's page. Made by ``open_shm_load_sink``.

    Attributes:
        sequence: of the last report written.
    """

    __slots__ = ("_file", "_page", "sequence")

    def __init__(self, file: ShmPageFile) -> None:
        self._file = file
        self._page = LoadPage(file.memory)
        self.sequence = self._page.last_sequence()

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


@dataclass(slots=True, kw_only=True)
class ShmLoadBoard:
    """Reads the newest reports of all ranks of one engine; a rank that has not come yet is looked for again.

    A page may be removed and made anew, or cut short under the reader: it is copied from its file, not mapped. One
    thread at a time may read.

    Attributes:
        directory: the board.
        num_ranks: pages to look for, rank 0 to ``num_ranks - 1``.
    """

    directory: Path
    num_ranks: int
    _pages: ShmPageReader[BoardEntry] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._pages = ShmPageReader(
            subject="load",
            path_of=partial(_page_file, self.directory),
            look_at=look_at_load_page,
            decode=_decode_entry,
            logger=logger,
        )

    @property
    def unread(self) -> int:
        """Reads that found a page and no report in it: none is written yet, the writer was quicker each time, or the
        page was refused. The rank's last good report, if there was one, was given instead.
        """
        return self._pages.unread

    @property
    def failures(self) -> FailureLog:
        """Pages refused (cut short, not a file, not a report), logged once an episode."""
        return self._pages.failures

    def read(self) -> dict[int, BoardEntry]:
        """Return rank -> newest report, of the ranks that have written one. Never raises.

        A rank's sequence goes back only where its page was begun anew, because it was removed or damaged.
        """
        self._pages.read(self.num_ranks)
        return self._pages.newest()

    def stale_ranks(self, *, now: float, max_age_s: float) -> list[int]:
        """Return the ranks whose newest report, by the last ``read``, is older than ``max_age_s``, or missing."""
        newest = self._pages.newest()
        return [rank for rank in range(self.num_ranks) if rank not in newest or newest[rank].age_s(now) > max_age_s]

    def close(self) -> None:
        """Let go of the pages. Safe to call twice."""
        self._pages.close()


def _decode_entry(sequence: int, body: bytes) -> BoardEntry:
    return BoardEntry(sequence, decode_load(body))


def _page_file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.load"
