"""The boards of the kit. What is true of one is true of all: a test that asks for ``codec`` runs for each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

from scheduler_components import LoadSnapshot, ParallelState, SchedulerStats, SchedulerTotals
from scheduler_components.load import open_shm_load_sink
from scheduler_components.load.shm_load_board import LOAD_CODEC
from scheduler_components.metrics import RequestLatencyRecorder, open_shm_metrics_sink
from scheduler_components.metrics.shm_metrics_board import METRICS_CODEC, ReportEncoder
from scheduler_components.shm_board import ReportCodec

LABELS = ParallelState().metric_labels
NUM_WRITERS = 2


def load_report(number: int) -> LoadSnapshot:
    """Every field follows from one number, and the length changes with it: a torn report would not add up."""
    watermarks = (("x" * (number % 64 + 1), number),) * (number % 7)
    return LoadSnapshot(number, float(number), 0, number, number * 1_000_003, dispatched_watermarks=watermarks)


def metrics_report(number: int) -> SchedulerStats:
    latencies = RequestLatencyRecorder()
    latencies.histograms.queue.observe(1.0, number)
    totals = SchedulerTotals(number * 7, latencies=latencies.snapshot() if number % 3 else None)
    return SchedulerStats(LABELS, LoadSnapshot(number, float(number), 0, number * 1_000_003), totals)


def write_without_end(kind: str, directory: str, rank: str) -> None:
    """Run by a process of its own: report as a rank does, as quickly as it can."""
    parallel = ParallelState(dp_rank=int(rank), dp_size=NUM_WRITERS)
    if kind == "load":
        load_sink: Any = open_shm_load_sink(Path(directory), parallel)
        while True:
            load_sink.send(load_report(load_sink.sequence + 1))
    sink: Any = open_shm_metrics_sink(Path(directory), parallel)
    while True:
        sink.record(msgspec.structs.replace(metrics_report(sink.sequence + 1), labels=parallel.metric_labels))


@pytest.fixture(params=["load", "metrics"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def codec(kind: str) -> ReportCodec[Any]:
    """Of one kind of board, for its readers and one writer."""
    return LOAD_CODEC if kind == "load" else attrs.evolve(METRICS_CODEC, encode=ReportEncoder(LABELS).encode)


@pytest.fixture
def report(kind: str) -> Callable[[int], Any]:
    """Make the report of a number, which is also the report's time."""
    return load_report if kind == "load" else metrics_report


@pytest.fixture
def start_writer(kind: str, tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Start a process that writes the page of a rank in ``tmp_path`` until it is killed."""
    started: list[subprocess.Popen[bytes]] = []
    script = "import runpy, sys; runpy.run_path(sys.argv[1])['write_without_end'](*sys.argv[2:])"

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, __file__, kind, str(tmp_path), str(rank)]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for writer in started:
        writer.kill()
        writer.wait()
