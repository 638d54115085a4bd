"""What a batcher decides by: how much output to reserve room for, how long a chunk may be, when replicas prefill.

All of it is pure. What follows from steps and tokens alone is the same on every rank of a replica; where a component
learns from a clock, it says how ranks come to one value.
"""

from __future__ import annotations

from scheduler_components.batching.chunk_sizer import (
    ChunkSizer,
    FirstTokenForecast,
    PrefillLatencyFit,
    PrefillModel,
)
from scheduler_components.batching.dp_attn import (
    BatchShape,
    DpBatchSync,
    DpStats,
    DpStep,
    PrefillDelayer,
    PrefillVote,
    PrefillWish,
    dp_rank_sets,
)
from scheduler_components.batching.new_token_ratio import DecodingRequest, NewTokenRatioTracker

__all__ = [
    "BatchShape",
    "ChunkSizer",
    "FirstTokenForecast",
    "PrefillLatencyFit",
    "PrefillModel",
    "DecodingRequest",
    "DpBatchSync",
    "DpStats",
    "DpStep",
    "NewTokenRatioTracker",
    "PrefillDelayer",
    "PrefillVote",
    "PrefillWish",
    "dp_rank_sets",
]
