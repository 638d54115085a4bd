"""Whole engines: every rank of every world, with and without DP attention."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

from scheduler_components.parallel_state import ParallelState

__all__ = ["EngineRank", "engine_of", "engines", "parallel_states"]

EngineRank = tuple[int, ParallelState]
"""The number of the KV cache that a rank holds a part or copy of, and the rank."""

_SIZES = st.integers(1, 4)


def engine_of(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, dp_attention: bool = False) -> list[EngineRank]:
    """Every rank of one engine.

    What a KV cache is, is said here and not read from ``ParallelState``: ranks that differ in attention-DP, or in
    data parallelism without DP attention, hold different caches; pipeline, CP and TP ranks share one.

    Args:
        pp, dp, cp, tp: sizes of the pipeline, data, attention-context and attention-tensor axes.
        dp_attention: the data-parallel replicas share one tensor-parallel world.
    """
    attn_dp_size, worlds = (dp, 1) if dp_attention else (1, dp)
    ranks_a_stage = attn_dp_size * cp * tp
    ranks = []
    for world, pp_rank, tp_rank in product(range(worlds), range(pp), range(ranks_a_stage)):
        plain_dp: dict[str, Any] = {} if dp_attention else {"dp_size": dp, "dp_rank": world if dp > 1 else None}
        state = ParallelState.from_tp_rank(
            tp_rank,
            tp_size=ranks_a_stage,
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
    return st.builds(engine_of, pp=_SIZES, dp=_SIZES, cp=_SIZES, tp=_SIZES, dp_attention=st.booleans())


def parallel_states() -> st.SearchStrategy[ParallelState]:
    """One rank of some engine."""
    return engines().flatmap(st.sampled_from).map(lambda rank: rank[1])
