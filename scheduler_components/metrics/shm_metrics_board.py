"""Metrics in shared memory: each rank writes its newest report, and the serving process of the machine reads it.

A report is the msgpack map of a ``SchedulerStats``. It has no ``KvMetrics``, which are derived from the load.
"""

from __future__ import annotations

import logging
import operator
from pathlib import Path
from typing import SupportsFloat

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.errors import DecodeError
from scheduler_components.metrics.shm_board import ReportCodec, ShmBoard, ShmPageWriter, open_shm_page_writer
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullMetricsSink
from scheduler_components.values import SchedulerStats

__all__ = [
    "METRICS_CODEC",
    "ShmMetricsSink",
    "decode_report",
    "encode_report",
    "open_shm_metrics_board",
    "open_shm_metrics_sink",
]


def _as_number(value: object) -> int | float:
    """Convert a numpy scalar or a tensor with one element, which engines report too."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        if isinstance(value, SupportsFloat):
            return float(value)
        raise


encode_report = msgspec.msgpack.Encoder(enc_hook=_as_number).encode
"""Encode one report. Raises TypeError or OverflowError for a value that is not a number of at most 64 bits."""

_decode = msgspec.msgpack.Decoder(SchedulerStats).decode


def decode_report(body: bytes) -> SchedulerStats:
    """Decode one report. Unknown fields are skipped and missing ones get their default.

    Raises:
        DecodeError: the bytes are not a report, or its parts do not match.
    """
    try:
        stats = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a metrics report: {error}") from error
    for name, _ in stats.labels:
        if not (name.isascii() and name.isidentifier()):
            raise DecodeError(f"not a metrics report: {name!r} is not a label name")
    for each in () if stats.latencies is None else msgspec.structs.astuple(stats.latencies):
        if len(each.counts) != len(each.bounds) + 1:
            raise DecodeError(f"not a metrics report: {len(each.counts)} counts for {len(each.bounds)} bounds")
    return stats


METRICS_CODEC: ReportCodec[SchedulerStats] = ReportCodec(
    subject="metrics",
    layout_id=b"statsmap",  # fixed: a map has field names, so a new field does not change the layout
    buffer_bytes=16 * 1024,  # a report has about 3 KB, with watermarks of 64 dispatchers 8 KB
    encode=encode_report,
    decode=decode_report,
)

logger = logging.getLogger(__name__)


class ShmMetricsSink:
    """A ``MetricsSink`` that writes one rank's page. ``open_shm_metrics_sink`` creates it; one thread calls ``record``.

    Attributes:
        failures: counts reports that could not be written, and logs each episode once.
    """

    __slots__ = ("_labels", "_page", "failures")

    def __init__(self, page: ShmPageWriter[SchedulerStats], labels: tuple[tuple[str, str], ...]) -> None:
        self._page = page
        self._labels = labels
        self.failures = FailureLog(logger)

    @property
    def sequence(self) -> int:
        """Number of the last report written. Numbering continues when the rank restarts."""
        return self._page.sequence

    def record(self, stats: SchedulerStats) -> None:
        """Write one report, which readers can see immediately. Never raises.

        The sink counts a report and leaves it out if it has labels of another rank, contains a value that is not a
        number of at most 64 bits, or does not fit in a page. After ``close`` and in a forked child, it counts each one.
        """
        with self.failures.guard("writing metrics to shared memory"):
            if stats.labels is not self._labels and stats.labels != self._labels:
                raise ValueError(f"a report has the labels {stats.labels}; this page belongs to {self._labels}")
            self._page.write(stats)

    def close(self) -> None:
        """Release the page and its lock; the last report stays readable. Safe to call twice."""
        self._page.close()

    def __repr__(self) -> str:
        return f"<ShmMetricsSink: {self.sequence} reports, {self.failures.total} failed>"


def open_shm_metrics_sink(directory: Path, parallel: ParallelState) -> ShmMetricsSink | NullMetricsSink:
    """Open this rank's page and continue after its last report. A rank that reports no metrics opens none.

    Args:
        directory: the board, which must exist.
        parallel: decides whether this rank reports, and provides the stream index and the labels.

    Raises:
        StartError: another writer holds the page, or the directory is not writable or full.
    """
    if not parallel.reports_metrics:
        return NullMetricsSink()
    return ShmMetricsSink(
        open_shm_page_writer(directory, parallel.kv_stream_index, METRICS_CODEC), parallel.metric_labels
    )


def open_shm_metrics_board(directory: Path, num_ranks: int) -> ShmBoard[SchedulerStats]:
    """Return a reader of the metrics of rank 0 to ``num_ranks - 1``. It opens and closes their pages in each read.

    Args:
        directory: the board, which may be created later.
        num_ranks: streams of the engine (``ParallelState.kv_stream_count``).
    """
    return ShmBoard(directory=directory, num_ranks=num_ranks, codec=METRICS_CODEC)
