"""Between processes, every read is complete and no rank goes back to an earlier report."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_components import StartError
from scheduler_components.metrics.shm_board import ReportCodec, ShmBoard, open_shm_page_writer
from scheduler_components.values import SchedulerStats

pytestmark = pytest.mark.processes

Codec = ReportCodec[Any]
MakeReport = Callable[[int], Any]
StartWriter = Callable[[int], subprocess.Popen[bytes]]
Eventually = Callable[[Callable[[], object]], None]


def number_of(report: SchedulerStats) -> int:
    return int(report.load.timestamp)


def assert_whole(make_report: MakeReport, found: SchedulerStats, rank: int) -> None:
    expected = make_report(number_of(found))
    assert dict(found.labels)["dp_rank"] == str(rank)
    assert found == msgspec.structs.replace(expected, labels=found.labels)


def test_reads_between_processes_are_whole_and_never_go_back(
    tmp_path: Path, codec: Codec, report: MakeReport, start_writer: StartWriter, eventually: Eventually
) -> None:
    for rank in range(2):
        start_writer(rank)
    board = ShmBoard(directory=tmp_path, num_ranks=2, codec=codec)
    eventually(lambda: len(board.read()) == 2)
    last = {0: 0, 1: 0}
    changes = reads = 0
    while reads < 2_000 or changes < 100:  # a loaded machine gives the writers little time between two reads
        reads += 1
        for rank, found in board.read().items():
            number = number_of(found)
            assert number >= last[rank]
            if number > last[rank]:
                assert_whole(report, found, rank)
                changes += 1
                last[rank] = number
    assert board.failures.total == 0


def test_a_killed_writer_leaves_a_complete_report_and_its_successor_continues(
    tmp_path: Path, codec: Codec, report: MakeReport, start_writer: StartWriter, eventually: Eventually
) -> None:
    board = ShmBoard(directory=tmp_path, num_ranks=1, codec=codec)
    number = 0
    for _ in range(2):
        writer = start_writer(0)
        beyond = number + 20
        eventually(lambda beyond=beyond: board.read() and number_of(board.read()[0]) > beyond)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = board.read()[0]
        assert_whole(report, found, 0)
        assert number_of(found) > number
        number = number_of(found)


def test_a_rank_is_found_when_it_writes_its_page_and_kept_when_the_page_is_gone(
    tmp_path: Path, codec: Codec, report: MakeReport
) -> None:
    directory = tmp_path / "board"
    board = ShmBoard(directory=directory, num_ranks=3, codec=codec)
    assert board.read() == {}
    directory.mkdir()
    page = open_shm_page_writer(directory, 1, codec)
    assert (board.read(), board.failed_reads) == ({}, 1)
    page.write(report(5))
    assert board.read() == {1: report(5)}
    page.close()
    assert board.read() == {1: report(5)}
    codec.path(directory, 1).unlink()
    assert board.read() == {1: report(5)}
    assert (board.failed_reads, board.failures.total) == (1, 0)


def test_one_writer_per_rank_and_the_next_after_it_has_closed(tmp_path: Path, codec: Codec, report: MakeReport) -> None:
    page = open_shm_page_writer(tmp_path, 0, codec)
    with pytest.raises(StartError, match="another process writes"):
        open_shm_page_writer(tmp_path, 0, codec)
    page.write(report(1))
    page.close()
    page.close()
    with pytest.raises(ValueError, match="released"):
        page.write(report(2))
    following = open_shm_page_writer(tmp_path, 0, codec)
    assert following.sequence == 1
    following.close()


def test_a_read_leaves_no_file_open(tmp_path: Path, codec: Codec, report: MakeReport) -> None:
    page = open_shm_page_writer(tmp_path, 0, codec)
    page.write(report(1))
    board = ShmBoard(directory=tmp_path, num_ranks=1, codec=codec)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert board.read() == {0: report(1)}
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    page.close()


def test_reads_at_the_same_time_do_not_mix_up_ranks(tmp_path: Path, codec: Codec, report: MakeReport) -> None:
    """Two Prometheus servers may scrape concurrently, and the library answers each on its own thread."""
    pages = [open_shm_page_writer(tmp_path, rank, codec) for rank in range(8)]
    board = ShmBoard(directory=tmp_path, num_ranks=8, codec=codec)
    for rank, page in enumerate(pages):
        page.write(report(rank + 1))
    expected = {rank: report(rank + 1) for rank in range(8)}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: board.read() == expected, range(300)))
    assert all(found)
    assert (board.failed_reads, board.failures.total) == (0, 0)
    for page in pages:
        page.close()
