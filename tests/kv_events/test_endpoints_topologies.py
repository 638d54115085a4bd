"""Whole engines: the owners of streams in engines that everyone knows, and port plans over random base ports.

``tests/testing/test_topology_checks.py`` and ``test_endpoint_checks.py`` run the public checks on the same code.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.kv_events import Endpoint, PortPlan
from scheduler_components.kv_events.endpoints import MAX_PORT
from scheduler_components.testing import Topology, make_topology, topologies

TOPOLOGIES = st.sampled_from(topologies())
PORTS = st.integers(1, MAX_PORT)


def test_all_ranks_of_a_cache_know_its_stream_and_how_many_there_are() -> None:
    for topology in topologies():
        for cache in range(topology.num_caches):
            ranks = [rank.parallel for rank in topology.ranks_of(cache)]
            assert {(rank.kv_stream_index, rank.kv_stream_count) for rank in ranks} == {(cache, topology.num_caches)}


def test_metric_labels_differ_for_all_reporting_ranks() -> None:
    for topology in topologies():
        labels = [rank.parallel.metric_labels for rank in topology.ranks if rank.parallel.reports_metrics]
        assert len(labels) == len(set(labels)) == topology.num_caches


@settings(deadline=None)
@given(TOPOLOGIES, st.tuples(PORTS, PORTS, PORTS), st.sampled_from(["*", "0.0.0.0", "::", "127.0.0.1"]))
def test_a_plan_is_refused_only_if_its_ranges_overlap_or_pass_the_last_port(
    topology: Topology, ports: tuple[int, int, int], host: str
) -> None:
    count = topology.num_caches
    events, replay, load = (Endpoint(transport="tcp", host=host, port=port) for port in ports)
    is_valid = max(ports) + count - 1 <= MAX_PORT and all(high - low >= count for low, high in pairwise(sorted(ports)))
    try:
        plan = PortPlan(events=events, replay=replay, load=load, stream_count=count)
    except ConfigError:
        assert not is_valid
        return
    assert is_valid
    for index in range(count):
        planned = plan.event_endpoint(index), plan.replay_endpoint(index), plan.load_endpoint(index)
        assert [endpoint and endpoint.port for endpoint in planned] == [port + index for port in ports]


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
