"""Who agrees with whom: the grid of attention-CP x attention-TP of one replica and pipeline stage, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState
from scheduler_components.hicache import RankSets, domain_of, groups_in_order, world_rank_sets

SIZES = st.integers(1, 3)


def parallel_of(pp: int, dp: int, cp: int, tp: int) -> ParallelState:
    return ParallelState.from_tp_rank(0, tp_size=dp * cp * tp, attn_dp_size=dp, attn_cp_size=cp, pp_size=pp)


@settings(deadline=None, max_examples=60)
@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES)
def test_a_domain_is_one_replicas_grid(pp: int, dp: int, cp: int, tp: int) -> None:
    world = world_rank_sets(parallel_of(pp, dp, cp, tp))
    assert [sets.rank for sets in world] == list(range(pp * dp * cp * tp))
    domains = {domain_of(sets.rank, world) for sets in world}
    assert len(domains) == pp * dp
    assert all(len(domain) == cp * tp for domain in domains)
    for sets in world:
        assert all(len(hop) > 1 for hop in sets.hops)
        assert len(set(sets.hops)) == len(sets.hops) == (cp > 1) + (tp > 1)
        for at, hop in enumerate(sets.hops):
            assert all(world[peer].hops[at] == hop for peer in hop)


@settings(deadline=None, max_examples=60)
@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES)
def test_the_order_of_groups_names_each_once_and_keeps_each_ranks_order(pp: int, dp: int, cp: int, tp: int) -> None:
    world = world_rank_sets(parallel_of(pp, dp, cp, tp))
    order = groups_in_order(world)
    assert len(set(order)) == len(order)
    for sets in world:
        assert sorted(sets.hops, key=order.index) == list(sets.hops)


def test_tp2_cp2_reduces_over_cp_and_then_tp() -> None:
    world = world_rank_sets(parallel_of(1, 1, 2, 2))
    assert world[1].hops == ((1, 3), (0, 1))


def test_tp_is_taken_only_where_an_engine_has_neither_attention_group() -> None:
    assert RankSets(rank=1, tp=(0, 1)).hops == ((0, 1),)
    assert RankSets(rank=1, attn_tp=(1,), tp=(0, 1)).hops == ()
    assert RankSets(rank=1, attn_cp=(1,), attn_tp=(1,), tp=(0, 1)).hops == ()
    assert RankSets(rank=1).hops == ()


def test_equal_rank_sets_are_taken_once() -> None:
    assert RankSets(rank=0, attn_cp=(0, 1), attn_tp=(1, 0)).hops == ((0, 1),)


@pytest.mark.parametrize("ranks", [(1, 2), (0, 0), ()])
def test_a_set_without_its_rank_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="attn_cp"):
        RankSets(rank=0, attn_cp=ranks)
