"""Two buffers and a checksum: how one process shows others its newest report, in memory they share. Pure.

The writer fills the buffers in turn, so that one of them is always whole, whenever the writer is interrupted or
dies. A reader takes the buffer with the higher sequence whose checksum fits what it holds. That needs no lock, and
no promise of the processor about the order in which another core sees the bytes: a torn read has the wrong checksum,
and is read again. (A counter around a single buffer would need such a promise, which Python cannot ask for.) What a
reader looks at may be the memory itself or the file behind it.

Layout of each buffer: checksum 8, sequence 8, length 8 (all little-endian), then ``length`` bytes of the report. The
checksum is the CRC-32 of the report, begun with the sequence. It tells torn bytes from whole ones, not friend from
foe: who can write to the memory can write anything.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import struct
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar
from zlib import crc32

from scheduler_components.errors import DecodeError, FailureLog, ForkedPublisherError, StartError
from scheduler_components.file_lock import FileLock, take_file_lock
from scheduler_components.fork_hook import tell_of_forks

__all__ = [
    "DoubleBuffer",
    "ReadAt",
    "read_newest",
    "ShmPageFile",
    "open_shm_page_file",
    "DecodeBody",
    "LookAt",
    "ShmPageReader",
]

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""Copies so many bytes from such an offset, and fewer where the memory ends: ``os.pread`` of one descriptor."""

_HEAD = struct.Struct("<QQQ")
_HEAD_BYTES = 24
_unpack_head = _HEAD.unpack_from
_FIRST_LOOK_BYTES = 1024
"""Holds most reports whole, and is copied as quickly as the head alone; a longer report takes another look."""


class DoubleBuffer:
    """A stretch of memory with one writer and any number of readers. All zero, there is no report in it.

    Args:
        memory: what the stretch is part of. The caller keeps it mapped for as long as the buffers are used.
        start: of the stretch, in bytes.
        buffer_bytes: of one buffer; the stretch has two.
    """

    __slots__ = ("_buffer_bytes", "_max_body_bytes", "_memory", "_start")

    def __init__(self, memory: memoryview, *, start: int, buffer_bytes: int) -> None:
        self._memory = memory
        self._start = start
        self._buffer_bytes = buffer_bytes
        self._max_body_bytes = buffer_bytes - _HEAD_BYTES

    def write(self, body: bytes, sequence: int) -> None:
        """Write report ``sequence``, which must be one above the last written; the first is 1.

        Raises:
            ValueError: the report does not fit; the last one stands.
        """
        length = len(body)
        if length > self._max_body_bytes:
            raise ValueError(f"a report of {length} bytes, {self._max_body_bytes} fit")
        at = self._start + sequence % 2 * self._buffer_bytes
        head = _HEAD.pack(crc32(body, sequence), sequence, length)
        self._memory[at : at + _HEAD_BYTES + length] = head + body

    def last_sequence(self) -> int:
        """Return the sequence of the newest whole report, after which its next writer goes on; 0 without one."""
        found = read_newest(self._read_at, self._start, self._buffer_bytes)
        return 0 if found is None else found[0]

    def _read_at(self, num_bytes: int, at: int) -> bytes:
        return bytes(self._memory[at : at + num_bytes])


def read_newest(read_at: ReadAt, start: int, buffer_bytes: int, known_sequence: int = 0) -> tuple[int, bytes] | None:
    """Return the newest whole report and its sequence; None when this look found none.

    Buffers that nobody has written to are not whole; nor are they, for a moment, when the writer was quicker than
    this look. Look again to tell the two apart.

    Args:
        read_at: copies from the memory or file that the buffers are in.
        start, buffer_bytes: as for ``DoubleBuffer``.
        known_sequence: of the newest report that the reader has. Between the copies of the two buffers the writer
            may have come by, so that the report before that one seems to be the newest: such a look finds none. A
            sequence that is lower still is from a page that was begun anew.

    Raises:
        DecodeError: the buffers end early: the file was cut short.
    """
    num_bytes = min(buffer_bytes, _FIRST_LOOK_BYTES)
    even, odd = read_at(num_bytes, start), read_at(num_bytes, start + buffer_bytes)
    if len(even) < _HEAD_BYTES or len(odd) < _HEAD_BYTES:
        raise DecodeError("cut short: its buffers are not all there")
    looks = ((0, even), (1, odd)) if _unpack_head(even)[1] > _unpack_head(odd)[1] else ((1, odd), (0, even))
    for index, seen in looks:
        checksum, sequence, length = _unpack_head(seen)
        if not sequence or sequence % 2 != index or length > buffer_bytes - _HEAD_BYTES:
            continue
        end = _HEAD_BYTES + length
        if end <= num_bytes:
            body = seen[_HEAD_BYTES:end]
        else:
            body = read_at(length, start + index * buffer_bytes + _HEAD_BYTES)
        if crc32(body, sequence) == checksum:
            return None if sequence == known_sequence - 1 else (sequence, body)
    return None


# A page of shared memory as a file with one writer: opened, locked and mapped, from birth to close.


class ShmPageFile:
    """The writer's end of a page. Made by ``open_shm_page_file``.

    The page is mapped, so that a write costs no system call. Whoever cuts the file short meanwhile ends the writer,
    with SIGBUS at its next write; its readers go on, for they copy (``ShmPageReader``).

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
        self.memory.release()
        self._map.close()
        self._lock.close()

    def disown(self) -> None:
        """In a forked child: unmap the page, whose writer is the parent."""
        self._is_forked = True
        self.close()


def open_shm_page_file(path: Path, num_bytes: int) -> ShmPageFile:
    """Take the page at ``path``, or make it, all zero; only its owner may read it.

    Raises:
        StartError: another writer has the page, or the directory cannot be written to, or has no room.
    """
    try:
        lock = take_file_lock(path)
    except BlockingIOError as error:
        raise StartError(str(path), "another process writes there", "stop it, or give each rank its own") from error
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


# Reads the newest report of each rank from the pages of a board, which other processes write, and may damage.

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
