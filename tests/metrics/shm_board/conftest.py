"""A board of metrics, and processes that write its pages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from scheduler_components import ParallelState
from scheduler_components.metrics import RequestLatencyRecorder, open_shm_metrics_sink
from scheduler_components.metrics.shm_board import ReportCodec
from scheduler_components.metrics.shm_metrics_board import METRICS_CODEC
from scheduler_components.values import LoadSnapshot, SchedulerCounters, SchedulerStats

LABELS = ParallelState().metric_labels
NUM_WRITERS = 2


def make_report(number: int) -> SchedulerStats:
    """Every field follows from one number, and the length changes with it, so a torn report would not be equal."""
    watermarks = (("x" * (number % 64 + 1), number),) * (number % 7)
    load = LoadSnapshot(
        number, number * 1_000_003, sequence=number, timestamp=float(number), dispatched_watermarks=watermarks
    )
    latencies = RequestLatencyRecorder()
    latencies.histograms.queue.observe(1.0, number)
    return SchedulerStats(
        LABELS, load, SchedulerCounters(number * 7), latencies=latencies.stats() if number % 3 else None
    )


def write_without_end(directory: str, rank: str) -> None:
    """Report as a rank does, as quickly as possible. Runs in its own process."""
    parallel = ParallelState(dp_rank=int(rank), dp_size=NUM_WRITERS)
    sink = open_shm_metrics_sink(Path(directory), parallel)
    while True:
        sink.record(msgspec.structs.replace(make_report(sink.sequence + 1), labels=parallel.metric_labels))


@pytest.fixture
def codec() -> ReportCodec[SchedulerStats]:
    return METRICS_CODEC


@pytest.fixture
def report() -> Callable[[int], SchedulerStats]:
    """Make the report of a number, which is also the report's time."""
    return make_report


@pytest.fixture
def start_writer(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Start a process that writes the page of a rank in ``tmp_path`` until it is killed."""
    started: list[subprocess.Popen[bytes]] = []
    script = "import runpy, sys; runpy.run_path(sys.argv[1])['write_without_end'](*sys.argv[2:])"

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, __file__, str(tmp_path), str(rank)]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for writer in started:
        writer.kill()
        writer.wait()
