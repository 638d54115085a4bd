"""Whole engines. Property: one owner for each KV cache, dense stream numbers, and different addresses.

This file defines a KV cache independently of the code under test: ranks that differ in attention-DP, or in data
parallelism without DP attention, hold different caches; pipeline, CP and TP ranks share one.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState
from scheduler_components.kv_events import Endpoint, PortPlan
from scheduler_components.kv_events.endpoints import MAX_PORT

EngineRank = tuple[int, ParallelState]
"""The number of the KV cache that a rank holds a part or copy of, and the rank."""

_SIZES = st.integers(1, 4)


def engine_ranks(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, dp_attention: bool = False) -> list[EngineRank]:
    """Every rank of one engine.

    Args:
        pp, dp, cp, tp: sizes of the pipeline, data, attention-context and attention-tensor axes.
        dp_attention: the data-parallel replicas share one tensor-parallel world.
    """
    attn_dp_size, worlds = (dp, 1) if dp_attention else (1, dp)
    ranks_per_stage = attn_dp_size * cp * tp
    ranks = []
    for world, pp_rank, tp_rank in product(range(worlds), range(pp), range(ranks_per_stage)):
        plain_dp: dict[str, Any] = {} if dp_attention else {"dp_size": dp, "dp_rank": world if dp > 1 else None}
        state = ParallelState.from_tp_rank(
            tp_rank,
            tp_size=ranks_per_stage,
            attn_dp_size=attn_dp_size,
            attn_cp_size=cp,
            pp_rank=pp_rank,
            pp_size=pp,
            **plain_dp,
        )
        ranks.append((tp_rank // (cp * tp) if dp_attention else world, state))
    return ranks


def engines() -> st.SearchStrategy[list[EngineRank]]:
    """Engines of 1 to 4 along each axis."""
    return st.builds(engine_ranks, pp=_SIZES, dp=_SIZES, cp=_SIZES, tp=_SIZES, dp_attention=st.booleans())


def parallel_states() -> st.SearchStrategy[ParallelState]:
    """One rank of an engine."""
    return engines().flatmap(st.sampled_from).map(lambda rank: rank[1])


@settings(deadline=None)
@given(state=parallel_states())
def test_a_parallel_state_is_one_rank_of_a_world(state: ParallelState) -> None:
    assert 0 <= state.kv_stream_index < state.kv_stream_count


@settings(deadline=None)
@given(engines())
def test_each_kv_cache_has_one_owner_and_streams_are_numbered_without_holes(
    engine: list[EngineRank],
) -> None:
    caches = {cache for cache, _ in engine}
    owners = [(cache, state) for cache, state in engine if state.owns_kv_stream]
    assert sorted(cache for cache, _ in owners) == sorted(caches)
    assert sorted(state.kv_stream_index for _, state in owners) == list(range(len(caches)))
    assert {state.kv_stream_count for _, state in engine} == {len(caches)}


@settings(deadline=None)
@given(engines())
def test_all_ranks_of_a_cache_agree_on_its_stream_and_one_of_them_reports(
    engine: list[EngineRank],
) -> None:
    for cache in {cache for cache, _ in engine}:
        ranks = [state for of_cache, state in engine if of_cache == cache]
        assert len({state.kv_stream_index for state in ranks}) == 1
        assert sum(state.reports_metrics for state in ranks) == 1
        assert sum(state.leads_replica for state in ranks) == 1


@settings(deadline=None)
@given(engines())
def test_metric_labels_differ_for_all_reporting_ranks(engine: list[EngineRank]) -> None:
    labels = [state.metric_labels for _, state in engine if state.reports_metrics]
    assert len(labels) == len(set(labels))


BASES = st.tuples(st.integers(1, MAX_PORT), st.integers(1, MAX_PORT), st.integers(1, MAX_PORT))


@settings(deadline=None)
@given(engines(), BASES, st.sampled_from(["*", "0.0.0.0", "::", "127.0.0.1"]))
def test_the_endpoints_of_all_streams_differ_and_lead_back_to_their_rank(
    engine: list[EngineRank], ports: tuple[int, int, int], host: str
) -> None:
    owners = [state for _, state in engine if state.owns_kv_stream]
    bases = [Endpoint(transport="tcp", host=host, port=port) for port in ports]
    try:
        plan = PortPlan(events=bases[0], replay=bases[1], load=bases[2], stream_count=len(owners))
    except ConfigError:
        spans = sorted(ports)
        apart = all(high - low >= len(owners) for low, high in pairwise(spans))
        assert not apart or max(ports) + len(owners) - 1 > MAX_PORT
        return
    every = []
    for state in owners:
        index = state.kv_stream_index
        for base, at in zip(
            bases, (plan.event_endpoint(index), plan.replay_endpoint(index), plan.load_endpoint(index)), strict=True
        ):
            assert at is not None
            assert at.port is not None
            assert base.port is not None
            assert at.port - base.port == index
            every.append(str(at))
    assert len(set(every)) == 3 * len(owners)


@settings(deadline=None)
@given(engines(), st.sampled_from(["ipc", "inproc"]))
def test_paths_of_all_streams_differ_too(engine: list[EngineRank], transport: str) -> None:
    owners = [state for _, state in engine if state.owns_kv_stream]
    plan = PortPlan(
        events=Endpoint.parse(f"{transport}://kv-events"),
        replay=Endpoint.parse(f"{transport}://kv-replay"),
        stream_count=len(owners),
    )
    every = {str(plan.event_endpoint(s.kv_stream_index)) for s in owners}
    every |= {str(plan.replay_endpoint(s.kv_stream_index)) for s in owners}
    assert len(every) == 2 * len(owners)


@pytest.mark.parametrize(
    ("pp", "dp", "cp", "tp", "dp_attention", "owners"),
    [
        (1, 1, 2, 2, False, [(0, 0, 0, 0)]),  # TP2 x CP2 is one stream
        (1, 2, 1, 1, False, [(0, 0, 0, 0), (1, 0, 0, 1)]),  # two worlds
        (2, 1, 1, 2, False, [(0, 0, 0, 0)]),  # later pipeline stages are silent
        (1, 2, 2, 2, True, [(0, 0, 0, 0), (0, 0, 4, 1)]),  # one world of eight
    ],
)
def test_well_known_engines(
    pp: int, dp: int, cp: int, tp: int, dp_attention: bool, owners: list[tuple[int, int, int, int]]
) -> None:
    """Owners as (world, pp_rank, tp_rank, stream)."""
    found = []
    for cache, state in engine_ranks(pp=pp, dp=dp, cp=cp, tp=tp, dp_attention=dp_attention):
        if state.owns_kv_stream:
            found.append((0 if dp_attention else cache, state.pp_rank, state.tp_rank, state.kv_stream_index))
    assert found == owners
