"""A board: the newest report of each rank, in memory that the processes of one machine share.

A board is a directory, preferably on a memory file system such as ``/dev/shm``, with one file per rank: its page. The
process that creates the directory also removes it. The last report of a rank stays after the rank has ended; the time
in the report shows its age. ``metrics.shm_metrics_board`` provides the ``ReportCodec`` for metrics.

A page begins with ``"SCHBOARD"`` and eight bytes that identify the layout of its reports. A reader refuses a page of
another layout, and the next writer formats it again. Two buffers follow. Each contains a checksum, a sequence and a
length (8 bytes each, little-endian), then ``length`` bytes of one report. The checksum is the CRC-32 of the report,
seeded with the sequence. It detects torn reads; it does not authenticate the writer.

The writer fills the buffers alternately, so one of them is always complete, even if the writer is killed. A reader uses
the buffer with the higher sequence whose checksum matches. This needs no lock and does not depend on the order in which
another core sees the bytes: a torn read has the wrong checksum and is repeated. (A counter around a single buffer
would depend on that order, which Python cannot control.)

The writer maps its page, so a write needs no system call. Readers copy instead: if a page is truncated under a reader,
the copy raises an error for this page, whereas mapped memory would end the process with SIGBUS.
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

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.file_lock import FileLock, acquire_file_lock
from scheduler_components._internal.fork_hook import register_for_fork
from scheduler_components.errors import DecodeError, ForkedPublisherError, StartError

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
"""Copy a number of bytes from an offset, and fewer at the end of the memory: ``os.pread`` of one descriptor."""

_MAGIC = b"SCHBOARD"
_LAYOUT_ID_BYTES = 8
_PAGE_HEAD_BYTES = len(_MAGIC) + _LAYOUT_ID_BYTES

_BUFFER_HEAD = struct.Struct("<QQQ")
_BUFFER_HEAD_BYTES = _BUFFER_HEAD.size
_unpack_head = _BUFFER_HEAD.unpack_from

_FIRST_READ_BYTES = 1024
"""Read first from each buffer; a longer report needs a second read."""

_MAX_READS = 16
"""Reads of a page whose writer overtakes the reader. Each takes about 2 us."""


@attrs.frozen(kw_only=True)
class ReportCodec(Generic[Report]):
    """The format of a board's reports.

    Attributes:
        subject: content of the reports, for messages and as the suffix of the file names.
        layout_id: eight bytes that change when ``decode`` could misread the output of an older ``encode``.
        buffer_bytes: size of each of the two buffers of a page; a report can have 24 bytes less.
        encode: converts a report to bytes.
        decode: converts the bytes back. Raises DecodeError if they are not a report.
    """

    subject: str
    layout_id: bytes = attrs.field(validator=[attrs.validators.min_len(8), attrs.validators.max_len(8)])
    buffer_bytes: int
    encode: Callable[[Report], bytes]
    decode: Callable[[bytes], Report]
    head: bytes = attrs.field(init=False, default=attrs.Factory(lambda self: _MAGIC + self.layout_id, takes_self=True))

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return _PAGE_HEAD_BYTES + 2 * self.buffer_bytes

    def path(self, directory: Path, rank: int) -> Path:
        """Return the file of the page of ``rank``."""
        return directory / f"rank{rank}.{self.subject}"


class DoubleBufferedPage(Generic[Report]):
    """Write the reports of a page, which has one writer. Pure: works on any writable memory.

    Args:
        memory: ``codec.page_bytes`` bytes, mapped as long as the page is used.
        codec: format of the reports.
    """

    __slots__ = ("_codec", "_encode", "_memory")

    def __init__(self, memory: memoryview, codec: ReportCodec[Report]) -> None:
        self._memory = memory
        self._codec = codec
        self._encode = codec.encode

    def format(self) -> int:
        """Format the page for its new writer; return the sequence of its last report, or 0.

        Content of another layout or program is erased, so that no reader takes it for a report.
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

        The last report stays readable if this raises.

        Raises:
            ValueError: the report does not fit, or the memory was released.
            Exception: the codec cannot encode the report.
        """
        body = self._encode(report)
        length = len(body)
        buffer_bytes = self._codec.buffer_bytes
        if length > buffer_bytes - _BUFFER_HEAD_BYTES:
            raise ValueError(f"a report has {length} bytes, only {buffer_bytes - _BUFFER_HEAD_BYTES} fit in the page")
        at = _PAGE_HEAD_BYTES + sequence % 2 * buffer_bytes
        head = _BUFFER_HEAD.pack(crc32(body, sequence), sequence, length)
        self._memory[at : at + _BUFFER_HEAD_BYTES + length] = head + body


def read_newest(read_at: ReadAt, codec: ReportCodec[Report], known_sequence: int = 0) -> tuple[int, bytes] | None:
    """Return the sequence and the encoded bytes of the newest complete report of a page; None if there is none.

    No buffer is complete before the first write. While the writer overtakes this read, none may be complete for a
    moment either: read again to distinguish the two.

    Args:
        read_at: copies from the memory or file that has the page.
        codec: format of the reports.
        known_sequence: sequence of the newest report that the reader has. The writer may write between the copies of
            the two buffers, so that the report before the known one seems to be the newest: this read returns None
            then. A still lower sequence belongs to a page that was formatted again.

    Raises:
        DecodeError: the page is truncated, of another layout, or no page of such reports.
    """
    buffer_bytes = codec.buffer_bytes
    num_bytes = min(buffer_bytes, _FIRST_READ_BYTES)
    first, second = read_at(_PAGE_HEAD_BYTES + num_bytes, 0), read_at(num_bytes, _PAGE_HEAD_BYTES + buffer_bytes)
    if not first.startswith(codec.head):
        if first and not any(first[:_PAGE_HEAD_BYTES]):
            return None  # its writer has not formatted it yet
        raise DecodeError(_describe_bad_head(first, codec))
    if len(first) < _PAGE_HEAD_BYTES + _BUFFER_HEAD_BYTES or len(second) < _BUFFER_HEAD_BYTES:
        raise DecodeError("the page is truncated: its buffers are incomplete")
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


def _describe_bad_head(head: bytes, codec: ReportCodec[Report]) -> str:
    if len(head) < _PAGE_HEAD_BYTES:
        return "the page is truncated: its head is incomplete"
    if not head.startswith(_MAGIC):
        return f"the file is not a page of {codec.subject}"
    found = head[len(_MAGIC) : _PAGE_HEAD_BYTES].hex()
    return (
        f"the {codec.subject} page has layout {found}, this reader expects {codec.layout_id.hex()}; "
        "run writer and reader from one version of the kit"
    )


class ShmPageFile:
    """The file of a page, opened, locked and mapped by its one writer. ``open_shm_page_file`` creates it.

    If another process truncates the file, the next write ends the writer with SIGBUS; readers continue. A forked child
    closes its copy of the file.

    Attributes:
        memory: the page. ``close`` releases it; a later write raises ValueError.
    """

    __slots__ = ("__weakref__", "_is_forked", "_lock", "_map", "_pid", "memory")

    def __init__(self, lock: FileLock, num_bytes: int) -> None:
        self._map = mmap.mmap(lock.descriptor, num_bytes)
        self._lock = lock
        self._pid = os.getpid()
        self._is_forked = False
        self.memory = memoryview(self._map)
        register_for_fork(self.after_fork_in_child)

    def check_owner(self) -> None:
        """Raise ForkedPublisherError in a forked child of the process that opened the page. No system call."""
        if self._is_forked:
            raise ForkedPublisherError(self._pid)

    def close(self) -> None:
        """Release the page and its lock; its content stays. Safe to call twice."""
        self.memory.release()
        self._map.close()
        self._lock.close()

    def after_fork_in_child(self) -> None:
        """Unmap the page in a forked child, because the parent is its writer."""
        self._is_forked = True
        self.close()


def open_shm_page_file(path: Path, num_bytes: int) -> ShmPageFile:
    """Open the page at ``path``, or create it with zeros; only its owner can read it.

    Raises:
        StartError: another writer holds the page, or the directory is not writable or full.
    """
    try:
        lock = acquire_file_lock(path)
    except BlockingIOError as error:
        hint = "stop that process, or give each rank its own page"
        raise StartError(str(path), "another process writes this page", hint) from error
    except OSError as error:
        hint = "create the directory first, preferably under /dev/shm"
        raise StartError(str(path), f"cannot be opened ({error.strerror})", hint) from error
    try:
        _fill_up(lock.descriptor, num_bytes)
        return ShmPageFile(lock, num_bytes)
    except OSError as error:
        lock.close()
        raise StartError(str(path), f"cannot be mapped ({error.strerror})", "free space in the file system") from error


def _fill_up(descriptor: int, num_bytes: int) -> None:
    # Writing zeros, unlike resizing, allocates the space: a full file system raises here and not SIGBUS in a step.
    size = os.fstat(descriptor).st_size
    while size < num_bytes:
        size += os.pwrite(descriptor, bytes(num_bytes - size), size)


class ShmPageWriter(Generic[Report]):
    """Writes one rank's page of a board. ``open_shm_page_writer`` creates it; one thread writes.

    A write encodes the report, computes a checksum and copies both into memory, without lock or system call.

    Attributes:
        sequence: sequence of the last report written. Numbering continues when the rank restarts.
    """

    __slots__ = ("_file", "_page", "sequence")

    def __init__(self, file: ShmPageFile, codec: ReportCodec[Report]) -> None:
        self._file = file
        self._page = DoubleBufferedPage(file.memory, codec)
        self.sequence = self._page.format()

    def write(self, report: Report) -> None:
        """Write one report, which readers can see immediately. The last report stays readable if this raises.

        Raises:
            ValueError: the report is larger than a buffer, or the page is closed.
            ForkedPublisherError: this is a child of the process that opened the page.
            Exception: the codec cannot encode the report.
        """
        try:
            self._page.write(report, self.sequence + 1)
        except ValueError:
            self._file.check_owner()  # a forked child has released the memory, so the check is only needed here
            raise
        self.sequence += 1

    def close(self) -> None:
        """Release the page and its lock; the last report stays readable. Safe to call twice."""
        self._file.close()


def open_shm_page_writer(directory: Path, rank: int, codec: ReportCodec[Report]) -> ShmPageWriter[Report]:
    """Open or create the page of ``rank`` and continue after its last report.

    Raises:
        StartError: another writer holds the page, or the directory is not writable or full.
    """
    return ShmPageWriter(open_shm_page_file(codec.path(directory, rank), codec.page_bytes), codec)


@dataclass(slots=True, kw_only=True)
class ShmBoard(Generic[Report]):
    """Reads the newest reports of all ranks of one engine. Each read opens the pages and closes them again.

    A page that is missing, damaged or replaced affects only its own rank: the board returns this rank's last good
    report. Threads may read concurrently; one waits for the other.

    Attributes:
        directory: the board.
        num_ranks: number of pages, for rank 0 to ``num_ranks - 1``.
        codec: format of the reports.
        failures: counts refused pages (another layout, truncated, not a file, not a report) and logs each episode once.
        failed_reads: reads of a page that returned no report, because none was written yet, the writer overtook every
            attempt, or the page was refused.
    """

    directory: Path
    num_ranks: int
    codec: ReportCodec[Report]
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    failed_reads: int = field(default=0, init=False)
    _newest: dict[int, tuple[int, bytes, Report]] = field(default_factory=dict, init=False, repr=False)
    _reading: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def read(self) -> dict[int, Report]:
        """Return rank -> newest report, for the ranks that have written one. Never raises.

        A rank goes back to an earlier report only if its page was removed or damaged and then formatted again.
        """
        with self._reading:
            for rank in range(self.num_ranks):
                is_readable = False
                with self.failures.guard(f"reading the {self.codec.subject} of rank {rank}"):
                    is_readable = self._read_page(rank)
                self.failed_reads += not is_readable
            return {rank: report for rank, (_, _, report) in sorted(self._newest.items())}

    def _read_page(self, rank: int) -> bool:
        """Read the page of ``rank``; False if it exists and has no complete report."""
        try:
            file = FileIO(str(self.codec.path(self.directory, rank)), opener=_open_to_read)
        except FileNotFoundError:
            return True
        with file:
            status = os.fstat(file.fileno())
            if status.st_size == 0 and stat.S_ISREG(status.st_mode):
                return True  # its writer has not filled it yet
            return self._find_newest(rank, partial(os.pread, file.fileno()))

    def _find_newest(self, rank: int, read_at: ReadAt) -> bool:
        known = self._newest.get(rank)
        for _ in range(_MAX_READS):
            found = read_newest(read_at, self.codec, 0 if known is None else known[0])
            if found is not None:
                if known is None or found != known[:2]:
                    self._newest[rank] = (*found, self.codec.decode(found[1]))
                return True
        return False


def _open_to_read(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
