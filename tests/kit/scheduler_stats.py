"""Statistics of a scheduler: of one rank with some fields of its load, and with every part present."""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec

from scheduler_components import ParallelState
from scheduler_components.metrics import RequestLatencyRecorder
from scheduler_components.values import (
    DecodeMoments,
    DisaggregationLoad,
    LatencySnapshot,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    PublisherStats,
    QueueLoad,
    SchedulerStats,
    SpeculativeLoad,
)


def make_stats(dp_rank: int = 0, *, publisher: PublisherStats | None = None, **load: Any) -> SchedulerStats:
    """Return the statistics of one of eight DP ranks with these fields of its load."""
    return SchedulerStats(
        labels=ParallelState(dp_rank=dp_rank, dp_size=8).metric_labels,
        load=LoadSnapshot(dp_rank=dp_rank, **load),
        publisher=publisher if publisher is not None else PublisherStats(),
    )


def make_full_stats(dp_rank: int = 0, **load: Any) -> SchedulerStats:
    """Return the statistics of a scheduler that has every optional part, so that every metric has a value."""
    parts = {
        "queues": QueueLoad(grammar=3),
        "disaggregation": DisaggregationLoad(kv_transfer_latency_ms=1.5),
        "lora": LoraLoad(1, 2, 0.5),
        "speculative": SpeculativeLoad(2.5, 0.5),
        "memory": MemoryLoad(1.0, 2.0, 3.0, 4),
        "decode_moments": DecodeMoments(),
    }
    absent = {
        name: get_args(hint)[0] for name, hint in get_type_hints(SchedulerStats).items() if isinstance(hint, UnionType)
    }
    others = {
        name: kind(
            **{field.name: 0 for field in msgspec.structs.fields(kind) if field.required or field.default is None}
        )
        for name, kind in absent.items()
        if kind is not LatencySnapshot
    }
    return msgspec.structs.replace(
        make_stats(dp_rank, **parts | load), latencies=RequestLatencyRecorder().stats(), **others
    )
