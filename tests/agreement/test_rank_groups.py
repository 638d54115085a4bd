"""The ranks of one replica agree over the same groups in the same order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState
from scheduler_components.agreement import Proposal
from scheduler_components.agreement.rank_groups import RankGroups, agreeing_ranks, ordered_groups, world_rank_groups
from scheduler_components.testing.in_process_groups import InProcessGroups

SIZES = st.integers(1, 3)


def parallel_of(pp: int, dp: int, cp: int, tp: int) -> ParallelState:
    return ParallelState.from_tp_rank(0, tp_size=dp * cp * tp, attn_dp_size=dp, attn_cp_size=cp, pp_size=pp)


@settings(deadline=None, max_examples=60)
@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES)
def test_the_agreeing_ranks_are_the_grid_of_one_replica(pp: int, dp: int, cp: int, tp: int) -> None:
    world = world_rank_groups(parallel_of(pp, dp, cp, tp))
    assert [sets.rank for sets in world] == list(range(pp * dp * cp * tp))
    all_groups = {agreeing_ranks(sets.rank, world) for sets in world}
    assert len(all_groups) == dp
    assert all(len(groups) == pp * cp * tp for groups in all_groups)
    for sets in world:
        assert all(len(hop) > 1 for hop in sets.reduce_groups)
        assert len(set(sets.reduce_groups)) == len(sets.reduce_groups) == (cp > 1) + (tp > 1) + (pp > 1)
        for at, hop in enumerate(sets.reduce_groups):
            assert all(world[peer].reduce_groups[at] == hop for peer in hop)


@settings(deadline=None, max_examples=60)
@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES)
def test_the_order_of_groups_names_each_once_and_keeps_each_ranks_order(pp: int, dp: int, cp: int, tp: int) -> None:
    world = world_rank_groups(parallel_of(pp, dp, cp, tp))
    order = ordered_groups(world)
    assert len(set(order)) == len(order)
    for sets in world:
        assert sorted(sets.reduce_groups, key=order.index) == list(sets.reduce_groups)


def test_ranks_in_different_numbers_of_groups_share_one_order() -> None:
    world = (
        RankGroups(rank=0, attn_cp=(0, 1, 2)),
        RankGroups(rank=1, attn_cp=(0, 1, 2), attn_tp=(1, 3)),
        RankGroups(rank=2, attn_cp=(0, 1, 2)),
        RankGroups(rank=3, attn_tp=(1, 3), attn_cp=(3, 4)),
        RankGroups(rank=4, attn_cp=(3, 4)),
    )
    assert all(agreeing_ranks(rank, world) == (0, 1, 2, 3, 4) for rank in range(5))
    assert ordered_groups(world) == ((0, 1, 2), (3, 4), (1, 3))
    assert ordered_groups(()) == ()
    sync = InProcessGroups({sets.rank: sets.reduce_groups for sets in world})
    proposals = {rank: Proposal("step", step=0) for rank in range(5)}
    for rank, proposal in proposals.items():
        proposal.min("value", rank)
    agreed = sync.reduce(proposals)
    # Rank 4 does not hear of what rank 3 learns after their hop: each group reduces what its ranks have by then.
    assert {rank: values.numbers["value"] for rank, values in agreed.items()} == {0: 0, 1: 0, 2: 0, 3: 0, 4: 3}


def test_tp2_cp2_reduces_over_cp_and_then_tp() -> None:
    world = world_rank_groups(parallel_of(1, 1, 2, 2))
    assert world[1].reduce_groups == ((1, 3), (0, 1))


def test_pipeline_stages_come_last() -> None:
    world = world_rank_groups(parallel_of(2, 1, 2, 2))
    assert world[1].reduce_groups == ((1, 3), (0, 1), (1, 5))
    assert world[5].reduce_groups == ((5, 7), (4, 5), (1, 5))
    assert RankGroups(rank=1, tp=(0, 1), pp=(1, 3)).reduce_groups == ((0, 1), (1, 3))


def test_tp_is_used_only_without_attention_groups() -> None:
    assert RankGroups(rank=1, tp=(0, 1)).reduce_groups == ((0, 1),)
    assert RankGroups(rank=1, attn_tp=(1,), tp=(0, 1)).reduce_groups == ()
    assert RankGroups(rank=1, attn_cp=(1,), attn_tp=(1,), tp=(0, 1)).reduce_groups == ()
    assert RankGroups(rank=1).reduce_groups == ()


def test_equal_groups_are_used_once() -> None:
    assert RankGroups(rank=0, attn_cp=(0, 1), attn_tp=(1, 0)).reduce_groups == ((0, 1),)


@pytest.mark.parametrize("ranks", [(1, 2), (0, 0), ()])
def test_a_group_without_its_rank_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="attn_cp"):
        RankGroups(rank=0, attn_cp=ranks)
