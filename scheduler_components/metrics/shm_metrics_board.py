"""Metrics in shared memory: a scheduler writes its newest report, the serving process of its machine reads it.

A board is a directory, best on a memory file system such as ``/dev/shm``, with one file a rank. Who makes the
directory removes it; a rank that ends leaves its last report, which its age shows to be old.

All that the metric catalogue reads crosses: labels, load with its optional parts, totals, histograms with their
bounds, counters of tiers and of the publisher. ``load.dispatched_watermarks`` does not: tickets mean something to
their dispatchers alone, who read them from a load gauge or a load board. Nor does ``KvMetrics``, which is made of the
load and has a sink of its own.
"""

from __future__ import annotations

import logging
import operator
import threading
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import SupportsFloat, TypeAlias

import msgspec
from msgspec.structs import astuple

from scheduler_components.errors import DecodeError, FailureLog
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullMetricsSink
from scheduler_components.shm_board import (
    DoubleBuffer,
    ReadAt,
    ShmPageFile,
    ShmPageReader,
    open_shm_page_file,
    read_newest,
)
from scheduler_components.values import (
    DisaggregationLoad,
    HistogramSnapshot,
    LatencyTotals,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    PublisherStats,
    QueueLoad,
    SchedulerStats,
    SchedulerTotals,
    SpeculativeLoad,
    TierStats,
)

__all__ = [
    "LAYOUT_ID",
    "ReportEncoder",
    "decode_report",
    "PAGE_BYTES",
    "MetricsPage",
    "look_at_metrics_page",
    "ShmMetricsBoard",
    "ShmMetricsSink",
    "open_shm_metrics_sink",
]

# A step's ``SchedulerStats`` as bytes and back: msgpack rows, one a value struct, without names. Pure.
#
# Rows of numbers are quicker to make than a ``struct`` of the same numbers, and a part that an engine has not takes
# one
# byte. Numbers are written as they are, in up to 64 bits.

_STRUCTS = (
    LoadSnapshot, QueueLoad, DisaggregationLoad, LoraLoad, SpeculativeLoad, MemoryLoad, SchedulerTotals, TierStats,
    LatencyTotals, HistogramSnapshot, PublisherStats,
)  # fmt: skip
_NUM_LOAD_FIELDS = LoadSnapshot.__struct_fields__.index("dispatched_watermarks")
_NUM_COUNTERS = SchedulerTotals.__struct_fields__.index("latencies")
_NUM_HISTOGRAMS = len(LatencyTotals.__struct_fields__)


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


class _HistogramRow(HistogramSnapshot, frozen=True, gc=False, array_like=True):
    pass


class _PublisherRow(PublisherStats, frozen=True, gc=False, array_like=True):
    pass


_CounterRow: TypeAlias = tuple[int, int, int, int, int, int, int]
_HistogramRows: TypeAlias = tuple[
    _HistogramRow, _HistogramRow, _HistogramRow, _HistogramRow, _HistogramRow, _HistogramRow
]


class _Report(msgspec.Struct, frozen=True, gc=False, array_like=True):
    labels: tuple[tuple[str, str], ...]
    load: _LoadRow
    counters: _CounterRow
    tiers: _TierRow | None
    histograms: _HistogramRows | None
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


class ReportEncoder:
    """Encodes the reports of one rank, one after the other.

    Args:
        labels: the rank's, which are those of each of its reports.
    """

    __slots__ = ("_encoded_labels", "_histograms", "_rows", "labels")

    def __init__(self, labels: tuple[tuple[str, str], ...]) -> None:
        self.labels = labels
        self._encoded_labels = msgspec.Raw(_encode(labels))
        self._histograms: list[object] = [None] * _NUM_HISTOGRAMS
        self._rows = [msgspec.Raw()] * _NUM_HISTOGRAMS

    def encode(self, stats: SchedulerStats) -> bytes:
        """Return the report as bytes.

        Raises:
            ValueError: it has other labels than this encoder's.
            TypeError, OverflowError: a value is no number, or needs more than 64 bits.
        """
        if stats.labels is not self.labels and stats.labels != self.labels:
            raise ValueError(f"a report with labels {stats.labels}, this page is that of {self.labels}")
        totals = stats.totals
        latencies, tiers = totals.latencies, totals.tiers
        return _encode(
            (
                self._encoded_labels,
                astuple(stats.load)[:_NUM_LOAD_FIELDS],
                astuple(totals)[:_NUM_COUNTERS],
                None if tiers is None else astuple(tiers),
                None if latencies is None else self._histogram_rows(latencies),
                astuple(stats.publisher),
            )
        )

    def _histogram_rows(self, latencies: LatencyTotals) -> list[msgspec.Raw]:
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
    return SchedulerStats(
        labels=report.labels,
        load=LoadSnapshot(*astuple(report.load)),
        totals=SchedulerTotals(
            *report.counters,
            None if report.histograms is None else _latencies_of(report.histograms),
            None if report.tiers is None else TierStats(*astuple(report.tiers)),
        ),
        publisher=PublisherStats(*astuple(report.publisher)),
    )


def _latencies_of(rows: _HistogramRows) -> LatencyTotals:
    for row in rows:
        if len(row.counts) != len(row.bounds) + 1:
            raise DecodeError(f"not a metrics report: {len(row.counts)} counts for {len(row.bounds)} bounds")
    return LatencyTotals(*(HistogramSnapshot(row.bounds, row.counts, row.total) for row in rows))


# One rank's page of a metrics board: a head that names the layout, and a ``DoubleBuffer`` of reports. Pure.
#
# Layout: magic 8, layout id 8, then the two buffers.

_MAGIC = b"SCMETRIC"
_HEAD = _MAGIC + LAYOUT_ID
_BUFFER_BYTES = 16 * 1024

PAGE_BYTES = len(_HEAD) + 2 * _BUFFER_BYTES
"""A report with every part and all six histograms has some 3 KB; the rest is room for bounds of one's own."""


class MetricsPage:
    """The writer's end of a page, of which there is one.

    Args:
        memory: ``PAGE_BYTES`` bytes. The caller keeps it mapped for as long as the page is used.

    Attributes:
        reports: where encoded reports are written, once the page is claimed.
    """

    __slots__ = ("_memory", "reports")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.reports = DoubleBuffer(memory, start=len(_HEAD), buffer_bytes=_BUFFER_BYTES)

    def claim(self) -> int:
        """Make the page one of this layout, for its new writer; returns the sequence of its last report, or 0.

        What another layout, or another program, left there is wiped: it must not be read as reports.
        """
        if self._memory[: len(_HEAD)] != _HEAD:
            self._memory[:PAGE_BYTES] = bytes(PAGE_BYTES)
            self._memory[: len(_HEAD)] = _HEAD
        return self.reports.last_sequence()


def look_at_metrics_page(read_at: ReadAt, known_sequence: int = 0) -> tuple[int, bytes] | None:
    """Return the newest whole report of a page and its sequence, as ``read_newest`` does, which says more.

    Raises:
        DecodeError: this is no page of reports, or one of another version's, or it is cut short.
    """
    head = read_at(len(_HEAD), 0)
    if not any(head):
        return None  # its writer is about to claim it
    if head != _HEAD:
        raise DecodeError(_what_is_wrong_with(head))
    return read_newest(read_at, len(_HEAD), _BUFFER_BYTES, known_sequence)


def _what_is_wrong_with(head: bytes) -> str:
    if len(head) < len(_HEAD) or not head.startswith(_MAGIC):
        return "not a page of metrics"
    layout = head[len(_MAGIC) :].hex()
    return (
        f"its metrics have layout {layout}, this reader knows {LAYOUT_ID.hex()}; run both from one version of the kit"
    )


logger = logging.getLogger(__name__)

_WRITING = "writing metrics to shared memory"


class ShmMetricsSink:
    """A ``MetricsSink`` that writes one rank's page. Made by ``open_shm_metrics_sink``.

    A step costs one encoding, one checksum and one copy into memory: no lock, no system call, no wait. One thread
    calls ``record``.

    Attributes:
        sequence: of the last report written.
        failures: reports that could not be written, counted and logged once an episode; the last one stands.
    """

    __slots__ = ("_encoder", "_file", "_reports", "failures", "sequence")

    def __init__(self, file: ShmPageFile, labels: tuple[tuple[str, str], ...]) -> None:
        self._file = file
        self._encoder = ReportEncoder(labels)
        page = MetricsPage(file.memory)
        self.sequence = page.claim()
        self._reports = page.reports
        self.failures = FailureLog(logger)

    def record(self, stats: SchedulerStats) -> None:
        """Write one report; readers see it, whole, at once. Never raises.

        A report is left out, and counted, when it has another rank's labels, a value that is no number or needs
        more than 64 bits, or is larger than a page; so is every one after ``close``, and in a forked child.
        """
        try:
            self._reports.write(self._encoder.encode(stats), self.sequence + 1)
        except Exception as error:  # noqa: BLE001 - a gauge never raises into the step; counted and logged
            self.failures.failed(_WRITING, error)
        else:
            self.sequence += 1
            if self.failures.counts:  # even a call that finds nothing to do is a tenth of a step's cost
                self.failures.succeeded(_WRITING)

    def close(self) -> None:
        """Let go of the page and of the right to write it; the last report stays. Safe to call twice."""
        self._file.close()

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
    path = _page_path(directory, parallel.kv_stream_index)
    return ShmMetricsSink(open_shm_page_file(path, PAGE_BYTES), parallel.metric_labels)


@dataclass(slots=True, kw_only=True)
class ShmMetricsBoard:
    """Reads the newest reports of all ranks of one engine; a rank that has not come yet is looked for again.

    Each read opens, copies and closes the pages: so a page may be removed and made anew, and one that is cut short
    under the reader is an error and not a fatal signal, as it would be in mapped memory. Threads may read at once;
    they take turns.

    Attributes:
        directory: the board.
        num_ranks: pages to look for, rank 0 to ``num_ranks - 1``.
    """

    directory: Path
    num_ranks: int
    _pages: ShmPageReader[SchedulerStats] = field(init=False, repr=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._pages = ShmPageReader(
            subject="metrics",
            path_of=partial(_page_path, self.directory),
            look_at=look_at_metrics_page,
            decode=_decode_entry,
            logger=logger,
        )

    @property
    def unread(self) -> int:
        """Reads that found a page and no report in it: none is written yet, the writer was quicker each time, or the
        page was refused. The rank's last good report, if there was one, was given instead.
        """
        return self._pages.unread

    @property
    def failures(self) -> FailureLog:
        """Pages refused (of another layout, cut short, not a file, not a report), logged once an episode."""
        return self._pages.failures

    def read(self) -> dict[int, SchedulerStats]:
        """Return rank -> newest report, of the ranks that have written one. Never raises."""
        with self._turn:
            self._pages.read(self.num_ranks)
            self._pages.close()  # scrapes are rare, and a board that nobody scrapes any more holds no files
            return self._pages.newest()


def _decode_entry(_sequence: int, body: bytes) -> SchedulerStats:
    return decode_report(body)


def _page_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.metrics"
