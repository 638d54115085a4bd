"""Pages of a metrics board that somebody damaged, or another version wrote: each costs itself, and never its reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_components import LoadSnapshot, ParallelState, SchedulerStats
from scheduler_components.metrics import ShmMetricsBoard, ShmMetricsSink, open_shm_metrics_sink
from scheduler_components.metrics.shm_metrics_board import PAGE_BYTES


def rank_of(rank: int) -> ParallelState:
    return ParallelState(dp_rank=rank, dp_size=2)


def open_sink(directory: Path, rank: int = 0) -> ShmMetricsSink:
    sink = open_shm_metrics_sink(directory, rank_of(rank))
    assert isinstance(sink, ShmMetricsSink)
    return sink


def report(number: int, rank: int = 0) -> SchedulerStats:
    return SchedulerStats(rank_of(rank).metric_labels, LoadSnapshot(sequence=number, num_running_reqs=number))


def cut_short(page: Path) -> None:
    os.truncate(page, 100)


def overwrite(page: Path) -> None:
    page.write_bytes(os.urandom(PAGE_BYTES))


def link_elsewhere(page: Path) -> None:
    page.unlink()
    page.symlink_to("/etc/passwd")


def put_a_pipe(page: Path) -> None:
    page.unlink()
    os.mkfifo(page)


def put_a_directory(page: Path) -> None:
    page.unlink()
    page.mkdir()


@pytest.mark.parametrize("damage", [cut_short, overwrite, link_elsewhere, put_a_pipe, put_a_directory])
def test_a_page_that_is_none_is_refused_and_the_last_good_report_stays(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    sinks = [open_sink(tmp_path, rank) for rank in range(2)]
    board = ShmMetricsBoard(directory=tmp_path, num_ranks=2)
    for rank, sink in enumerate(sinks):
        sink.record(report(1, rank))
    assert len(board.read()) == 2
    sinks[0].close()
    damage(tmp_path / "rank0.metrics")
    for number in (2, 3):
        sinks[1].record(report(number, 1))
        assert board.read() == {0: report(1), 1: report(number, 1)}
    assert (board.unread, board.failures.total, len(caplog.records)) == (2, 2, 1)
    sinks[1].close()


def test_a_page_of_another_version_is_taken_over_by_its_next_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = open_sink(tmp_path)
    sink.record(report(1))
    sink.close()
    page = tmp_path / "rank0.metrics"
    page.write_bytes(page.read_bytes()[:8] + bytes(8) + page.read_bytes()[16:])
    board = ShmMetricsBoard(directory=tmp_path, num_ranks=1)
    assert board.read() == {}
    assert "run both from one version of the kit" in caplog.text
    sink = open_sink(tmp_path)
    assert sink.sequence == 0
    sink.record(report(2))
    assert board.read() == {0: report(2)}
    sink.close()
