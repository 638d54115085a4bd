"""Damaged pages and pages of other versions: each is dropped alone, and the reader continues."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from scheduler_components.metrics.shm_board import DoubleBufferedPage, ReportCodec, ShmBoard, open_shm_page_writer

pytestmark = pytest.mark.processes

Codec = ReportCodec[Any]
MakeReport = Callable[[int], Any]
Damage = Callable[[Path, Codec], None]


def cut_short(page: Path, _: Codec) -> None:
    os.truncate(page, 100)


def cut_within_the_head(page: Path, _: Codec) -> None:
    os.truncate(page, 10)


def cut_in_the_middle(page: Path, codec: Codec) -> None:
    os.truncate(page, codec.page_bytes // 2)


def empty(page: Path, _: Codec) -> None:
    os.truncate(page, 0)


def overwrite(page: Path, codec: Codec) -> None:
    page.write_bytes(b"\xff" * codec.page_bytes)


def wipe_the_head(page: Path, _: Codec) -> None:
    page.write_bytes(bytes(16) + page.read_bytes()[16:])


def write_something_else(page: Path, codec: Codec) -> None:
    memory = bytearray(codec.page_bytes)
    foreign = DoubleBufferedPage(memoryview(memory), attrs.evolve(codec, encode=bytes))
    foreign.format()
    foreign.write(b"\xc1", 9)
    page.write_bytes(memory)


def put_another_version(page: Path, _: Codec) -> None:
    page.write_bytes(page.read_bytes()[:8] + bytes(8) + page.read_bytes()[16:])


def link_elsewhere(page: Path, _: Codec) -> None:
    page.unlink()
    page.symlink_to("/etc/passwd")


def put_a_pipe(page: Path, _: Codec) -> None:
    page.unlink()
    os.mkfifo(page)


def put_a_directory(page: Path, _: Codec) -> None:
    page.unlink()
    page.mkdir()


DAMAGES: list[Damage] = [
    cut_short, cut_within_the_head, cut_in_the_middle, overwrite, wipe_the_head, write_something_else,
    put_another_version,
]  # fmt: skip
REPLACEMENTS: list[Damage] = [link_elsewhere, put_a_pipe, put_a_directory]


def test_a_reader_survives_the_truncation_of_a_page(tmp_path: Path) -> None:
    """In mapped memory it would, with SIGBUS; so the reader is a process of its own."""
    script = """
import os, sys
from pathlib import Path
from scheduler_components.values import LoadSnapshot, SchedulerStats
from scheduler_components import ParallelState
from scheduler_components.metrics import open_shm_metrics_board, open_shm_metrics_sink

directory, parallel = Path(sys.argv[1]), ParallelState()
sink = open_shm_metrics_sink(directory, parallel)
sink.record(SchedulerStats(parallel.metric_labels, LoadSnapshot(num_running_reqs=4)))
board = open_shm_metrics_board(directory, 1)
before = board.read()
os.truncate(directory / "rank0.metrics", 100)
print(len(before), board.read() == before, board.failed_reads)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=False, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "1 True 1\n")


@pytest.mark.parametrize("damage", [*DAMAGES, *REPLACEMENTS])
def test_a_damaged_page_is_dropped_and_its_last_good_report_stays(
    tmp_path: Path, codec: Codec, report: MakeReport, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    pages = [open_shm_page_writer(tmp_path, rank, codec) for rank in range(2)]
    board = ShmBoard(directory=tmp_path, num_ranks=2, codec=codec)
    for page in pages:
        page.write(report(1))
    assert board.read() == {0: report(1), 1: report(1)}
    pages[0].close()
    damage(codec.path(tmp_path, 0), codec)
    for number in (2, 3):
        pages[1].write(report(number))
        assert board.read() == {0: report(1), 1: report(number)}
    assert board.failed_reads == 2
    assert len(caplog.records) == bool(board.failures.total)
    pages[1].close()


@pytest.mark.parametrize("damage", [*DAMAGES, empty])
def test_a_damaged_page_is_read_again_after_its_next_writer_opened_it(
    tmp_path: Path, codec: Codec, report: MakeReport, damage: Damage
) -> None:
    board = ShmBoard(directory=tmp_path, num_ranks=1, codec=codec)
    page = open_shm_page_writer(tmp_path, 0, codec)
    for number in range(1, 6):
        page.write(report(number))
    assert board.read() == {0: report(5)}
    page.close()
    damage(codec.path(tmp_path, 0), codec)
    board.read()
    page = open_shm_page_writer(tmp_path, 0, codec)
    page.write(report(70))
    assert board.read() == {0: report(70)}
    page.close()


def test_a_page_that_is_removed_and_created_again_is_found_in_the_next_read(
    tmp_path: Path, codec: Codec, report: MakeReport
) -> None:
    board = ShmBoard(directory=tmp_path, num_ranks=1, codec=codec)
    for last in (5, 2):
        page = open_shm_page_writer(tmp_path, 0, codec)
        for number in range(1, last + 1):
            page.write(report(number))
        page.close()
        assert board.read() == {0: report(last)}
        codec.path(tmp_path, 0).unlink()
    assert board.read() == {0: report(2)}
    assert (board.failed_reads, board.failures.total) == (0, 0)


def test_a_report_is_not_replaced_by_an_older_one_during_a_write(
    tmp_path: Path, codec: Codec, report: MakeReport
) -> None:
    """A reader copies one half, then the other; a writer may come between, and be within the second.

    A counter that goes back by one step is, to Prometheus, a restarted rank.
    """
    page = open_shm_page_writer(tmp_path, 0, codec)
    board = ShmBoard(directory=tmp_path, num_ranks=1, codec=codec)
    for number in range(1, 7):
        page.write(report(number))
    assert board.read() == {0: report(6)}
    damaged = bytearray(codec.path(tmp_path, 0).read_bytes())
    damaged[16 + 30] ^= 0xFF
    codec.path(tmp_path, 0).write_bytes(damaged)
    assert board.read() == {0: report(6)}
    assert board.failed_reads == 1
    page.close()


def test_a_file_without_a_page_is_no_rank(tmp_path: Path, codec: Codec) -> None:
    codec.path(tmp_path, 0).write_bytes(b"short")
    codec.path(tmp_path, 1).write_bytes(b"\x7f" * codec.page_bytes)
    codec.path(tmp_path, 2).symlink_to(codec.path(tmp_path, 0))
    codec.path(tmp_path, 3).touch()  # its writer is about to fill it
    codec.path(tmp_path, 4).write_bytes(bytes(codec.page_bytes))  # its writer is about to claim it
    board = ShmBoard(directory=tmp_path, num_ranks=5, codec=codec)
    assert board.read() == {}
    assert (board.failed_reads, board.failures.total) == (4, 3)
