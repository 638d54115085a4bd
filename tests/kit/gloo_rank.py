"""One rank of ``test_torch_sync``, a process of its own."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups, Proposal
from scheduler_components.agreement.rank_groups import RankGroups, world_rank_groups
from scheduler_components.agreement.torch_sync import open_torch_groups
from scheduler_components.errors import SyncDivergenceError, SyncTimeoutError

ODD_RANK = 2
World = Sequence[RankGroups]


@contextmanager
def opened(world: World, names: list[str], timeout_s: float) -> Iterator[list[ParallelGroups]]:
    all_groups = list(open_torch_groups(world, names, timeout_s=timeout_s).values())
    try:
        yield all_groups
    finally:
        for groups in all_groups:
            groups.close()


def agree(world: World, timeout_s: float) -> object:
    """All questions in one packed step, many times, on two threads with groups of their own."""

    def steps(groups: ParallelGroups) -> list[object]:
        for step in range(20):
            proposal = Proposal("step", step=step)
            proposal.min("landed", groups.rank + step)
            proposal.max("wanted", groups.rank)
            proposal.all("allocated", groups.rank != 1)
            proposal.any("aborted", groups.rank == 1)
            proposal.equal("tree", step)
            proposal.equal("host", groups.rank)
            agreed = groups.reduce(proposal)
        groups.barrier("end", step=20)
        return [*agreed.numbers.values(), *agreed.flags.values(), groups.num_collectives]

    with opened(world, ["scheduler", "prefetch"], timeout_s) as all_groups, ThreadPoolExecutor(2) as threads:
        return list(threads.map(steps, all_groups))


def long_proposal(world: World, timeout_s: float) -> object:
    with opened(world, ["scheduler"], timeout_s) as [groups]:
        proposal = Proposal("step", step=0)
        for slot in range(2000):
            proposal.min(f"operation {slot}", groups.rank + slot)
        numbers = groups.reduce(proposal).numbers
        return [list(numbers.values()) == list(range(2000)), groups.num_collectives]


def diverge(world: World, timeout_s: float) -> object:
    with opened(world, ["scheduler"], timeout_s) as [groups]:
        proposal = Proposal("prefetch", step=5)
        for slot in range(3000 if groups.rank == ODD_RANK else 2):
            proposal.min(f"operation {slot}", 1)
        groups.barrier("start", step=4)
        return groups.reduce(proposal).numbers


def lose_a_rank(world: World, timeout_s: float, how: signal.Signals) -> object:
    with opened(world, ["scheduler"], timeout_s) as [groups]:
        groups.barrier("start", step=0)
        if groups.rank == ODD_RANK:
            os.kill(os.getpid(), how)  # SIGSTOP: the test kills this process when the others are done
        return groups.all_reduce_min("landed", 1, step=7)


def part_for_good(world: World, timeout_s: float) -> object:
    """One rank waits in other groups: all are alive, and one is not where the others are."""
    with opened(world, ["scheduler", "prefetch"], timeout_s) as all_groups:
        return all_groups[dist.get_rank() == ODD_RANK].all_reduce_min("landed", 1, step=3)


SCENARIOS: dict[str, Callable[[World, float], object]] = {
    "agree": agree,
    "long": long_proposal,
    "diverge": diverge,
    "killed": partial(lose_a_rank, how=signal.SIGKILL),
    "stopped": partial(lose_a_rank, how=signal.SIGSTOP),
    "part": part_for_good,
}


def run(scenario: str, world: World, timeout_s: float) -> object:
    try:
        return SCENARIOS[scenario](world, timeout_s)
    except SyncTimeoutError as error:
        return {"timeout": [error.operation, error.step, list(error.missing_ranks)], "text": str(error)}
    except SyncDivergenceError as error:
        return {"diverged": error.call, "places": {str(rank): place for rank, place in error.places.items()}}


def main(
    rank: int, folder: Path, size: int, dp_size: int, cp_size: int, scenarios: Sequence[tuple[str, float]]
) -> None:
    """Run scenarios, each with its timeout in seconds, and write their results to a file of the folder."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        world = world_rank_groups(
            ParallelState.from_tp_rank(rank, tp_size=size, attn_dp_size=dp_size, attn_cp_size=cp_size)
        )
        # Each scenario opens its own groups, so groups also work after a divergence or a close. The results are written
        # after each one, because a rank that stops or dies in the last one ends none after it.
        found = {}
        for scenario, timeout_s in scenarios:
            found[scenario] = run(scenario, world, timeout_s)
            (folder / f"{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        raise
