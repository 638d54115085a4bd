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
import os
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_components.errors import DecodeError
from scheduler_components.failure_log import FailureLog
from scheduler_components.load.shm_page_file import ShmPageFile, open_shm_page_file
from scheduler_components.metrics.metrics_page import PAGE_BYTES, MetricsPage
from scheduler_components.metrics.report_codec import ReportEncoder
from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.parallel_state import ParallelState

__all__ = ["NullMetricsSink", "ShmMetricsBoard", "ShmMetricsSink", "open_shm_metrics_sink"]

logger = logging.getLogger(__name__)

_WRITING = "writing metrics to shared memory"
_LOOKS = 16
"""At two copies of some microseconds each, a writer that overtakes a reader so often writes nothing else."""


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
    under the reader is an error and not a fatal signal, as it would be in mapped memory.

    Attributes:
        directory: the board.
        num_ranks: pages to look for, rank 0 to ``num_ranks - 1``.
        unread: reads that found a page and no report in it: none is written yet, the writer was quicker each time,
            or the page was refused. The rank's last good report, if there was one, was given instead.
        failures: pages refused (of another layout, cut short, not a file, not a report), logged once an episode.
    """

    directory: Path
    num_ranks: int
    unread: int = field(default=0, init=False)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger), init=False)
    _newest: dict[int, SchedulerStats] = field(default_factory=dict, init=False, repr=False)

    def read(self) -> dict[int, SchedulerStats]:
        """Return rank -> newest report, of the ranks that have written one. Never raises."""
        for rank in range(self.num_ranks):
            activity = f"reading the metrics of rank {rank}"
            try:
                self._look(rank)
            except (OSError, DecodeError) as error:
                self.unread += 1
                self.failures.failed(activity, error)
            else:
                self.failures.succeeded(activity)
        return dict(self._newest)

    def _look(self, rank: int) -> None:
        path = _page_path(self.directory, rank)
        for _ in range(_LOOKS):
            content = _read_page(path)
            if not content:
                return
            stats = MetricsPage(memoryview(content)).read()
            if stats is not None:
                self._newest[rank] = stats
                return
        self.unread += 1


def _read_page(path: Path) -> bytes:
    """Return a copy of a page; nothing while its writer has not come, or is about to fill the file.

    Raises:
        OSError: there is something that is not a readable file.
        DecodeError: it is shorter than a page.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that somebody put there would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        content = os.read(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)
    if 0 < len(content) < PAGE_BYTES:
        raise DecodeError(f"{path} has {len(content)} bytes, a page of metrics has {PAGE_BYTES}")
    return content


def _page_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.metrics"
