"""What a batcher decides by: how much output to reserve room for, how long a chunk may be, when replicas prefill.

All of it is pure. What follows from steps and tokens alone is the same on every rank of a replica; where a component
learns from a clock, it says how ranks come to one value.
"""

from __future__ import annotations

from scheduler_components.batching.chunk_sizer import (
    DynamicChunkSizer,
    FirstTokenPredictor,
    PrefillLatencyFit,
    PrefillLatencyModel,
)
from scheduler_components.batching.dp_attn import (
    BatchShape,
    DpBatchSync,
    DpStats,
    DpStep,
    PrefillDelayer,
    PrefillIntent,
    PrefillVote,
    dp_rank_groups,
)
from scheduler_components.batching.new_token_ratio import NewTokenRatioTracker, RunningRequest

__all__ = [
    "BatchShape",
    "DynamicChunkSizer",
    "FirstTokenPredictor",
    "PrefillLatencyFit",
    "PrefillLatencyModel",
    "RunningRequest",
    "DpBatchSync",
    "DpStats",
    "DpStep",
    "NewTokenRatioTracker",
    "PrefillDelayer",
    "PrefillVote",
    "PrefillIntent",
    "dp_rank_groups",
]
