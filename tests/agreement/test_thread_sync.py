"""Threads that agree as ranks do: every member gets the same result, in any order of calls, or the same error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from kit.rank_grid import grid, on_threads

from scheduler_components.agreement import ParallelGroups, SyncCall
from scheduler_components.agreement.thread_sync import ThreadSyncHub
from scheduler_components.errors import SyncTimeoutError

PAIR = {0: ((0, 1),), 1: ((0, 1),)}


def test_members_get_the_least_values_and_all_values_in_rank_order() -> None:
    hub = ThreadSyncHub(PAIR, timeout_s=20.0)

    def exchange(rank: int) -> tuple[list[int], list[int]]:
        [group] = hub.parallel_groups(rank).groups
        least = group.all_reduce_min([rank, 5 - rank], SyncCall(0, 0, 1, "free pages"))
        return least, group.all_gather([rank, 7], SyncCall(0, 1, 1, "sizes"))

    with ThreadPoolExecutor(2) as threads:
        late, early = threads.submit(exchange, 1), threads.submit(exchange, 0)
        assert late.result() == early.result() == ([0, 4], [0, 7, 1, 7])


def test_a_fast_rank_does_not_see_the_values_of_the_next_call() -> None:
    """One rank may be a call ahead of another, which still gets the result of its own call."""

    def work(groups: ParallelGroups) -> list[int]:
        return [groups.all_reduce_min("landed", 10 * step + groups.rank, step=step) for step in range(200)]

    assert on_threads(grid(2, 2), work) == [[10 * step for step in range(200)]] * 4


def test_a_caller_cannot_change_its_values_after_the_call() -> None:
    hub = ThreadSyncHub(PAIR, timeout_s=20.0)
    values, call = [3], SyncCall(0, 0, 1, "free pages")

    def contribute_and_change() -> list[list[int]]:
        try:
            return hub.exchange(0, (0, 1), values, call)
        finally:
            values[0] = 99

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(contribute_and_change)
        second = hub.exchange(1, (0, 1), [4], call)
        assert first.result() == second == [[3], [4]]


@pytest.mark.parametrize("dead_rank", range(4))
def test_a_dead_rank_is_named_on_all_survivors(dead_rank: int) -> None:
    def work(groups: ParallelGroups) -> object:
        groups.barrier("start", step=0)
        return None if groups.rank == dead_rank else groups.all_reduce_min("landed", 1, step=9)

    for rank, error in enumerate(on_threads(grid(2, 2), work, timeout_s=0.2)):
        if rank != dead_rank:
            assert isinstance(error, SyncTimeoutError)
            assert (error.operation, error.step, error.missing_ranks) == ("landed", 9, (dead_rank,))


def test_a_rank_that_comes_after_a_timeout_gets_the_same_error() -> None:
    """Rank 2 joins groups of ranks that have failed already, so its error names the rank that they missed."""
    reduce_groups = {0: ((0, 1),), 1: ((0, 1),), 2: ((2, 3),), 3: ((2, 3),)}
    hub = ThreadSyncHub(reduce_groups, timeout_s=0.05)
    with pytest.raises(SyncTimeoutError) as first:
        hub.exchange(0, (0, 1), [1], SyncCall(0, 0, 3, "landed"))
    with pytest.raises(SyncTimeoutError) as late:
        hub.exchange(2, (2, 3), [1], SyncCall(0, 0, 3, "landed"))
    assert late.value.missing_ranks == first.value.missing_ranks == (1, 2, 3)


def test_the_groups_of_a_rank_are_those_of_the_hub() -> None:
    groups = ThreadSyncHub(grid(2, 2), timeout_s=1.0).parallel_groups(2)
    assert groups.rank == 2
    assert [group.ranks for group in groups.groups] == list(grid(2, 2)[2])
    groups.close()
