"""One rank's page of a shared-memory load board: two buffers and a digest. Pure: works on any writable memory.

The writer fills the buffers in turn, so that one of them is always whole, whenever the writer is interrupted or
dies. A reader takes the buffer with the higher sequence whose digest covers exactly what it holds. That needs no
lock, and no promise of the processor about the order in which another core sees the bytes: a torn read has the wrong
digest, and is read again.

Layout of each buffer: digest 16, sequence 8, length 8 (both little-endian), then ``length`` bytes of msgpack.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["PAGE_BYTES", "LoadPage"]

PAGE_BYTES = 32 * 1024
"""Two buffers of 16 KiB: a report with every part and the watermarks of 64 dispatchers has some 8 KiB."""

_BUFFER_BYTES = PAGE_BYTES // 2
_DIGEST_BYTES = 16
_HEAD = struct.Struct("<QQ")
_BODY_AT = _DIGEST_BYTES + _HEAD.size
_MAX_BODY_BYTES = _BUFFER_BYTES - _BODY_AT

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoadSnapshot).decode


class LoadPage:
    """A page in memory; one process writes to it, any number read.

    Args:
        memory: ``PAGE_BYTES`` bytes; all zero at first. The caller keeps it mapped for as long as the page is used.
    """

    __slots__ = ("_memory",)

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def write(self, load: LoadSnapshot, sequence: int) -> None:
        """Write report ``sequence``, which must be one above the last written.

        Raises:
            ValueError: the report does not fit; the last one stands.
        """
        body = _encode(load)
        if len(body) > _MAX_BODY_BYTES:
            raise ValueError(f"a load report of {len(body)} bytes, {_MAX_BODY_BYTES} fit")
        content = _HEAD.pack(sequence, len(body)) + body
        at = sequence % 2 * _BUFFER_BYTES
        self._memory[at : at + _DIGEST_BYTES + len(content)] = _digest(content) + content

    def read(self) -> tuple[int, LoadSnapshot] | None:
        """Return the newest whole report and its sequence; None when no buffer was whole when it was looked at.

        A page that nobody has written to has no whole buffer; nor has one, for a moment, whose writer was quicker
        than this look. Look again to tell the two apart.

        Raises:
            DecodeError: the newest whole buffer holds something else than a report: not this kit wrote it.
        """
        found = max((self._whole_buffer(0), self._whole_buffer(1)), key=lambda buffer: buffer[0])
        sequence, body = found
        if sequence < 0:
            return None
        try:
            return sequence, _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"not a load report: {error}") from error

    def _whole_buffer(self, index: int) -> tuple[int, bytes]:
        """Return sequence and body of a buffer; the sequence is -1 when its content is not whole."""
        at = index * _BUFFER_BYTES
        copy = bytes(self._memory[at : at + _BODY_AT])
        sequence, length = _HEAD.unpack_from(copy, _DIGEST_BYTES)
        if length > _MAX_BODY_BYTES or sequence % 2 != index:
            return -1, b""
        body = bytes(self._memory[at + _BODY_AT : at + _BODY_AT + length])
        if _digest(copy[_DIGEST_BYTES:] + body) != copy[:_DIGEST_BYTES]:
            return -1, b""
        return sequence, body


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
