"""Load reports in shared memory, for dispatchers on the scheduler's machine: no socket, no queue, no delay."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import LoadSink, NullLoadSink
from scheduler_components.shm_board import ReportCodec, ShmBoard, ShmPageWriter, open_shm_page_writer
from scheduler_components.values import LoadSnapshot

__all__ = ["LOAD_CODEC", "ShmLoadSink", "decode_load", "open_shm_load_board", "open_shm_load_sink"]

_decode = msgspec.msgpack.Decoder(LoadSnapshot).decode


def decode_load(body: bytes) -> LoadSnapshot:
    """Read one report: a msgpack map of a ``LoadSnapshot``. Unknown fields are skipped, missing ones are 0.

    Raises:
        DecodeError: it is none: not this kit wrote it.
    """
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a load report: {error}") from error


LOAD_CODEC: ReportCodec[LoadSnapshot] = ReportCodec(
    subject="load",
    layout_id=b"loadmap1",  # fixed: a map names its fields, so a new field does not make it another layout
    buffer_bytes=16 * 1024,  # a report with every part and the watermarks of 64 dispatchers has some 8 KiB
    encode=msgspec.msgpack.Encoder().encode,
    decode=decode_load,
    timestamp_of=attrgetter("timestamp"),
)


class ShmLoadSink:
    """A ``LoadSink`` that writes one rank's page. Made by ``open_shm_load_sink``."""

    __slots__ = ("_page",)
    wants_load = True

    def __init__(self, page: ShmPageWriter[LoadSnapshot]) -> None:
        self._page = page

    @property
    def sequence(self) -> int:
        """Number of the last report written; goes on over restarts of the rank."""
        return self._page.sequence

    def send(self, load: LoadSnapshot) -> None:
        """Write one report; readers see it, whole, at once.

        Raises:
            ValueError: the report is larger than a page, or the sink is closed; the last report stands.
            ForkedPublisherError: this is a child of the process that opened the sink; its page has another writer.
        """
        self._page.write(load)

    def close(self) -> None:
        """Let go of the page and of the right to write it; the last report stays. Safe to call twice."""
        self._page.close()

    def __repr__(self) -> str:
        return f"<ShmLoadSink: {self.sequence} reports>"


def open_shm_load_sink(directory: Path, parallel: ParallelState) -> LoadSink:
    """Take this rank's page, and go on after its last report; a rank that owns no stream takes none.

    Args:
        directory: the board; must be there.
        parallel: says whether this rank speaks, and as which stream.

    Raises:
        StartError: another writer has the page, or the directory cannot be written to, or has no room.
    """
    if not parallel.owns_kv_stream:
        return NullLoadSink()
    return ShmLoadSink(open_shm_page_writer(directory, parallel.kv_stream_index, LOAD_CODEC))


def open_shm_load_board(directory: Path, num_ranks: int) -> ShmBoard[LoadSnapshot]:
    """Make a reader of the load of rank 0 to ``num_ranks - 1``; it opens their pages when it reads.

    Args:
        directory: the board; it may come later.
        num_ranks: streams of the engine (``ParallelState.kv_stream_count``).
    """
    return ShmBoard(directory=directory, num_ranks=num_ranks, codec=LOAD_CODEC)
