"""Ranks on threads agree, and the error of the lowest rank is raised."""

from __future__ import annotations

from threading import Event

import pytest

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.testing import ThreadRanks, run_ranks


def test_ranks_on_threads_agree_and_the_lowest_error_is_raised() -> None:
    parallel = ParallelState.from_tp_rank(0, tp_size=4, attn_cp_size=2)
    assert run_ranks(parallel, lambda groups: groups.all_reduce_min("landed", groups.rank + 5, step=0)) == [5] * 4

    def fail(groups: ParallelGroups) -> None:
        groups.barrier("start", step=0)
        raise ValueError(f"rank {groups.rank}")

    with pytest.raises(ValueError, match="rank 0"):
        run_ranks(parallel, fail)


TWO_RANKS = ParallelState.from_tp_rank(0, tp_size=2)


def test_a_rank_that_does_not_end_is_left_out() -> None:
    never = Event()

    def work(groups: ParallelGroups) -> int:
        if groups.rank:
            never.wait()
        return groups.rank

    assert ThreadRanks(timeout_s=0.05).run(TWO_RANKS, work) == {0: 0}
    never.set()


def test_an_error_of_a_rank_is_raised() -> None:
    def work(groups: ParallelGroups) -> int:
        raise KeyError(groups.rank)

    with pytest.raises(KeyError):
        ThreadRanks(timeout_s=0.05).run(TWO_RANKS, work)
