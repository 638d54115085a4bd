"""Convert a load snapshot to KvMetrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components.values import KvMetrics

if TYPE_CHECKING:
    from scheduler_components.values import LoadSnapshot

__all__ = ["kv_metrics_of_load"]


def kv_metrics_of_load(load: LoadSnapshot) -> KvMetrics:
    """Return a load snapshot in request slots and KV blocks.

    A partly used page counts as one active block. Tokens after the last whole page of the pool are no block, so the
    active blocks never exceed the total.
    """
    page_size = max(1, load.page_size)
    total_blocks = load.max_total_num_tokens // page_size
    return KvMetrics(
        request_active_slots=load.num_running_reqs,
        request_total_slots=load.max_running_requests,
        kv_active_blocks=min(total_blocks, -(-load.num_used_tokens // page_size)),
        kv_total_blocks=total_blocks,
        num_requests_waiting=load.num_waiting_reqs,
        gpu_cache_usage_perc=load.token_usage,
        gpu_prefix_cache_hit_rate=load.cache_hit_rate,
        data_parallel_rank=load.dp_rank,
    )
