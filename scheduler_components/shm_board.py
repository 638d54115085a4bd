"""A board: the newest report of each rank, in memory that the processes of one machine share.

A board is a directory, best on a memory file system such as ``/dev/shm``, with one file per rank: its page. Whoever
makes the directory removes it. A rank that ends leaves its last report, whose time shows that it is old. Load and
metrics each give a ``ReportCodec``; everything else about a board is here.

A page begins with its head: ``"SCHBOARD"``, then eight bytes that name the layout of its reports. A reader refuses a
page of another layout, and the next writer begins it anew. Two buffers follow. Each holds a checksum, a sequence and
a length (8 bytes each, little-endian), then ``length`` bytes of one report. The checksum is the CRC-32 of the report,
begun with the sequence. It tells torn bytes from whole ones, not friend from foe: who can write to the memory can
write anything.

The writer fills the buffers in turn, so that one of them is always whole, whenever the writer is interrupted or
dies. A reader takes the buffer with the higher sequence whose checksum fits. That needs no lock, and no promise of
the processor about the order in which another core sees the bytes: a torn read has the wrong checksum, and is read
again. (A counter around a single buffer would need such a promise, which Python cannot ask for.)

The writer maps its page, so that a write costs no system call. Readers copy: a page that is cut short under a reader
is an error for that page, where in mapped memory it would be a signal that ends the process.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar
from zlib import crc32

import attrs

from scheduler_components.errors import DecodeError, ForkedPublisherError, StartError
from scheduler_components.failure_log import FailureLog
from scheduler_components.file_lock import FileLock, acquire_file_lock
from scheduler_components.fork_hook import register_for_fork

__all__ = [
    "DoubleBufferedPage",
    "ReadAt",
    "ReportCodec",
    "ShmBoard",
    "ShmPageWriter",
    "ShmPageFile",
    "open_shm_page_writer",
    "open_shm_page_file",
    "read_newest",
]

logger = logging.getLogger(__name__)

Report = TypeVar("Report")

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""Copies so many bytes from such an offset, and fewer where the memory ends: ``os.pread`` of one descriptor."""

_MAGIC = b"SCHBOARD"
_LAYOUT_ID_BYTES = 8
_PAGE_HEAD_BYTES = len(_MAGIC) + _LAYOUT_ID_BYTES

_BUFFER_HEAD = struct.Struct("<QQQ")
_BUFFER_HEAD_BYTES = _BUFFER_HEAD.size
_unpack_head = _BUFFER_HEAD.unpack_from

_FIRST_LOOK_BYTES = 1024
"""Holds most reports whole, and is copied as quickly as the head alone; a longer report takes another look."""

_LOOKS = 16
"""At two copies of a microsecond each, a writer that overtakes a reader so often writes nothing else."""


@attrs.frozen(kw_only=True)
class ReportCodec(Generic[Report]):
    """What a board has to know of its reports.

    Attributes:
        subject: what they say, for messages; also how the names of the board's files end.
        layout_id: eight bytes that change when ``decode`` could misread what an older ``encode`` wrote.
        buffer_bytes: of each of a page's two buffers; a report may have 24 bytes less.
        encode: turns a report into bytes. May remember the last ones, so each writer has its own codec.
        decode: turns the bytes back. Raises DecodeError: they are no report.
        timestamp_of: tells when a report was made, by the wall clock, which all processes of a machine share.
    """

    subject: str
    layout_id: bytes = attrs.field(validator=[attrs.validators.min_len(8), attrs.validators.max_len(8)])
    buffer_bytes: int
    encode: Callable[[Report], bytes]  # noqa: SCH005 a codec is its three stateless verbs
    decode: Callable[[bytes], Report]
    timestamp_of: Callable[[Report], float]
    head: bytes = attrs.field(init=False, default=attrs.Factory(lambda self: _MAGIC + self.layout_id, takes_self=True))

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page."""
        return _PAGE_HEAD_BYTES + 2 * self.buffer_bytes

    def path(self, directory: Path, rank: int) -> Path:
        """Where the page of ``rank`` is."""
        return directory / f"rank{rank}.{self.subject}"


class DoubleBufferedPage(Generic[Report]):
    """The writer's end of a page, which has one writer. Pure: any writable memory will do.

    Args:
        memory: ``codec.page_bytes`` bytes. The caller keeps it mapped for as long as the page is used.
        codec: of the reports.
    """

    __slots__ = ("_codec", "_encode", "_memory")

    def __init__(self, memory: memoryview, codec: ReportCodec[Report]) -> None:
        self._memory = memory
        self._codec = codec
        self._encode = codec.encode

    def format(self) -> int:
        """Make the page one of this layout, for its new writer; return the sequence of its last report, or 0.

        What another layout, or another program, left there is wiped: it must not be read as reports.
        """
        codec = self._codec
        if self._memory[:_PAGE_HEAD_BYTES] != codec.head:
            self._memory[: codec.page_bytes] = bytes(codec.page_bytes)
            self._memory[:_PAGE_HEAD_BYTES] = codec.head
        found = read_newest(self._read_at, codec)
        return 0 if found is None else found[0]

    def _read_at(self, num_bytes: int, at: int) -> bytes:
        return bytes(self._memory[at : at + num_bytes])

    def write(self, report: Report, sequence: int) -> None:
        """Write report ``sequence``, which must be one above the last written; the first is 1.

        Raises:
            ValueError: the report does not fit, and the last one stands; or the memory was released.
            Exception: what the codec raises for a report that it cannot encode; the last one stands.
        """
        body = self._encode(report)
        length = len(body)
        buffer_bytes = self._codec.buffer_bytes
        if length > buffer_bytes - _BUFFER_HEAD_BYTES:
            raise ValueError(f"a report of {length} bytes, {buffer_bytes - _BUFFER_HEAD_BYTES} fit")
        at = _PAGE_HEAD_BYTES + sequence % 2 * buffer_bytes
        head = _BUFFER_HEAD.pack(crc32(body, sequence), sequence, length)
        self._memory[at : at + _BUFFER_HEAD_BYTES + length] = head + body


def read_newest(read_at: ReadAt, codec: ReportCodec[Report], known_sequence: int = 0) -> tuple[int, bytes] | None:
    """Return the newest whole report of a page, still encoded, and its sequence; None when this look found none.

    Buffers that nobody has written to are not whole; nor are they, for a moment, when the writer was quicker than
    this look. Look again to tell the two apart.

    Args:
        read_at: copies from the memory or file that holds the page.
        codec: of the reports.
        known_sequence: of the newest report that the reader has. Between the copies of the two buffers the writer
            may have come by, so that the report before that one seems to be the newest: such a look finds none. A
            sequence that is lower still is from a page that was begun anew.

    Raises:
        DecodeError: this is no page of such reports, or of another version's, or it is cut short.
    """
    buffer_bytes = codec.buffer_bytes
    num_bytes = min(buffer_bytes, _FIRST_LOOK_BYTES)
    first, second = read_at(_PAGE_HEAD_BYTES + num_bytes, 0), read_at(num_bytes, _PAGE_HEAD_BYTES + buffer_bytes)
    if not first.startswith(codec.head):
        if first and not any(first[:_PAGE_HEAD_BYTES]):
            return None  # its writer is about to claim it
        raise DecodeError(_what_is_wrong_with(first, codec))
    if len(first) < _PAGE_HEAD_BYTES + _BUFFER_HEAD_BYTES or len(second) < _BUFFER_HEAD_BYTES:
        raise DecodeError("cut short: its buffers are not all there")
    even, odd = (0, first, _PAGE_HEAD_BYTES), (1, second, 0)
    is_even_newer = _unpack_head(first, _PAGE_HEAD_BYTES)[1] > _unpack_head(second)[1]
    for index, seen, at in (even, odd) if is_even_newer else (odd, even):
        checksum, sequence, length = _unpack_head(seen, at)
        if not sequence or sequence % 2 != index or length > buffer_bytes - _BUFFER_HEAD_BYTES:
            continue
        if _BUFFER_HEAD_BYTES + length <= num_bytes:
            body = seen[at + _BUFFER_HEAD_BYTES : at + _BUFFER_HEAD_BYTES + length]
        else:
            body = read_at(length, _PAGE_HEAD_BYTES + index * buffer_bytes + _BUFFER_HEAD_BYTES)
        if crc32(body, sequence) == checksum:
            return None if sequence == known_sequence - 1 else (sequence, body)
    return None


def _what_is_wrong_with(head: bytes, codec: ReportCodec[Report]) -> str:
    if len(head) < _PAGE_HEAD_BYTES:
        return "cut short: its head is not all there"
    if not head.startswith(_MAGIC):
        return f"not a page of {codec.subject}"
    found = head[len(_MAGIC) : _PAGE_HEAD_BYTES].hex()
    return (
        f"its {codec.subject} has layout {found}, this reader knows {codec.layout_id.hex()}; "
        "run writer and reader from one version of the kit"
    )


class ShmPageFile:
    """The file of a page, opened, locked and mapped by its one writer. Made by ``open_shm_page_file``.

    Whoever cuts the file short meanwhile ends the writer, with SIGBUS at its next write; its readers go on.

    A child forked from this process has no part in the page: there, the file is closed at once.

    Attributes:
        memory: the page; released by ``close``, after which writing to it is a ValueError.
    """

    __slots__ = ("__weakref__", "_is_forked", "_lock", "_map", "_pid", "memory")

    def __init__(self, lock: FileLock, num_bytes: int) -> None:
        self._map = mmap.mmap(lock.descriptor, num_bytes)
        self._lock = lock
        self._pid = os.getpid()
        self._is_forked = False
        self.memory = memoryview(self._map)
        register_for_fork(self)

    def check_owner(self) -> None:
        """Tell a forked child why it cannot write; costs no system call.

        Raises:
            ForkedPublisherError: this is a child of the process that opened the page, which is the one writer.
        """
        if self._is_forked:
            raise ForkedPublisherError(self._pid)

    def close(self) -> None:
        """Let go of the page and of the right to write it; what it says stays. Safe to call twice."""
        self.memory.release()
        self._map.close()
        self._lock.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: unmap the page, whose writer is the parent."""
        self._is_forked = True
        self.close()


def open_shm_page_file(path: Path, num_bytes: int) -> ShmPageFile:
    """Take the page at ``path``, or make it, all zero; only its owner may read it.

    Raises:
        StartError: another writer has the page, or the directory cannot be written to, or has no room.
    """
    try:
        lock = acquire_file_lock(path)
    except BlockingIOError as error:
        hint = "stop that process, or give each rank a page of its own"
        raise StartError(str(path), "another process writes there", hint) from error
    except OSError as error:
        hint = "make the directory first, best under /dev/shm"
        raise StartError(str(path), f"cannot be opened ({error.strerror})", hint) from error
    try:
        _fill_up(lock.descriptor, num_bytes)
        return ShmPageFile(lock, num_bytes)
    except OSError as error:
        lock.close()
        raise StartError(str(path), f"cannot be mapped ({error.strerror})", "make room in the file system") from error


def _fill_up(descriptor: int, num_bytes: int) -> None:
    """Write the zeros instead of only sizing the file: without room, that fails here and not, fatally, in a step."""
    size = os.fstat(descriptor).st_size
    while size < num_bytes:
        size += os.pwrite(descriptor, bytes(num_bytes - size), size)


class ShmPageWriter(Generic[Report]):
    """One rank's page of a board, for its writer. Made by ``open_shm_page_writer``; one thread writes.

    A write costs one encoding, one checksum and one copy into memory: no lock, no system call, no wait.

    Attributes:
        sequence: of the last report written; goes on over restarts of the rank.
    """

    __slots__ = ("_file", "_page", "sequence")

    def __init__(self, file: ShmPageFile, codec: ReportCodec[Report]) -> None:
        self._file = file
        self._page = DoubleBufferedPage(file.memory, codec)
        self.sequence = self._page.format()

    def write(self, report: Report) -> None:
        """Write one report; readers see it, whole, at once.

        Raises:
            ValueError: the report is larger than a buffer, or the page is closed; the last report stands.
            ForkedPublisherError: this is a child of the process that opened the page.
            Exception: what the codec raises for a report that it cannot encode; the last one stands.
        """
        try:
            self._page.write(report, self.sequence + 1)
        except ValueError:
            self._file.check_owner()  # in a forked child the memory is released: asked here, it costs a write nothing
            raise
        self.sequence += 1

    def close(self) -> None:
        """Let go of the page and of the right to write it; the last report stays. Safe to call twice."""
        self._file.close()


def open_shm_page_writer(directory: Path, rank: int, codec: ReportCodec[Report]) -> ShmPageWriter[Report]:
    """Take the page of ``rank``, or make it, and go on after its last report.

    Raises:
        StartError: another writer has the page, or the directory cannot be written to, or has no room.
    """
    return ShmPageWriter(open_shm_page_file(codec.path(directory, rank), codec.page_bytes), codec)


@dataclass(slots=True, kw_only=True)
class ShmBoard(Generic[Report]):
    """Reads the newest reports of all ranks of one engine; a rank that has not come yet is looked for again.

    A page may be removed and made anew, or damaged: it costs itself, and the rank's last good report is given
    instead. Threads may read at once; one waits for the other.

    Attributes:
        directory: the board.
        num_ranks: pages to look for, rank 0 to ``num_ranks - 1``.
        codec: of the reports.
        keeps_files_open: whether pages stay open from one read to the next, until ``close``. False for a board that is
            read seldom, and that nobody closes.
        failures: pages refused (of another layout, cut short, not a file, not a report), logged once per episode.
    """

    directory: Path
    num_ranks: int
    codec: ReportCodec[Report]
    keeps_files_open: bool = True
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _pages: list[_ShmPageReader[Report]] = field(init=False, repr=False)
    _reading: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        paths = (self.codec.path(self.directory, rank) for rank in range(self.num_ranks))
        self._pages = [_ShmPageReader(path, self.codec) for path in paths]

    @property
    def failed_reads(self) -> int:
        """Reads of single pages that found a page and no report in it: none is written yet, the writer was quicker
        each time, or the page was refused.
        """
        return sum(page.failed_reads for page in self._pages)

    def read(self) -> dict[int, Report]:
        """Return rank -> newest report, of the ranks that have written one. Never raises.

        A rank goes back to an earlier report only where its page was begun anew, because it was removed or damaged.
        """
        newest: dict[int, Report] = {}
        with self._reading:
            for rank, page in enumerate(self._pages):
                self._read_page(rank, page)
                if page.newest is not None:
                    newest[rank] = page.newest
        return newest

    def _read_page(self, rank: int, page: _ShmPageReader[Report]) -> None:
        try:
            found = page.read()
        except (OSError, DecodeError) as error:
            page.failed_reads += 1
            page.close()
            self.failures.failed(f"reading the {self.codec.subject} of rank {rank}", error)
            return
        if found and self.failures.counts:  # even a call that finds nothing to do is part of a read's cost
            self.failures.succeeded(f"reading the {self.codec.subject} of rank {rank}")
        if not self.keeps_files_open:
            page.close()

    def stale_ranks(self, *, now: float, max_age_s: float) -> list[int]:
        """Return the ranks whose report, by the last ``read``, is older than ``max_age_s``, or missing.

        Args:
            now: by the wall clock.
            max_age_s: seconds.
        """
        timestamp_of = self.codec.timestamp_of
        return [
            rank
            for rank, page in enumerate(self._pages)
            if page.newest is None or now - timestamp_of(page.newest) > max_age_s
        ]

    def close(self) -> None:
        """Let go of the pages; the next read opens them again. Safe to call twice."""
        with self._reading:
            for page in self._pages:
                page.close()


class _ShmPageReader(Generic[Report]):
    """The reader's end of one page, which another process writes, and may damage."""

    __slots__ = ("_codec", "_file", "_found", "_path", "_read_at", "newest", "failed_reads")

    def __init__(self, path: Path, codec: ReportCodec[Report]) -> None:
        self._path = path
        self._codec = codec
        self._file: FileIO | None = None
        self._found: tuple[int, bytes] | None = None
        self.newest: Report | None = None
        self.failed_reads = 0

    def read(self) -> bool:
        """Read the page's newest report into ``newest``; True when there is a whole one.

        Raises:
            OSError, DecodeError: the page is refused.
        """
        file = self._file or self._open()
        while file is not None:
            known = self._found
            found = read_newest(self._read_at, self._codec, 0 if known is None else known[0]) or self._look()
            if found is not None and found != known:
                self.newest = self._codec.decode(found[1])
                self._found = found
                return True
            if os.fstat(file.fileno()).st_nlink:
                self.failed_reads += found is None
                return found is not None
            self.close()  # somebody removed it: look at the page that stands there now
            file = self._open()
        return False

    def _look(self) -> tuple[int, bytes] | None:
        """Look again, at a page whose writer was quicker."""
        known_sequence = 0 if self._found is None else self._found[0]
        for _ in range(_LOOKS - 1):
            found = read_newest(self._read_at, self._codec, known_sequence)
            if found is not None:
                return found
        return None

    def _open(self) -> FileIO | None:
        """Open the page; None while its writer has not come, or is about to fill the file."""
        try:
            file = FileIO(str(self._path), opener=_open_to_read)
        except FileNotFoundError:
            return None
        status = os.fstat(file.fileno())
        if status.st_size == 0 and stat.S_ISREG(status.st_mode):
            file.close()
            return None
        self._file = file
        self._read_at: ReadAt = partial(os.pread, file.fileno())
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open_to_read(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe that somebody put there would wait for its writer.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
