"""A sum over the ranks of a model: a dead rank ends it on all others with its name, and a stop order ends any wait.

The ranks are threads here and communicate over gloo like processes. A thread that does not join is a stopped process:
it keeps its connections. One that closes its group is a process that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[torch]")

import torch

from scheduler_components.errors import SyncTimeoutError
from scheduler_components.receiving.zmq_input_relay import StopRequestedError
from scheduler_engine.device.torch_model_parallel import (
    TorchModelParallelGroup,
    open_model_parallel_group,
)

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

NAMES = (4, 5, 7)
"""Numbers of the ranks in the world."""

LONG_S = 4.0
"""gloo's timeout, which no test waits for, unless its rank must be stopped."""


def each_rank(folder: Path, work: Callable[[TorchModelParallelGroup, Barrier], object]) -> list[object]:
    """Run ``work`` on a thread per rank after a first sum. Return the results; a raised error is a result."""
    together = Barrier(len(NAMES))

    def run(rank: int) -> object:
        group = open_model_parallel_group(folder / "meeting", rank=rank, names=NAMES, timeout_s=LONG_S)
        partial = torch.full((3,), float(rank))
        group.all_reduce(partial)
        assert partial.tolist() == [3.0] * 3
        together.wait(30)
        try:
            return work(group, together)
        except (SyncTimeoutError, StopRequestedError) as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(len(NAMES)) as threads:
        return list(threads.map(run, range(len(NAMES))))


def one_sum(group: TorchModelParallelGroup) -> None:
    group.all_reduce(torch.ones(3))


def test_a_rank_that_ends_is_named_on_all_others(tmp_path: Path) -> None:
    def work(group: TorchModelParallelGroup, _: Barrier) -> object:
        if group.rank != 2:
            one_sum(group)
        return None

    found = each_rank(tmp_path, work)
    assert found[2] is None
    for error in found[:2]:
        assert isinstance(error, SyncTimeoutError)
        assert (error.operation, error.step, error.missing_ranks) == ("sum of the model", 2, (7,))
        assert error.cause


def test_a_rank_that_stops_is_named_on_all_others_as_soon_as_one_of_them_gives_up(tmp_path: Path) -> None:
    def work(group: TorchModelParallelGroup, together: Barrier) -> object:
        if group.rank == 0:
            group.timeout_s = 0.3
        try:
            if group.rank != 2:
                one_sum(group)
        finally:
            together.wait(30)  # the stopped rank keeps its connections
        return None

    first, second, _ = each_rank(tmp_path, work)
    assert isinstance(first, SyncTimeoutError)
    assert isinstance(second, SyncTimeoutError)
    assert first.missing_ranks == second.missing_ranks == (7,)
    assert second.cause == "rank 4 has failed"


def test_a_stop_order_ends_a_sum_and_the_close_does_not_wait_for_gloo(tmp_path: Path) -> None:
    asked: list[int] = []

    def stop() -> None:
        asked.append(1)
        raise StopRequestedError

    def work(group: TorchModelParallelGroup, together: Barrier) -> object:
        group.on_wait = stop
        try:
            if group.rank == 0:
                one_sum(group)
        finally:
            if group.rank == 0:
                group.close()
            together.wait(3)  # less than gloo's timeout; the others keep their connections until then
        return None

    found = each_rank(tmp_path, work)
    assert isinstance(found[0], StopRequestedError)
    assert (found[1:], asked) == ([None, None], [1])


def test_a_closed_group_refuses_a_sum(tmp_path: Path) -> None:
    def work(group: TorchModelParallelGroup, _: Barrier) -> object:
        group.close()
        with pytest.raises(RuntimeError, match="is closed"):
            one_sum(group)
        return group.size

    assert each_rank(tmp_path, work) == [3, 3, 3]
