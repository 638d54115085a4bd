"""One rank's page of a shared-memory load board: a ``DoubleBuffer`` of msgpack. Pure: works on any writable memory."""

from __future__ import annotations

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.load.double_buffer import DoubleBuffer, ReadAt, read_newest
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["PAGE_BYTES", "LoadPage", "decode_load", "look_at_load_page"]

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
