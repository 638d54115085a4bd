"""Collectives over the engine's sockets: one result for all ranks, or one error that names the missing ranks.

Ranks are threads here. Each has its own sockets, and they open in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups, Proposal
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.errors import SyncDivergenceError, SyncTimeoutError
from scheduler_components.receiving.zmq_input_relay import StopRequestedError
from scheduler_engine.engine.rank.zmq_sync import open_zmq_sync_hub

pytestmark = pytest.mark.sockets

Work = Callable[[ParallelGroups], object]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as opened:
        yield opened


class Ranks:
    """Four ranks, CP2 x TP2, and a signal to stop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, timeout_s: float = 10) -> None:
        self._context, self._folder, self._timeout_s = context, folder, timeout_s
        self.stop = threading.Event()

    def run(self, works: Mapping[int, Work]) -> dict[int, object]:
        """Do each rank's work; what it raises is its result."""
        with ThreadPoolExecutor(4) as threads:
            futures = {rank: threads.submit(self._run, rank, work) for rank, work in works.items()}
            return {rank: future.result() for rank, future in futures.items()}

    def _run(self, rank: int, work: Work) -> object:
        world = world_rank_groups(ParallelState.from_tp_rank(0, tp_size=4, attn_cp_size=2))
        hub = open_zmq_sync_hub(
            self._context,
            rank=rank,
            reduce_groups=world[rank].reduce_groups,
            address_of=lambda peer: f"ipc://{self._folder / str(peer)}",
            wait_for=self._wait,
            timeout_s=self._timeout_s,
        )
        groups = hub.parallel_groups(world[rank].reduce_groups)
        try:
            return work(groups)
        except (SyncTimeoutError, SyncDivergenceError, StopRequestedError) as error:
            return error
        finally:
            groups.close()
            groups.close()

    def _wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        assert timeout_ms is not None
        socket.poll(min(timeout_ms, 20), event)
        return not self.stop.is_set()


def test_ranks_reduce_over_the_whole_grid_repeatedly(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    def work(groups: ParallelGroups) -> object:
        answers = []
        for step in range(200):
            proposal = Proposal("step", step=step)
            proposal.min("landed", groups.rank * step)
            proposal.max("wanted", groups.rank)
            proposal.equal("state", -(2**63))
            for slot in range(300 if step == 7 else 1):
                proposal.any(f"slot {slot}", groups.rank == 3)
            agreed = groups.reduce(proposal)
            answers.append((agreed.numbers["landed"], agreed.numbers["wanted"], *agreed.flags.values()))
        return answers, groups.num_collectives

    found = Ranks(context, tmp_path).run(dict.fromkeys(range(4), work))
    expected = [(0, 3, True, *([True] * (300 if step == 7 else 1))) for step in range(200)]
    assert found == dict.fromkeys(range(4), (expected, 2 * 201))


def test_a_missing_rank_is_named_on_every_rank(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    found = Ranks(context, tmp_path, timeout_s=0.3).run(
        dict.fromkeys((0, 1, 3), lambda groups: groups.all_reduce_min("landed", 1, step=7))
    )
    for error in found.values():
        assert isinstance(error, SyncTimeoutError)
        assert (error.operation, error.step, error.missing_ranks) == ("landed", 7, (2,))


def test_different_operations_are_named_on_every_rank(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    works: dict[int, Work] = dict.fromkeys(range(4), lambda groups: groups.all_reduce_min("landed", 1, step=7))
    works[2] = lambda groups: groups.all_reduce_min("allocated", 1, step=7)
    for error in Ranks(context, tmp_path).run(works).values():
        assert isinstance(error, SyncDivergenceError)
        assert error.places[2] == "'allocated' at step 7, call 0"
        assert error.places[0] == "'landed' at step 7, call 0"


def test_the_signal_to_stop_ends_the_wait(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    ranks = Ranks(context, tmp_path)
    threading.Timer(0.05, ranks.stop.set).start()
    [found] = ranks.run({0: lambda groups: groups.all_reduce_min("landed", 1, step=7)}).values()
    assert isinstance(found, StopRequestedError)


def test_a_rank_that_makes_one_call_too_many_is_named_by_the_rank_that_it_waited_for(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    has_failed = threading.Event()

    def once_more(groups: ParallelGroups) -> object:
        try:
            return groups.all_reduce_min("once more", 1, step=7)
        finally:
            has_failed.set()

    def later(groups: ParallelGroups) -> object:
        has_failed.wait(30)
        return groups.all_reduce_min("landed", 1, step=8)

    found = Ranks(context, tmp_path, timeout_s=0.3).run({0: once_more, 2: later})
    assert isinstance(found[0], SyncTimeoutError)
    assert isinstance(found[2], SyncDivergenceError)
    assert "'once more' at step 7" in str(found[2]) and "'landed' at step 8" in str(found[2])
