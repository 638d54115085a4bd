"""The groups of the ranks of one engine, and threads that agree in them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.thread_sync import ThreadSyncHub
from scheduler_components.errors import SettingsDivergenceError, SyncDivergenceError, SyncTimeoutError

Hops = dict[int, tuple[tuple[int, ...], ...]]
"""The groups that each rank reduces over, in the order of its calls."""


def grid(cp: int, tp: int) -> Hops:
    """Return the groups of each rank of an engine of ``cp`` x ``tp`` ranks."""
    world = world_rank_groups(ParallelState.from_tp_rank(0, tp_size=cp * tp, attn_cp_size=cp))
    return {sets.rank: sets.reduce_groups for sets in world}


def on_threads(
    reduce_groups: Hops, work: Callable[[ParallelGroups], object], *, timeout_s: float = 20.0
) -> list[object]:
    """Run ``work`` on one thread per rank and return the results in rank order. A raised error is a rank's result."""
    hub = ThreadSyncHub(reduce_groups, timeout_s=timeout_s)

    def run(rank: int) -> object:
        try:
            return work(hub.parallel_groups(rank))
        except (SettingsDivergenceError, SyncDivergenceError, SyncTimeoutError) as error:
            return error

    with ThreadPoolExecutor(len(reduce_groups)) as threads:
        return list(threads.map(run, sorted(reduce_groups)))
