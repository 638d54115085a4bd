"""Pages of a load board that somebody damaged: each costs itself, and never its reader."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_components import LoadSnapshot
from scheduler_components.load import ShmLoadBoard, open_shm_load_sink
from scheduler_components.load.shm_load_board import PAGE_BYTES
from scheduler_components.shm_board import DoubleBuffer


def cut_short(page: Path) -> None:
    os.truncate(page, 100)


def cut_in_the_middle(page: Path) -> None:
    os.truncate(page, PAGE_BYTES // 2)


def empty(page: Path) -> None:
    os.truncate(page, 0)


def overwrite(page: Path) -> None:
    page.write_bytes(b"\xff" * PAGE_BYTES)


def write_something_else(page: Path) -> None:
    memory = bytearray(PAGE_BYTES)
    DoubleBuffer(memoryview(memory), start=0, buffer_bytes=PAGE_BYTES // 2).write(b"\xc1", 9)
    page.write_bytes(memory)


def link_elsewhere(page: Path) -> None:
    page.unlink()
    page.symlink_to("/etc/passwd")


def put_a_pipe(page: Path) -> None:
    page.unlink()
    os.mkfifo(page)


def put_a_directory(page: Path) -> None:
    page.unlink()
    page.mkdir()


DAMAGES = [cut_short, cut_in_the_middle, overwrite, write_something_else]
REPLACEMENTS = [link_elsewhere, put_a_pipe, put_a_directory]


def test_a_page_that_is_cut_short_under_a_reader_does_not_end_it(tmp_path: Path) -> None:
    """In mapped memory it would, with SIGBUS; so the reader is a process of its own."""
    script = """
import os, sys
from pathlib import Path
from scheduler_components.load.shm_load_board import ShmLoadBoard, open_shm_load_sink
from scheduler_components.values import LoadSnapshot

directory = Path(sys.argv[1])
sink = open_shm_load_sink(directory, 0)
sink.send(LoadSnapshot(num_running_reqs=4))
board = ShmLoadBoard(directory=directory, num_ranks=1)
before = board.read()
os.truncate(directory / "rank0.load", 0)
print(len(before), board.read() == before, board.unread)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=False, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "1 True 1\n")


@pytest.mark.parametrize("damage", [*DAMAGES, *REPLACEMENTS])
def test_a_damaged_page_costs_itself_and_the_last_good_report_stays(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    sinks = [open_shm_load_sink(tmp_path, rank) for rank in range(2)]
    board = ShmLoadBoard(directory=tmp_path, num_ranks=2)
    for sink in sinks:
        sink.send(LoadSnapshot(num_running_reqs=1))
    before = board.read()[0]
    sinks[0].close()
    damage(tmp_path / "rank0.load")
    if damage in REPLACEMENTS:
        assert board.read()[0] == before  # in this look, the page is found to be gone
    unread = board.unread
    for number in (2, 3):
        sinks[1].send(LoadSnapshot(num_running_reqs=number))
        found = board.read()
        assert (found[0], found[1].load.num_running_reqs) == (before, number)
    assert board.unread == unread + 2
    assert len(caplog.records) == bool(board.failures.total)
    sinks[1].close()
    board.close()


@pytest.mark.parametrize("damage", [*DAMAGES, empty])
def test_a_damaged_page_is_read_again_when_its_next_writer_has_it(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    board = ShmLoadBoard(directory=tmp_path, num_ranks=1)
    sink = open_shm_load_sink(tmp_path, 0)
    for number in range(5):
        sink.send(LoadSnapshot(num_running_reqs=number))
    assert board.read()[0].sequence == 5
    sink.close()
    damage(tmp_path / "rank0.load")
    board.read()
    sink = open_shm_load_sink(tmp_path, 0)
    sink.send(LoadSnapshot(num_running_reqs=70))
    assert board.read()[0].load.num_running_reqs == 70
    sink.close()
    board.close()


def test_a_page_that_is_removed_and_made_anew_is_found(tmp_path: Path) -> None:
    board = ShmLoadBoard(directory=tmp_path, num_ranks=1)
    for last in (5, 2):
        sink = open_shm_load_sink(tmp_path, 0)
        for number in range(last):
            sink.send(LoadSnapshot(num_running_reqs=number))
        sink.close()
        board.read()
        assert board.read()[0].sequence == last
        (tmp_path / "rank0.load").unlink()
    assert board.read()[0].sequence == 2
    board.close()


def test_the_newer_half_being_written_does_not_show_the_report_before_the_last(tmp_path: Path) -> None:
    """A reader copies one half, then the other; a writer may come between, and be within the second."""
    sink = open_shm_load_sink(tmp_path, 0)
    board = ShmLoadBoard(directory=tmp_path, num_ranks=1)
    for number in range(1, 7):
        sink.send(LoadSnapshot(num_running_reqs=number))
    assert board.read()[0].sequence == 6
    page = bytearray((tmp_path / "rank0.load").read_bytes())
    page[30] ^= 0xFF
    (tmp_path / "rank0.load").write_bytes(page)
    assert board.read()[0].sequence == 6
    assert board.unread == 1
    sink.close()
    board.close()


def test_a_file_that_never_was_a_page_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "rank0.load").write_bytes(b"short")
    (tmp_path / "rank1.load").write_bytes(os.urandom(PAGE_BYTES))
    (tmp_path / "rank2.load").symlink_to(tmp_path / "rank0.load")
    (tmp_path / "rank3.load").touch()  # its writer is about to fill it
    board = ShmLoadBoard(directory=tmp_path, num_ranks=4)
    assert board.read() == {}
    assert (board.unread, board.failures.total) == (3, 2)
    board.close()
    board.close()
