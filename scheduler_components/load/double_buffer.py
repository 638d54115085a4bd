"""Two buffers and a checksum: how one process shows others its newest report, in memory they share. Pure.

The writer fills the buffers in turn, so that one of them is always whole, whenever the writer is interrupted or
dies. A reader takes the buffer with the higher sequence whose checksum fits what it holds. That needs no lock, and
no promise of the processor about the order in which another core sees the bytes: a torn read has the wrong checksum,
and is read again. (A counter around a single buffer would need such a promise, which Python cannot ask for.)

Layout of each buffer: checksum 8, sequence 8, length 8 (all little-endian), then ``length`` bytes of the report. The
checksum is the CRC-32 of the report, begun with the sequence. It tells torn bytes from whole ones, not friend from
foe: who can write to the memory can write anything.
"""

from __future__ import annotations

import struct
from zlib import crc32

__all__ = ["DoubleBuffer"]

_HEAD = struct.Struct("<QQQ")
_HEAD_BYTES = 24


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

    def read(self) -> tuple[int, bytes] | None:
        """Return the newest whole report and its sequence; None when no buffer was whole when it was looked at.

        Buffers that nobody has written to are not whole; nor are they, for a moment, when the writer was quicker
        than this look. Look again to tell the two apart.
        """
        sequence, body = max((self._whole_buffer(0), self._whole_buffer(1)), key=lambda buffer: buffer[0])
        return (sequence, body) if sequence else None

    def _whole_buffer(self, index: int) -> tuple[int, bytes]:
        """Return sequence and body of a buffer; the sequence is 0 when its content is not whole."""
        at = self._start + index * self._buffer_bytes
        checksum, sequence, length = _HEAD.unpack_from(self._memory, at)
        if length > self._max_body_bytes or sequence % 2 != index:
            return 0, b""
        body = bytes(self._memory[at + _HEAD_BYTES : at + _HEAD_BYTES + length])
        return (sequence, body) if crc32(body, sequence) == checksum else (0, b"")
