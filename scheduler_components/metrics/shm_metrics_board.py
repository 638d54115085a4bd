"""Metrics in shared memory: a scheduler writes its newest report, the serving process of its machine reads it.

All that the metric catalogue reads crosses: labels, load with its optional parts, totals, histograms with their
bounds, counters of tiers, of input and of the publisher. ``load.dispatched_watermarks`` does not: tickets mean
something to their dispatchers alone, who read them from a load gauge or a load board. Nor does ``KvMetrics``, which is
made of the load and has a sink of its own.

A report is one msgpack array of rows, one row per value struct, without names. Rows of numbers are quicker to make
than a ``struct`` of the same numbers, and a part that an engine does not have takes one byte. Numbers are written as
they are, in up to 64 bits.
"""

from __future__ import annotations

import logging
import operator
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import SupportsFloat, TypeAlias

import attrs
import msgspec
from msgspec.structs import astuple

from scheduler_components.errors import DecodeError
from scheduler_components.failure_log import FailureLog
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullMetricsSink
from scheduler_components.shm_board import ReportCodec, ShmBoard, ShmPageWriter, open_shm_page_writer
from scheduler_components.values import (
    BatchingStats,
    DecodeMoments,
    DisaggregationLoad,
    HistogramSnapshot,
    IntegrityStats,
    LatencySnapshot,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    PoolStats,
    PublisherStats,
    QueueLoad,
    QuiesceStats,
    ReceiverStats,
    SchedulerStats,
    SchedulerTotals,
    SpeculativeLoad,
    TierStats,
)

__all__ = [
    "LAYOUT_ID",
    "METRICS_CODEC",
    "ReportEncoder",
    "ShmMetricsSink",
    "decode_report",
    "open_shm_metrics_board",
    "open_shm_metrics_sink",
]

_STRUCTS = (
    LoadSnapshot, QueueLoad, DisaggregationLoad, LoraLoad, SpeculativeLoad, MemoryLoad, SchedulerTotals, TierStats,
    LatencySnapshot, HistogramSnapshot, PublisherStats, DecodeMoments, ReceiverStats, QuiesceStats, IntegrityStats,
    PoolStats,
    BatchingStats,
)  # fmt: skip
_NUM_LOAD_FIELDS = LoadSnapshot.__struct_fields__.index("dispatched_watermarks")
_NUM_COUNTERS = SchedulerTotals.__struct_fields__.index("latencies")
_NUM_HISTOGRAMS = len(LatencySnapshot.__struct_fields__)


def _layout_id() -> bytes:
    """Eight bytes that change with any field, its place or its type: rows have no names to tell."""
    fields = [
        (kind.__name__, field.name, str(field.type)) for kind in _STRUCTS for field in msgspec.structs.fields(kind)
    ]
    return blake2b(repr(fields).encode(), digest_size=8).digest()


LAYOUT_ID = _layout_id()
"""Names the rows of this version of the kit; a writer and a reader with different ones must not talk."""


class _LoadRow(LoadSnapshot, frozen=True, gc=False, array_like=True):
    pass


class _TierRow(TierStats, gc=False, array_like=True):
    pass


class _IntakeRow(ReceiverStats, gc=False, array_like=True):
    pass


class _QuiesceRow(QuiesceStats, frozen=True, gc=False, array_like=True):
    pass


class _IntegrityRow(IntegrityStats, frozen=True, gc=False, array_like=True):
    pass


class _PoolRow(PoolStats, frozen=True, gc=False, array_like=True):
    pass


class _BatchingRow(BatchingStats, frozen=True, gc=False, array_like=True):
    pass


class _HistogramRow(HistogramSnapshot, frozen=True, gc=False, array_like=True):
    pass


class _PublisherRow(PublisherStats, frozen=True, gc=False, array_like=True):
    pass


_CounterRow: TypeAlias = tuple[int, int, int, int, int, int, int, float]
_HistogramRows: TypeAlias = tuple[
    _HistogramRow, _HistogramRow, _HistogramRow, _HistogramRow, _HistogramRow, _HistogramRow
]


class _TotalsRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    counters: _CounterRow
    tiers: _TierRow | None
    intake: _IntakeRow | None
    quiesce: _QuiesceRow | None
    integrity: _IntegrityRow | None
    pools: _PoolRow | None
    batching: _BatchingRow | None
    histograms: _HistogramRows | None


class _Report(msgspec.Struct, frozen=True, gc=False, array_like=True):
    labels: tuple[tuple[str, str], ...]
    load: _LoadRow
    totals: _TotalsRow  # in one array: a step that brings no new ones writes it as one piece
    publisher: _PublisherRow


def _as_number(value: object) -> int | float:
    """Engines report numpy's scalars and tensors of one element too."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        if isinstance(value, SupportsFloat):
            return float(value)
        raise


_encode = msgspec.msgpack.Encoder(enc_hook=_as_number).encode
_decode = msgspec.msgpack.Decoder(_Report).decode


class _Known:
    """A value that was encoded, and its rows: in most steps it is the same object as in the last one."""

    __slots__ = ("rows", "value")

    def __init__(self) -> None:
        self.value: object = None
        self.rows: tuple[msgspec.Raw, ...] = ()


class ReportEncoder:
    """Encodes the reports of one rank, one after the other. Totals and counters are not changed after they were given.

    Args:
        labels: the rank's, which are those of each of its reports.
    """

    __slots__ = ("_encoded_labels", "_histograms", "_publisher", "_rows", "_totals", "labels")

    def __init__(self, labels: tuple[tuple[str, str], ...]) -> None:
        self.labels = labels
        self._encoded_labels = msgspec.Raw(_encode(labels))
        self._histograms: list[object] = [None] * _NUM_HISTOGRAMS
        self._rows = [msgspec.Raw()] * _NUM_HISTOGRAMS
        self._totals = _Known()
        self._publisher = _Known()

    def encode(self, stats: SchedulerStats) -> bytes:
        """Return the report as bytes.

        Raises:
            ValueError: it has other labels than this encoder's.
            TypeError, OverflowError: a value is no number, or needs more than 64 bits.
        """
        if stats.labels is not self.labels and stats.labels != self.labels:
            raise ValueError(f"a report with labels {stats.labels}, this page is that of {self.labels}")
        totals, publisher = self._totals, self._publisher
        if stats.totals is not totals.value:
            totals.rows = self._rows_of_totals(stats.totals)
            totals.value = stats.totals
        if stats.publisher is not publisher.value:
            publisher.rows = (msgspec.Raw(_encode(astuple(stats.publisher))),)
            publisher.value = stats.publisher
        return _encode((self._encoded_labels, astuple(stats.load)[:_NUM_LOAD_FIELDS], *totals.rows, *publisher.rows))

    def _rows_of_totals(self, totals: SchedulerTotals) -> tuple[msgspec.Raw, ...]:
        parts = (totals.tiers, totals.intake, totals.quiesce, totals.integrity, totals.pools, totals.batching)
        latencies = totals.latencies
        row = (
            astuple(totals)[:_NUM_COUNTERS],
            *[None if part is None else astuple(part) for part in parts],
            None if latencies is None else self._histogram_rows(latencies),
        )
        return (msgspec.Raw(_encode(row)),)

    def _histogram_rows(self, latencies: LatencySnapshot) -> list[msgspec.Raw]:
        """Encode those histograms that are not the same objects as last time: in most steps one or two of them."""
        known = self._histograms
        for at, histogram in enumerate(astuple(latencies)):
            if histogram is not known[at]:
                self._rows[at] = msgspec.Raw(_encode(astuple(histogram)))
                known[at] = histogram
        return self._rows


def decode_report(body: bytes) -> SchedulerStats:
    """Read one report; equal to what was encoded, but for the watermarks.

    Raises:
        DecodeError: it is none, or its parts do not fit together.
    """
    try:
        report = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a metrics report: {error}") from error
    for name, _ in report.labels:
        if not (name.isascii() and name.isidentifier()):
            raise DecodeError(f"not a metrics report: {name!r} is no label's name")
    totals = report.totals
    return SchedulerStats(
        labels=report.labels,
        load=LoadSnapshot(*astuple(report.load)),
        totals=SchedulerTotals(
            *totals.counters,
            None if totals.histograms is None else _latencies_of(totals.histograms),
            None if totals.tiers is None else TierStats(*astuple(totals.tiers)),
            None if totals.intake is None else ReceiverStats(*astuple(totals.intake)),
            None if totals.quiesce is None else QuiesceStats(*astuple(totals.quiesce)),
            None if totals.integrity is None else IntegrityStats(*astuple(totals.integrity)),
            None if totals.pools is None else PoolStats(*astuple(totals.pools)),
            None if totals.batching is None else BatchingStats(*astuple(totals.batching)),
        ),
        publisher=PublisherStats(*astuple(report.publisher)),
    )


def _latencies_of(rows: _HistogramRows) -> LatencySnapshot:
    for row in rows:
        if len(row.counts) != len(row.bounds) + 1:
            raise DecodeError(f"not a metrics report: {len(row.counts)} counts for {len(row.bounds)} bounds")
    return LatencySnapshot(*(HistogramSnapshot(row.bounds, row.counts, row.total) for row in rows))


METRICS_CODEC: ReportCodec[SchedulerStats] = ReportCodec(
    subject="metrics",
    layout_id=LAYOUT_ID,
    buffer_bytes=16 * 1024,  # a report with every part and all six histograms has some 3 KB; engines have own bounds
    encode=ReportEncoder(()).encode,
    decode=decode_report,
    timestamp_of=attrgetter("load.timestamp"),
)
"""For readers; each writer has an encoder for its own labels."""

logger = logging.getLogger(__name__)

_WRITING = "writing metrics to shared memory"


class ShmMetricsSink:
    """A ``MetricsSink`` that writes one rank's page. Made by ``open_shm_metrics_sink``; one thread calls ``record``.

    Attributes:
        failures: reports that could not be written, counted and logged once per episode; the last one stands.
    """

    __slots__ = ("_page", "failures")

    def __init__(self, page: ShmPageWriter[SchedulerStats]) -> None:
        self._page = page
        self.failures = FailureLog(logger)

    @property
    def sequence(self) -> int:
        """Number of the last report written; goes on over restarts of the rank."""
        return self._page.sequence

    def record(self, stats: SchedulerStats) -> None:
        """Write one report; readers see it, whole, at once. Never raises.

        A report is left out, and counted, when it has another rank's labels, a value that is no number or needs
        more than 64 bits, or is larger than a page; so is every one after ``close``, and in a forked child.
        """
        try:
            self._page.write(stats)
        except Exception as error:  # noqa: BLE001 - a gauge never raises into the step; counted and logged
            self.failures.failed(_WRITING, error)
        else:
            if self.failures.counts:  # even a call that finds nothing to do is a tenth of a step's cost
                self.failures.succeeded(_WRITING)

    def close(self) -> None:
        """Let go of the page and of the right to write it; the last report stays. Safe to call twice."""
        self._page.close()

    def __repr__(self) -> str:
        return f"<ShmMetricsSink: {self.sequence} reports, {self.failures.total} failed>"


def open_shm_metrics_sink(directory: Path, parallel: ParallelState) -> ShmMetricsSink | NullMetricsSink:
    """Take this rank's page, and go on after its last report; a rank that reports no metrics takes none.

    Args:
        directory: the board; must be there.
        parallel: says whether this rank reports, as which stream, and under which labels.

    Raises:
        StartError: another writer has the page, or the directory cannot be written to, or has no room.
    """
    if not parallel.reports_metrics:
        return NullMetricsSink()
    codec = attrs.evolve(METRICS_CODEC, encode=ReportEncoder(parallel.metric_labels).encode)
    return ShmMetricsSink(open_shm_page_writer(directory, parallel.kv_stream_index, codec))


def open_shm_metrics_board(directory: Path, num_ranks: int) -> ShmBoard[SchedulerStats]:
    """Make a reader of the metrics of rank 0 to ``num_ranks - 1``; it opens their pages when it reads.

    Scrapes are rare, so the pages are closed again after each read: there is nothing to close in the end.

    Args:
        directory: the board; it may come later.
        num_ranks: streams of the engine (``ParallelState.kv_stream_count``).
    """
    return ShmBoard(directory=directory, num_ranks=num_ranks, codec=METRICS_CODEC, keeps_files_open=False)
