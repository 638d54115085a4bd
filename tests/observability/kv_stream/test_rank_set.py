"""The best ranks of a query are a set that does not change with the view."""

from __future__ import annotations

import pytest
from kit.events import stored

from observability.kv_stream import BlockView


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
