"""The best ranks of a query are a set that does not change with the view; the depths of many ranks are exact."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.events import stored

from observability.kv_stream import BlockView
from observability.kv_stream.rank_set import depths_in


@pytest.mark.parametrize("num_ranks", [1, 5, 64, 300])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_best_ranks_do_not_change_with_the_view(num_ranks: int, every: int) -> None:
    view = BlockView()
    for rank in range(num_ranks):
        view.apply(-rank, [stored(1, 2) if rank % every else stored(1, 2, 3)])
    best = {-rank for rank in range(0, num_ranks, every)}
    depth, ranks = view.best_ranks([1, 2, 3, 4])
    view.clear(0)
    view.apply(7, [stored(1, 2, 3)])
    assert (depth, len(ranks), set(ranks)) == (3, len(best), best)
    assert ranks == best
    assert 0 in ranks
    assert 7 not in ranks
    assert ranks & {0, 7} == {0}
    assert repr(ranks) == f"<RankSet {sorted(best)}>"
    assert view.best_ranks([1, 2, 3, 4])[1] == best - {0} | {7}


RANK_AT = tuple(range(-700, 0))


def sets_of(depth_at: list[int]) -> tuple[list[int], list[int]]:
    """Return the mask of the positions with at least each depth; position i has depth ``depth_at[i]``, 0 for none."""
    depths = sorted({*depth_at} - {0})
    return [sum(1 << at for at, depth in enumerate(depth_at) if depth >= least) for least in depths], depths


@settings(deadline=None, max_examples=30)
@example(depth_at=[1 + position // 2 for position in range(700)])  # more depths than a byte counts
@example(depth_at=[511 - position % 511 for position in range(700)])
@example(depth_at=[0] * 699 + [7])
@given(
    depth_at=st.integers(0, 9).flatmap(
        lambda bits: st.lists(st.integers(0, 2**bits).map(lambda depth: depth * 3), max_size=100)
    )
)
def test_the_depths_of_many_ranks_equal_those_of_each(depth_at: list[int]) -> None:
    sets, depths = sets_of(depth_at)
    expected = {rank: depth for rank, depth in zip(RANK_AT, depth_at, strict=False) if depth}
    assert depths_in(sets, depths, RANK_AT) == expected
