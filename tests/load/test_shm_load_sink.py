"""Load in shared memory: every report that can be made fits, and the publisher's heartbeat keeps the page fresh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_components import LoadPublisher, LoadSnapshot, NullLoadSink, ParallelState, StartError
from scheduler_components.load import open_shm_load_board, open_shm_load_sink
from scheduler_components.load_inquirer import MAX_DISPATCHERS

TRIVIAL = ParallelState()


def test_the_largest_report_fits_and_a_larger_one_leaves_the_last(tmp_path: Path) -> None:
    sink, board = open_shm_load_sink(tmp_path, TRIVIAL), open_shm_load_board(tmp_path, 1)
    largest = LoadSnapshot(dispatched_watermarks=tuple((f"{index:064}", 2**63 - 1) for index in range(MAX_DISPATCHERS)))
    sink.send(largest)
    with pytest.raises(ValueError, match="fit"):
        sink.send(LoadSnapshot(dispatched_watermarks=(("x" * 40_000, 1),)))
    assert board.read() == {0: largest}
    sink.close()
    board.close()


def test_a_rank_that_owns_no_stream_takes_no_page(tmp_path: Path) -> None:
    ranks = [ParallelState.from_tp_rank(tp_rank, tp_size=4, attn_dp_size=2) for tp_rank in range(4)]
    sinks = [open_shm_load_sink(tmp_path, parallel) for parallel in ranks]
    assert [sink.wants_load for sink in sinks] == [True, False, True, False]
    for parallel, sink in zip(ranks, sinks, strict=True):
        sink.send(LoadSnapshot(dp_rank=parallel.kv_stream_index))
        sink.close()
    assert isinstance(sinks[1], NullLoadSink)
    board = open_shm_load_board(tmp_path, 2)
    assert board.read() == {0: LoadSnapshot(dp_rank=0), 1: LoadSnapshot(dp_rank=1)}
    board.close()


def test_a_load_publisher_keeps_the_page_fresh_by_its_heartbeat(tmp_path: Path) -> None:
    class Idle:
        def get_loads(self) -> LoadSnapshot:
            return LoadSnapshot(timestamp=now[0])

    now, seen = [100.0], set[float]()
    board = open_shm_load_board(tmp_path, 1)
    publisher = LoadPublisher(
        parallel=TRIVIAL, load=Idle(), sink=open_shm_load_sink(tmp_path, TRIVIAL), clock=lambda: now[0]
    )
    for _ in range(100):
        publisher.publish_load()
        seen.add(board.read()[0].timestamp)
        assert board.stale_ranks(now=now[0], max_age_s=publisher.pacer.heartbeat_s) == []
        now[0] += 0.0625
    assert len(seen) <= 8
    publisher.close()
    board.close()


def test_a_forked_child_sends_by_no_sink(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from scheduler_components import ForkedPublisherError, LoadSnapshot, ParallelState
from scheduler_components.kv_events import Endpoint
from scheduler_components.load import open_shm_load_sink, open_zmq_load_sink

directory = Path(sys.argv[1])
sinks = [open_shm_load_sink(directory, ParallelState()), open_zmq_load_sink(Endpoint.parse(f"ipc://{directory}/load"))]
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
        open_shm_load_sink(tmp_path / "missing", TRIVIAL)
