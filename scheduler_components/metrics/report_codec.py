"""A step's ``SchedulerStats`` as bytes and back: msgpack rows, one a value struct, without names. Pure.

Rows of numbers are quicker to make than a ``struct`` of the same numbers, and a part that an engine has not takes one
byte. Numbers are written as they are, in up to 64 bits.
"""

from __future__ import annotations

import operator
from hashlib import blake2b
from typing import SupportsFloat, TypeAlias

import msgspec
from msgspec.structs import astuple

from scheduler_components.errors import DecodeError
from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.load.snapshot import (
    DisaggregationLoad,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)
from scheduler_components.metrics.histogram import HistogramSnapshot
from scheduler_components.metrics.request_latencies import LatencyTotals
from scheduler_components.metrics.stats import PublisherStats, SchedulerStats, SchedulerTotals

__all__ = ["LAYOUT_ID", "ReportEncoder", "decode_report"]

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
