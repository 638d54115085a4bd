"""The space of topologies is whole, and valid: every rank of every engine once, in each form of data parallelism."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.testing import make_topology, topologies


def test_each_rank_of_an_engine_comes_once() -> None:
    for topology in topologies():
        ranks = topology.ranks
        first = ranks[0].parallel
        assert len(ranks) == first.pp_size * first.tp_size * (first.dp_size if first.attn_dp_size == 1 else 1)
        if first.attn_dp_size > 1 or first.dp_size == 1:
            assert [rank.parallel.world_rank for rank in ranks] == list(range(len(world_rank_groups(first))))
        assert set(topology.caches) == set(range(topology.num_caches))
        assert {len(topology.ranks_of(cache)) for cache in range(topology.num_caches)} == {
            len(ranks) // topology.num_caches
        }


def test_the_space_has_every_axis_with_each_form_of_data_parallelism() -> None:
    found = {
        (len(topology.ranks[0].parallel.metric_labels), mode)
        for topology in topologies()
        for mode in ("attention)", "dp_rank None)", "plain)")
        if mode in topology.name
    }
    assert len(found) == 3
    parallels = [rank.parallel for topology in topologies() for rank in topology.ranks]
    for axis in ("attn_tp_rank", "attn_cp_rank", "pp_rank", "attn_dp_rank"):
        assert {0, 1, 2} <= {getattr(parallel, axis) for parallel in parallels}
    assert any(parallel.attn_dp_size > 1 and parallel.dp_rank is None for parallel in parallels)
    assert any(parallel.moe_ep_rank for parallel in parallels)
    assert any(parallel.dcp_size > 1 for parallel in parallels)
    assert len({topology.name for topology in topologies()}) == len(topologies())
    assert 600 <= len(topologies()) < 650  # as the page says


def test_the_ranks_of_an_engine_are_spread_over_its_nodes() -> None:
    topology = make_topology(dp=4, tp=2, mode="attention", num_nodes=2)
    assert [rank.node_rank for rank in topology.ranks] == [0] * 4 + [1] * 4
    assert [rank.parallel.gpu_id for rank in topology.ranks] == [0, 1, 2, 3] * 2
    assert str(topology.ranks[5]) == "dp2/pp0/tp5(attn_cp0, attn_tp1) on node 1"
    assert str(make_topology().ranks[0]) == "dp0/pp0/tp0(attn_cp0, attn_tp0)"


def test_a_mode_that_no_engine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="dp_rank"):
        make_topology(dp=2, mode="plain, dp_rank None")
