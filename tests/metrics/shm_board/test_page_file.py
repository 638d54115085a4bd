"""A page has one writer, which ends with its process; a second writer is refused at start-up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_components import StartError
from scheduler_components.metrics.shm_board import open_shm_page_file

pytestmark = pytest.mark.processes

NUM_BYTES = 10_000


def test_a_new_page_is_zero_and_what_is_written_stays(tmp_path: Path) -> None:
    file = open_shm_page_file(tmp_path / "page", NUM_BYTES)
    assert file.memory == bytes(NUM_BYTES)
    file.memory[:3] = b"abc"
    file.close()
    file.close()
    again = open_shm_page_file(tmp_path / "page", NUM_BYTES)
    assert bytes(again.memory[:4]) == b"abc\0"
    again.close()


def test_the_space_of_a_page_is_allocated_before_the_first_write(tmp_path: Path) -> None:
    """A file that only has a size takes room at the first write, and a full file system kills the process there."""
    file = open_shm_page_file(tmp_path / "page", NUM_BYTES)
    assert (tmp_path / "page").stat().st_blocks * 512 >= NUM_BYTES
    file.close()


def test_a_short_page_is_extended_and_a_long_one_is_not_truncated(tmp_path: Path) -> None:
    """Truncating it would end every process that has mapped it, with a fatal signal."""
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "long").write_bytes(b"x" * (2 * NUM_BYTES))
    for name, size in (("short", NUM_BYTES), ("long", 2 * NUM_BYTES)):
        file = open_shm_page_file(tmp_path / name, NUM_BYTES)
        assert len(file.memory) == NUM_BYTES
        assert (tmp_path / name).stat().st_size == size
        file.close()


def test_other_users_cannot_read_a_page(tmp_path: Path) -> None:
    open_shm_page_file(tmp_path / "page", NUM_BYTES).close()
    assert (tmp_path / "page").stat().st_mode & 0o077 == 0


def test_a_path_without_a_possible_page_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for path in (tmp_path / "link", tmp_path / "missing" / "page", tmp_path):
        with pytest.raises(StartError, match="cannot be opened"):
            open_shm_page_file(path, NUM_BYTES)
    assert not (tmp_path / "victim").exists()


def test_a_full_file_system_is_a_start_error(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from scheduler_components.errors import StartError
from scheduler_components.metrics.shm_board import open_shm_page_file

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    open_shm_page_file(Path(sys.argv[1]), 10_000)
except StartError as error:
    print(error.hint)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "page")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "free space in the file system\n"


def test_a_forked_child_does_not_write_and_keeps_no_page_taken(tmp_path: Path) -> None:
    # The owner forks a child that outlives it, as engines do with their workers.
    script = """
import os, sys
from pathlib import Path
from scheduler_components.errors import ForkedPublisherError
from scheduler_components.metrics.shm_board import open_shm_page_file

file = open_shm_page_file(Path(sys.argv[1]), 10_000)
if os.fork() == 0:
    try:
        file.check_owner()
    except ForkedPublisherError as error:
        print(error.owner_pid == os.getppid(), flush=True)
    try:
        file.memory[0] = 1
    except ValueError as error:
        print("released" in str(error), flush=True)
    file.close()
    sys.stdin.read()
    os._exit(0)
file.check_owner()
file.memory[1] = 2
print(True, flush=True)
sys.stdin.readline()
os._exit(0)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "page")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        assert owner.stdout.read(15).count(b"True") == 3  # of two processes, in any order
        with pytest.raises(StartError, match="another process writes"):
            open_shm_page_file(tmp_path / "page", NUM_BYTES)
        owner.kill()
        owner.wait(30)
        file = open_shm_page_file(tmp_path / "page", NUM_BYTES)
        assert bytes(file.memory[:2]) == b"\0\2"
        file.close()
        owner.stdin.close()
        assert owner.stdout.read() == b""  # the child has ended
