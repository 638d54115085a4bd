"""Whole engines: the owners of streams in engines that everyone knows, and port plans over random base ports.

``tests/testing/test_topology_checks.py`` and ``test_endpoint_checks.py`` run the public checks on the same code.
"""

from __future__ import annotations

import pytest

from scheduler_components.testing import Topology, make_topology, topologies


def test_all_ranks_of_a_cache_know_its_stream_and_how_many_there_are() -> None:
    for topology in topologies():
        for cache in range(topology.num_caches):
            ranks = [rank.parallel for rank in topology.ranks_of(cache)]
            assert {(rank.kv_stream_index, rank.kv_stream_count) for rank in ranks} == {(cache, topology.num_caches)}


def test_metric_labels_differ_for_all_reporting_ranks() -> None:
    for topology in topologies():
        labels = [rank.parallel.metric_labels for rank in topology.ranks if rank.parallel.reports_metrics]
        assert len(labels) == len(set(labels)) == topology.num_caches


@pytest.mark.parametrize(
    ("topology", "owners"),
    [
        (make_topology(cp=2, tp=2), [(0, 0, 0, 0)]),  # TP2 x CP2 is one stream
        (make_topology(dp=2), [(0, 0, 0, 0), (1, 0, 0, 1)]),  # two worlds
        (make_topology(pp=2, tp=2), [(0, 0, 0, 0)]),  # later pipeline stages are silent
        (make_topology(dp=2, cp=2, tp=2, mode="attention"), [(0, 0, 0, 0), (0, 0, 4, 1)]),  # one world of eight
    ],
    ids=lambda value: value.name if isinstance(value, Topology) else "",
)
def test_well_known_engines(topology: Topology, owners: list[tuple[int, int, int, int]]) -> None:
    """Owners as (world, pp_rank, tp_rank, stream)."""
    found = []
    for rank, cache in zip(topology.ranks, topology.caches, strict=True):
        parallel = rank.parallel
        if parallel.owns_kv_stream:
            world = 0 if parallel.attn_dp_size > 1 else cache
            found.append((world, parallel.pp_rank, parallel.tp_rank, parallel.kv_stream_index))
    assert found == owners
