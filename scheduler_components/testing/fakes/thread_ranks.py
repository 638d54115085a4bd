"""N ranks on N threads of this process, which agree through a hub: a parallel group without processes or sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from scheduler_components.hicache.rank_sets import world_rank_sets
from scheduler_components.hicache.sync import SyncDomain
from scheduler_components.hicache.thread_sync import ThreadSyncHub
from scheduler_components.parallel_state import ParallelState

__all__ = ["Hops", "hops_of", "run_ranks"]

T = TypeVar("T")

Hops = Mapping[int, tuple[tuple[int, ...], ...]]
"""Rank -> its groups in order."""


def hops_of(parallel: ParallelState) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The groups of every rank of the world that ``parallel`` is one of; for ``run_ranks`` or ``InProcessSync``."""
    return {sets.rank: sets.hops for sets in world_rank_sets(parallel)}


def run_ranks(hops: Hops, work: Callable[[SyncDomain], T], *, timeout_s: float = 20.0) -> list[T]:
    """Run ``work`` on one thread a rank; results by rank.

    Raises:
        Exception: what the lowest failing rank raised, after all threads have ended.
    """
    hub = ThreadSyncHub(hops, timeout_s=timeout_s)
    with ThreadPoolExecutor(len(hops)) as threads:
        running = [threads.submit(work, hub.domain(rank)) for rank in sorted(hops)]
    return [each.result() for each in running]
