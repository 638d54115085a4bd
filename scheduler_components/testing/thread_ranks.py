"""Run simulated ranks on threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.thread_sync import ThreadSyncHub

__all__ = ["RANK_WORLDS", "ThreadRanks", "run_ranks"]

T = TypeVar("T")

RANK_WORLDS = (
    ParallelState(),
    ParallelState.from_tp_rank(0, tp_size=2),
    ParallelState.from_tp_rank(0, tp_size=2, attn_cp_size=2),
    ParallelState.from_tp_rank(0, tp_size=1, pp_size=3),
    ParallelState.from_tp_rank(0, tp_size=4, attn_cp_size=2, pp_size=2),
)
"""Replicas of one rank, TP, CP, PP, and all of them."""


def run_ranks(parallel: ParallelState, work: Callable[[ParallelGroups], T], *, timeout_s: float = 20.0) -> list[T]:
    """Run ``work`` on one thread per rank of the world of ``parallel``; return the results in rank order.

    Raises:
        Exception: the exception of the lowest failing rank, after all threads have ended.
    """
    reduce_groups = {each.rank: each.reduce_groups for each in world_rank_groups(parallel)}
    hub = ThreadSyncHub(reduce_groups, timeout_s=timeout_s)
    with ThreadPoolExecutor(len(reduce_groups)) as threads:
        running = [threads.submit(work, hub.parallel_groups(rank)) for rank in sorted(reduce_groups)]
    return [each.result() for each in running]


@dataclass(frozen=True, kw_only=True)
class ThreadRanks:
    """A ``RankRunner`` of threads. A rank that never ends is left behind as a daemon.

    Attributes:
        worlds: the replicas to run.
        timeout_s: longest wait of a rank for the others in a collective.
        short_timeout_s: the same, in a check that waits for it.
    """

    worlds: Sequence[ParallelState] = RANK_WORLDS
    timeout_s: float = 20.0
    short_timeout_s: float = 1.0

    def run(
        self, world: ParallelState, work: Callable[[ParallelGroups], T], *, timeout_s: float | None = None
    ) -> dict[int, T]:
        """Run ``work`` on one thread per rank. All of them have three timeouts and a second to end."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        reduce_groups = {each.rank: each.reduce_groups for each in world_rank_groups(world)}
        hub = ThreadSyncHub(reduce_groups, timeout_s=limit_s)
        ends: dict[int, Future[T]] = {rank: Future() for rank in reduce_groups}

        def run_rank(rank: int) -> None:
            try:
                ends[rank].set_result(work(hub.parallel_groups(rank)))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                ends[rank].set_exception(error)

        for rank in ends:
            threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True).start()
        wait(ends.values(), 1.0 + 3 * limit_s)
        return {rank: end.result() for rank, end in ends.items() if end.done()}
