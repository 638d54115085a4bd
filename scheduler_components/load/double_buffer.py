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

import struct
from collections.abc import Callable
from typing import TypeAlias
from zlib import crc32

from scheduler_components.errors import DecodeError

__all__ = ["DoubleBuffer", "ReadAt", "read_newest"]

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
