"""One rank's page of a shared-memory load board: a ``DoubleBuffer`` of msgpack. Pure: works on any writable memory."""

from __future__ import annotations

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.load.double_buffer import DoubleBuffer
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["PAGE_BYTES", "LoadPage"]

PAGE_BYTES = 32 * 1024
"""Two buffers of 16 KiB: a report with every part and the watermarks of 64 dispatchers has some 8 KiB."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoadSnapshot).decode


class LoadPage:
    """A page in memory; one process writes to it, any number read.

    Args:
        memory: ``PAGE_BYTES`` bytes; all zero at first. The caller keeps it mapped for as long as the page is used.
    """

    __slots__ = ("_reports",)

    def __init__(self, memory: memoryview) -> None:
        self._reports = DoubleBuffer(memory, start=0, buffer_bytes=PAGE_BYTES // 2)

    def write(self, load: LoadSnapshot, sequence: int) -> None:
        """Write report ``sequence``, which must be one above the last written.

        Raises:
            ValueError: the report does not fit; the last one stands.
        """
        self._reports.write(_encode(load), sequence)

    def read(self) -> tuple[int, LoadSnapshot] | None:
        """Return the newest whole report and its sequence; None when no buffer was whole when it was looked at.

        A page that nobody has written to has no whole buffer; nor has one, for a moment, whose writer was quicker
        than this look. Look again to tell the two apart.

        Raises:
            DecodeError: the newest whole buffer holds something else than a report: not this kit wrote it.
        """
        found = self._reports.read()
        if found is None:
            return None
        try:
            return found[0], _decode(found[1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"not a load report: {error}") from error
