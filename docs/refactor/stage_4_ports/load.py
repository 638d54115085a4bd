"""Load reports of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import PoolSource, QueueSource, RateSource


@dataclass(slots=True, kw_only=True)
class Load:
    """Reads queues and pool when asked."""

    parallel: ParallelState
    clock: Callable[[], float]
    queues: QueueSource
    pool: PoolSource
    rates: RateSource
    load_sequence: int = field(default=0, init=False)

    def get_loads(self) -> LoadSnapshot:
        running, waiting = self.queues.running, self.queues.waiting
        chunked_tokens = self.queues.num_chunked_tokens_left
        pending_tokens = sum(request.num_input_tokens for request in waiting)
        cached_tokens = sum(request.num_cached_tokens for request in waiting)
        used_tokens, capacity_tokens = self.pool.used_tokens, self.pool.capacity_tokens
        max_running = self.queues.max_running_requests
        self.load_sequence += 1
        return LoadSnapshot(
            sequence=self.load_sequence,
            timestamp=self.clock(),
            dp_rank=self.parallel.kv_stream_index,
            num_running_reqs=len(running),
            num_waiting_reqs=len(waiting),
            num_pending_tokens=pending_tokens + chunked_tokens,
            num_waiting_uncached_tokens=pending_tokens - cached_tokens + chunked_tokens,
            num_used_tokens=used_tokens,
            num_total_tokens=used_tokens + pending_tokens + chunked_tokens,
            max_total_num_tokens=capacity_tokens,
            page_size=self.pool.page_size,
            max_running_requests=max_running,
            token_usage=used_tokens / capacity_tokens,
            gen_throughput=self.rates.gen_throughput,
            cache_hit_rate=self.rates.cache_hit_rate,
            utilization=max(used_tokens / capacity_tokens, len(running) / max_running),
        )
