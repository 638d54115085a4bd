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
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scheduler_components.failure_log import FailureLog
from scheduler_components.load.shm_page_file import ShmPageFile, open_shm_page_file
from scheduler_components.load.shm_page_reader import ShmPageReader
from scheduler_components.metrics.metrics_page import PAGE_BYTES, MetricsPage, look_at_metrics_page
from scheduler_components.metrics.report_codec import ReportEncoder, decode_report
from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.parallel_state import ParallelState

__all__ = ["NullMetricsSink", "ShmMetricsBoard", "ShmMetricsSink", "open_shm_metrics_sink"]

logger = logging.getLogger(__name__)

_WRITING = "writing metrics to shared memory"


class NullMetricsSink:
    """The sink of a rank that reports no metrics."""

    def record(self, stats: SchedulerStats) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


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
