"""Run simulated ranks on threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.rank_groups import world_rank_groups
from scheduler_components.thread_sync import ThreadSyncHub

__all__ = ["run_ranks"]

T = TypeVar("T")


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
