"""A file has one holder at a time, until it dies. A lock on a removed file excludes no other process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.contention import count_most_holders

from scheduler_components._internal.file_lock import acquire_file_lock, open_file_lock

pytestmark = pytest.mark.processes


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = acquire_file_lock(path)
    with pytest.raises(BlockingIOError):
        acquire_file_lock(path)
    first.close()
    first.close()
    second = acquire_file_lock(path)
    second.release()
    third = acquire_file_lock(path)
    for lock in (second, third):
        lock.close()


def test_the_files_content_stays_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"kept")
    lock = acquire_file_lock(path)
    assert os.pread(lock.descriptor, 4, 0) == b"kept"
    lock.close()
    acquire_file_lock(tmp_path / "new").close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_a_waiting_process_gets_the_lock_after_its_holder(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", list[str]()
    holder, waiter = acquire_file_lock(path), open_file_lock(path)
    started = threading.Event()

    def wait() -> None:
        started.set()
        with waiter.held():
            order.append("waiter")

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(30)
    order.append("holder")
    holder.close()
    thread.join(30)
    assert order == ["holder", "waiter"]
    acquire_file_lock(path).close()  # the block has released it
    waiter.close()


def test_a_closed_lock_cannot_be_acquired(tmp_path: Path) -> None:
    lock = open_file_lock(tmp_path / "lock")
    lock.close()
    assert not lock.is_open
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock.acquire(wait=False)
    lock.release()
    lock.remove()
    assert (tmp_path / "lock").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        acquire_file_lock(tmp_path / "lock")
    assert not (tmp_path / "victim").exists()


def test_a_file_that_its_holder_removed_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes the file between a newcomer's open and its lock: only one of them may hold the lock."""
    path = tmp_path / "lock"
    holder = acquire_file_lock(path)
    opened = os.open

    def open_then_be_overtaken(*arguments: object) -> int:
        descriptor = opened(*arguments)  # type: ignore[arg-type]
        holder.remove()
        return descriptor

    monkeypatch.setattr(os, "open", open_then_be_overtaken)
    newcomer = acquire_file_lock(path)
    with pytest.raises(BlockingIOError):
        acquire_file_lock(path)
    newcomer.remove()
    assert not list(tmp_path.iterdir())


def test_many_contenders_get_one_lock_in_turn(tmp_path: Path) -> None:
    def acquire() -> Callable[[], object] | None:
        try:
            return acquire_file_lock(tmp_path / "lock").remove
        except BlockingIOError:
            return None

    assert count_most_holders(acquire) == 1
    assert not list(tmp_path.iterdir())


def test_a_killed_holder_releases_the_lock(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from scheduler_components._internal.file_lock import acquire_file_lock

lock = acquire_file_lock(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=False)
    acquire_file_lock(tmp_path / "lock").close()


def test_a_forked_child_has_no_part_in_the_lock(tmp_path: Path) -> None:
    # The owner forks a child that outlives it, as engines do with their workers.
    script = """
import os, sys
from pathlib import Path
from scheduler_components._internal.file_lock import acquire_file_lock

lock = acquire_file_lock(Path(sys.argv[1]))
if os.fork() == 0:
    lock.remove()
    print(lock.is_open, flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.readline()
os._exit(0)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"False\n"
        with pytest.raises(BlockingIOError):
            acquire_file_lock(tmp_path / "lock")
        owner.kill()
        owner.wait(30)
        acquire_file_lock(tmp_path / "lock").close()
        owner.stdin.close()
        assert owner.stdout.read() == b""  # the child has ended
