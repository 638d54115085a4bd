"""Between real processes: every read is whole, no report goes back, and nothing on a page stops writer or reader."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scheduler_components import (
    LoadSnapshot,
    NullMetricsSink,
    ParallelState,
    PublisherStats,
    SchedulerStats,
    SchedulerTotals,
    StartError,
)
from scheduler_components.metrics import ShmMetricsBoard, ShmMetricsSink, open_shm_metrics_sink

Eventually = Callable[[Callable[[], object]], None]

WRITER = """
import sys
from pathlib import Path
from scheduler_components.values import LoadSnapshot
from scheduler_components.metrics.timing import RequestLatencies
from scheduler_components.metrics.shm_metrics_board import open_shm_metrics_sink
from scheduler_components.values import PublisherStats, SchedulerStats, SchedulerTotals
from scheduler_components.parallel_state import ParallelState

parallel = ParallelState(dp_rank=int(sys.argv[2]), dp_size=2)
sink, latencies = open_shm_metrics_sink(Path(sys.argv[1]), parallel), RequestLatencies()
number = begun = sink.sequence
while True:
    number += 1
    # Every field follows from one number, and the length changes with it: a torn report would not add up.
    latencies.histograms.queue.observe(1.0)
    sink.record(SchedulerStats(
        parallel.metric_labels,
        LoadSnapshot(number, 5.0, parallel.dp_rank, number * 3, number * 5, total_prefill_busy_us=number - begun),
        SchedulerTotals(number * 7, latencies=latencies.totals() if number % 3 else None),
        PublisherStats(batches_sent=number * 11, open_bind_without_auth=number * 13),
    ))
"""


def assert_whole(stats: SchedulerStats, rank: int) -> None:
    number, load = stats.load.sequence, stats.load
    assert dict(stats.labels)["dp_rank"] == str(rank)
    assert (load.dp_rank, load.num_running_reqs, load.num_waiting_reqs) == (rank, number * 3, number * 5)
    assert stats.totals.num_requests_total == number * 7
    assert (stats.publisher.batches_sent, stats.publisher.open_bind_without_auth) == (number * 11, number * 13)
    latencies = stats.totals.latencies
    assert (latencies is not None) == bool(number % 3)
    assert latencies is None or latencies.queue.count == load.total_prefill_busy_us


def start_writer(directory: Path, rank: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(directory), str(rank)])


def rank_of(rank: int, size: int = 8) -> ParallelState:
    return ParallelState(dp_rank=rank, dp_size=size)


def open_sink(directory: Path, rank: int = 0) -> ShmMetricsSink:
    sink = open_shm_metrics_sink(directory, rank_of(rank))
    assert isinstance(sink, ShmMetricsSink)
    return sink


def report(number: int, rank: int = 0) -> SchedulerStats:
    return SchedulerStats(rank_of(rank).metric_labels, LoadSnapshot(sequence=number, num_running_reqs=number))


def test_reads_between_processes_are_whole_and_never_go_back(tmp_path: Path, eventually: Eventually) -> None:
    writers = [start_writer(tmp_path, rank) for rank in range(2)]
    board = ShmMetricsBoard(directory=tmp_path, num_ranks=2)
    try:
        eventually(lambda: len(board.read()) == 2)
        last = {0: 0, 1: 0}
        changes = 0
        reads = 0
        while reads < 5_000 or changes < 100:  # a loaded machine gives the writers little time between two reads
            reads += 1
            for rank, stats in board.read().items():
                assert_whole(stats, rank)
                assert stats.load.sequence >= last[rank]
                changes += stats.load.sequence > last[rank]
                last[rank] = stats.load.sequence
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert board.failures.total == 0


def test_a_killed_writer_leaves_a_whole_report_and_its_successor_goes_on(
    tmp_path: Path, eventually: Eventually
) -> None:
    sequence = 0
    for _ in range(5):
        writer = start_writer(tmp_path, 0)
        board = ShmMetricsBoard(directory=tmp_path, num_ranks=1)
        try:
            beyond = sequence + 100
            eventually(
                lambda board=board, beyond=beyond: board.read() and board.read()[0].load.sequence > beyond,
            )
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        stats = ShmMetricsBoard(directory=tmp_path, num_ranks=1).read()[0]
        assert_whole(stats, 0)
        assert stats.load.sequence > sequence
        sequence = stats.load.sequence


def test_a_rank_is_found_when_it_comes_and_stays_when_it_goes(tmp_path: Path) -> None:
    directory = tmp_path / "board"
    board = ShmMetricsBoard(directory=directory, num_ranks=3)
    assert board.read() == {}
    directory.mkdir()
    sink = open_sink(directory, 1)
    assert (board.read(), board.unread) == ({}, 1)
    sink.record(report(4, 1))
    assert board.read() == {1: report(4, 1)}
    sink.close()
    assert board.read() == {1: report(4, 1)}
    (directory / "rank1.metrics").unlink()
    assert board.read() == {1: report(4, 1)}
    assert (board.unread, board.failures.total) == (1, 0)


def test_a_board_that_is_made_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    board = ShmMetricsBoard(directory=tmp_path, num_ranks=1)
    for last in (5, 2):
        sink = open_sink(tmp_path)
        for number in range(last):
            sink.record(report(number + 1))
        sink.close()
        assert board.read() == {0: report(last)}
        (tmp_path / "rank0.metrics").unlink()


def test_one_writer_a_rank_and_the_next_after_it_has_closed(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    with pytest.raises(StartError, match="another process writes"):
        open_shm_metrics_sink(tmp_path, rank_of(0))
    sink.record(report(1))
    sink.close()
    sink.close()
    following = open_sink(tmp_path)
    assert following.sequence == 1
    following.close()


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
    sink, board = open_sink(tmp_path), ShmMetricsBoard(directory=tmp_path, num_ranks=1)
    sink.record(report(1))
    too_large = SchedulerTotals(num_requests_total=1 << 70)
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


def test_a_file_without_a_byte_is_a_rank_that_has_not_come(tmp_path: Path) -> None:
    (tmp_path / "rank0.metrics").touch()
    board = ShmMetricsBoard(directory=tmp_path, num_ranks=1)
    assert (board.read(), board.unread) == ({}, 0)


def test_scrapes_at_the_same_time_do_not_mix_up_ranks(tmp_path: Path) -> None:
    """Two Prometheus servers may ask at once, and the library answers each on a thread of its own."""
    sinks = [open_sink(tmp_path, rank) for rank in range(8)]
    board = ShmMetricsBoard(directory=tmp_path, num_ranks=8)
    for rank, sink in enumerate(sinks):
        sink.record(report(1, rank))
    expected = {rank: report(1, rank) for rank in range(8)}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: board.read() == expected, range(2_000)))
    assert all(found)
    assert (board.unread, board.failures.total) == (0, 0)
    for sink in sinks:
        sink.close()


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from scheduler_components.values import LoadSnapshot
from scheduler_components.metrics.shm_metrics_board import open_shm_metrics_sink
from scheduler_components.values import SchedulerStats
from scheduler_components.parallel_state import ParallelState

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


def test_the_newer_half_being_written_does_not_show_the_report_before_the_last(tmp_path: Path) -> None:
    """A counter that goes back by one step is, to Prometheus, a restarted rank."""
    sink, board = open_sink(tmp_path), ShmMetricsBoard(directory=tmp_path, num_ranks=1)
    for number in range(1, 7):
        sink.record(report(number))
    assert board.read() == {0: report(6)}
    page = bytearray((tmp_path / "rank0.metrics").read_bytes())
    page[16 + 30] ^= 0xFF
    (tmp_path / "rank0.metrics").write_bytes(page)
    assert board.read() == {0: report(6)}
    assert board.unread == 1
    sink.close()


def test_what_the_publisher_counts_crosses(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    stats = SchedulerStats(report(1).labels, LoadSnapshot(), publisher=PublisherStats(peers_refused=3))
    sink.record(stats)
    assert ShmMetricsBoard(directory=tmp_path, num_ranks=1).read() == {0: stats}
    sink.close()
