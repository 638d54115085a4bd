"""Load reports of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components.values import LoadSnapshot

from .ambient import get_clock, get_parallel, get_settings

if TYPE_CHECKING:
    from .scheduler import Scheduler


class LoadMixin:
    """Uses ``cache``, ``rates``, ``running``, ``waiting`` and ``num_chunked_tokens_left``."""

    def init_load(self: Scheduler) -> None:
        self.load_sequence = 0

    def get_load(self: Scheduler) -> LoadSnapshot:
        chunked_tokens = self.num_chunked_tokens_left
        pending_tokens = sum(request.num_input_tokens for request in self.waiting)
        cached_tokens = sum(request.num_cached_tokens for request in self.waiting)
        used_tokens, capacity_tokens = self.cache.used_tokens, self.cache.capacity_tokens
        max_running = get_settings().max_running_requests
        self.load_sequence += 1
        return LoadSnapshot(
            sequence=self.load_sequence,
            timestamp=get_clock()(),
            dp_rank=get_parallel().kv_stream_index,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_pending_tokens=pending_tokens + chunked_tokens,
            num_waiting_uncached_tokens=pending_tokens - cached_tokens + chunked_tokens,
            num_used_tokens=used_tokens,
            num_total_tokens=used_tokens + pending_tokens + chunked_tokens,
            max_total_num_tokens=capacity_tokens,
            page_size=self.cache.page_size,
            max_running_requests=max_running,
            token_usage=used_tokens / capacity_tokens,
            gen_throughput=self.rates.gen_throughput,
            cache_hit_rate=self.rates.cache_hit_rate,
            utilization=max(used_tokens / capacity_tokens, len(self.running) / max_running),
        )
