"""Between real processes: every read is whole, no sequence goes back, and a rank that died shows by its age."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_components import LoadPublisher, LoadSnapshot, ParallelState, StartError
from scheduler_components.load import ShmLoadBoard, open_shm_load_sink

Eventually = Callable[[Callable[[], object]], None]

WRITER = """
import sys, time
from pathlib import Path
from scheduler_components.load.shm_load_board import open_shm_load_sink
from scheduler_components.values import LoadSnapshot

sink = open_shm_load_sink(Path(sys.argv[1]), int(sys.argv[2]))
number = sink.sequence
while True:
    number += 1
    # Every field follows from one number, and the length changes with it: a torn report would not add up.
    sink.send(LoadSnapshot(number, time.time(), int(sys.argv[2]), number, number * 3, number * 5, number * 7,
                           dispatched_watermarks=(("x" * (number % 64 + 1), number),) * (number % 7)))
"""


def assert_whole(load: LoadSnapshot, rank: int) -> None:
    number = load.sequence
    assert load.dp_rank == rank
    assert (load.num_running_reqs, load.num_waiting_reqs) == (number, number * 3)
    assert (load.num_pending_tokens, load.num_waiting_uncached_tokens) == (number * 5, number * 7)
    assert load.dispatched_watermarks == (("x" * (number % 64 + 1), number),) * (number % 7)


def start_writer(directory: Path, rank: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(directory), str(rank)])


def test_reads_between_processes_are_whole_and_never_go_back(tmp_path: Path, eventually: Eventually) -> None:
    writers = [start_writer(tmp_path, rank) for rank in range(2)]
    board = ShmLoadBoard(directory=tmp_path, num_ranks=2)
    try:
        eventually(lambda: len(board.read()) == 2)
        last = {0: 0, 1: 0}
        changes = 0
        reads = 0
        while reads < 20_000 or changes < 100:  # a loaded machine gives the writers little time between two reads
            reads += 1
            for rank, entry in board.read().items():
                assert_whole(entry.load, rank)
                assert entry.sequence >= last[rank]
                changes += entry.sequence > last[rank]
                last[rank] = entry.sequence
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
        board.close()


def test_a_killed_writer_leaves_a_whole_report_and_its_successor_goes_on(
    tmp_path: Path, eventually: Eventually
) -> None:
    board = ShmLoadBoard(directory=tmp_path, num_ranks=1)
    sequence = 0
    for _ in range(5):
        writer = start_writer(tmp_path, 0)
        try:
            beyond = sequence + 100
            eventually(lambda beyond=beyond: board.read() and board.read()[0].sequence > beyond)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        entry = board.read()[0]
        assert_whole(entry.load, 0)
        assert entry.sequence > sequence
        sequence = entry.sequence
    died_at = entry.load.timestamp
    assert board.stale_ranks(now=died_at + 1.0, max_age_s=2.0) == []
    assert board.stale_ranks(now=died_at + 3.0, max_age_s=2.0) == [0]
    assert entry.age_s(died_at - 1.0) == 0.0
    board.close()


def test_a_rank_that_has_not_come_is_stale_and_found_when_it_comes(tmp_path: Path) -> None:
    board = ShmLoadBoard(directory=tmp_path / "board", num_ranks=3)
    assert board.read() == {}
    (tmp_path / "board").mkdir()
    sink = open_shm_load_sink(tmp_path / "board", 1)
    assert board.read() == {}
    assert board.unread == 1
    sink.send(LoadSnapshot(timestamp=5.0, num_running_reqs=4))
    assert board.read()[1].load.num_running_reqs == 4
    assert board.stale_ranks(now=5.0, max_age_s=1.0) == [0, 2]
    sink.close()
    board.close()


def test_one_writer_a_rank_and_the_next_after_it_has_closed(tmp_path: Path) -> None:
    sink = open_shm_load_sink(tmp_path, 0)
    with pytest.raises(StartError, match="another process writes"):
        open_shm_load_sink(tmp_path, 0)
    sink.send(LoadSnapshot())
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="released"):
        sink.send(LoadSnapshot())
    following = open_shm_load_sink(tmp_path, 0)
    assert following.sequence == 1
    following.close()


def test_a_load_publisher_keeps_the_page_fresh_by_its_heartbeat(tmp_path: Path) -> None:
    class Idle:
        def get_loads(self) -> LoadSnapshot:
            return LoadSnapshot(timestamp=now[0])

    now = [100.0]
    board = ShmLoadBoard(directory=tmp_path, num_ranks=1)
    publisher = LoadPublisher(
        parallel=ParallelState(), load=Idle(), sink=open_shm_load_sink(tmp_path, 0), clock=lambda: now[0]
    )
    for _ in range(100):
        publisher.publish_load()
        assert board.read()[0].age_s(now[0]) <= publisher.pacer.heartbeat_s
        now[0] += 0.0625
    assert board.read()[0].sequence <= 8
    publisher.close()
    board.close()


def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from scheduler_components.errors import ForkedPublisherError
from scheduler_components.kv_events.endpoints import Endpoint
from scheduler_components.load.shm_load_board import open_shm_load_sink
from scheduler_components.values import LoadSnapshot
from scheduler_components.load.zmq_gauge import open_zmq_load_sink

sinks = [open_shm_load_sink(Path(sys.argv[1]), 0), open_zmq_load_sink(Endpoint.parse(f"ipc://{sys.argv[1]}/load"))]
child = os.fork()
if child == 0:
    raised = 0
    for sink in sinks:
        try:
            sink.send(LoadSnapshot())
        except ForkedPublisherError:
            raised += 1
        sink.close()
    os._exit(raised)
raised = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
for sink in sinks:
    sink.send(LoadSnapshot())
    sink.close()
sys.exit(0 if raised == 2 else 1)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.load"]


def test_a_directory_that_is_not_there_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot be opened"):
        open_shm_load_sink(tmp_path / "missing", 0)


def test_others_may_not_read_a_page(tmp_path: Path) -> None:
    sink = open_shm_load_sink(tmp_path, 0)
    assert (tmp_path / "rank0.load").stat().st_mode & 0o077 == 0
    sink.send(LoadSnapshot(timestamp=time.time()))
    sink.close()
