"""Metrics in shared memory: a reader gets the written reports; a failed write is counted and never raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_components import ParallelState
from scheduler_components.load.work_counters import MAX_DISPATCHERS
from scheduler_components.metrics import RequestLatencyRecorder, open_shm_metrics_board, open_shm_metrics_sink
from scheduler_components.metrics.shm_metrics_board import ShmMetricsSink
from scheduler_components.ports import NullMetricsSink
from scheduler_components.values import (
    LatencySnapshot,
    LoadSnapshot,
    PoolStats,
    PublisherStats,
    SchedulerCounters,
    SchedulerStats,
    TierStats,
)

pytestmark = pytest.mark.processes


def rank_of(rank: int, size: int = 8) -> ParallelState:
    return ParallelState(dp_rank=rank, dp_size=size)


def open_sink(directory: Path, rank: int = 0) -> ShmMetricsSink:
    sink = open_shm_metrics_sink(directory, rank_of(rank))
    assert isinstance(sink, ShmMetricsSink)
    return sink


def report(number: int, rank: int = 0) -> SchedulerStats:
    return SchedulerStats(rank_of(rank).metric_labels, LoadSnapshot(sequence=number, num_running_reqs=number))


def test_a_rank_that_reports_nothing_takes_no_page(tmp_path: Path) -> None:
    sinks = [
        open_shm_metrics_sink(tmp_path, ParallelState.from_tp_rank(tp_rank, tp_size=4, attn_dp_size=2))
        for tp_rank in range(4)
    ]
    assert [isinstance(sink, NullMetricsSink) for sink in sinks] == [False, True, False, True]
    for sink in sinks:
        sink.record(report(1))
        sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.metrics", "rank1.metrics"]


def test_a_report_that_cannot_be_written_is_counted_and_leaves_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink, board = open_sink(tmp_path), open_shm_metrics_board(tmp_path, 1)
    sink.record(report(1))
    too_large = SchedulerCounters(num_requests_total=1 << 70)
    sink.record(SchedulerStats(report(1).labels, LoadSnapshot(), too_large))
    sink.record(report(2, rank=1))
    assert (sink.failures.total, sink.sequence, len(caplog.records)) == (2, 1, 1)
    assert board.read() == {0: report(1)}
    sink.record(report(3))
    assert board.read() == {0: report(3)}
    sink.close()
    sink.record(report(4))
    assert sink.failures.total == 3
    assert board.read() == {0: report(3)}


def test_the_largest_report_fits_in_a_page(tmp_path: Path) -> None:
    sink, board = open_sink(tmp_path), open_shm_metrics_board(tmp_path, 1)
    latencies = RequestLatencyRecorder()
    for name in LatencySnapshot.__struct_fields__:
        getattr(latencies.histograms, name).observe(1.0, 2**53)
    watermarks = tuple((f"{index:064}", 2**63 - 1) for index in range(MAX_DISPATCHERS))
    largest = SchedulerStats(
        report(1).labels,
        LoadSnapshot(dispatched_watermarks=watermarks),
        SchedulerCounters(*[2**53] * 7),
        PublisherStats(*[2**53] * 22),
        latencies.stats(),
        TierStats(*[2**53] * 15),
        pools=PoolStats(*[2**53] * 14),
    )
    sink.record(largest)
    assert board.read() == {0: largest}
    sink.record(SchedulerStats(report(1).labels, LoadSnapshot(dispatched_watermarks=(("x" * 40_000, 1),))))
    assert sink.failures.total == 1
    assert board.read() == {0: largest}
    sink.close()


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from scheduler_components.values import LoadSnapshot, SchedulerStats
from scheduler_components import ParallelState
from scheduler_components.metrics import open_shm_metrics_sink

parallel = ParallelState()
sink = open_shm_metrics_sink(Path(sys.argv[1]), parallel)
stats = SchedulerStats(parallel.metric_labels, LoadSnapshot())
child = os.fork()
if child == 0:
    sink.record(stats)
    os._exit(sink.failures.total)
failures = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
before = sink.sequence
sink.record(stats)
sys.exit(0 if (failures, before, sink.sequence, sink.failures.total) == (1, 0, 1, 0) else 1)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60, stderr=subprocess.DEVNULL)
