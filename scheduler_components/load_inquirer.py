"""LoadInquirer: read how busy this replica is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_components.load import CountedQueue
from scheduler_components.load.token_counted_queue import count_request_tokens
from scheduler_components.load.work_counters import WorkCounters
from scheduler_components.parallel_state import ParallelState
from scheduler_components.values import LoadSections, LoadSnapshot

if TYPE_CHECKING:
    from scheduler_components.ports import PoolSource, QueuedRequest, QueueSource, RateSource

__all__ = ["LoadInquirer"]


@dataclass(slots=True, kw_only=True)
class LoadInquirer:
    """Reads queues and pool on request and returns one frozen value.

    O(1) if ``queues.waiting`` is a ``CountedQueue`` such as ``TokenCountedQueue``; it iterates over any other sequence.
    An exception of a source propagates: ``MetricsEmitter`` and ``SchedulerKvEventsPublisher`` keep it out of the step.

    Attributes:
        parallel: rank of the load (``dp_rank`` of the snapshot is its ``kv_stream_index``).
        queues: running and waiting requests.
        pool: the KV token pool.
        rates: throughput and hit rate over the recent window; None reports 0.
        sections: returns disaggregation, LoRA, speculative decoding, memory and special queues, where the engine has
            them.
        work: requests received and work done since the start.
        clock: wall-clock seconds since the epoch.
    """

    parallel: ParallelState
    queues: QueueSource
    pool: PoolSource
    rates: RateSource | None = None
    sections: Callable[[], LoadSections] = LoadSections
    work: WorkCounters = field(default_factory=WorkCounters)
    clock: Callable[[], float] = time.time
    _sequence: int = field(default=0, init=False, repr=False)
    _rank: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rank = self.parallel.kv_stream_index

    def get_loads(self) -> LoadSnapshot:
        """Return the load of this moment; the ``sequence`` of each snapshot is one above the last.

        Disaggregation queues add their requests and tokens to the plain counts. On a decode instance no token is
        uncached, because another instance has prefilled the waiting requests (as in SGLang 0.5.23).

        The watermarks are read first. If a request arrives in between, the load includes it and the watermarks do not:
        its dispatcher counts it twice until the next report, which is better than not at all.
        """
        queues, pool, rates, work = self.queues, self.pool, self.rates, self.work
        watermarks = work.dispatched_watermarks
        waiting = queues.waiting
        num_running, max_running = len(queues.running), queues.max_running_requests
        if isinstance(waiting, CountedQueue):
            num_waiting, pending_tokens, uncached_tokens = waiting.totals()
        else:
            num_waiting, pending_tokens, uncached_tokens = _count_queue(waiting)
        chunked_tokens = queues.num_chunked_tokens_left
        pending_tokens += chunked_tokens
        uncached_tokens += chunked_tokens
        sections = self.sections()
        disaggregation = sections.disaggregation
        if disaggregation is not None:
            num_waiting += disaggregation.waiting_reqs
            pending_tokens += disaggregation.pending_tokens
            uncached_tokens += disaggregation.pending_tokens
            if disaggregation.mode == "decode":
                uncached_tokens = 0
        used_tokens, capacity_tokens = pool.used_tokens, pool.capacity_tokens
        token_usage = used_tokens / capacity_tokens if capacity_tokens > 0 else 0.0
        slot_usage = num_running / max_running if max_running > 0 else 0.0
        self._sequence += 1
        return LoadSnapshot(  # positional, which the row "get_loads(), 64 running" shows
            num_running,
            num_waiting,
            token_usage,
            0.0 if rates is None else rates.gen_throughput,
            0.0 if rates is None else rates.cache_hit_rate,
            token_usage if token_usage > slot_usage else slot_usage,
            used_tokens,
            pending_tokens,
            uncached_tokens,
            used_tokens + pending_tokens,
            capacity_tokens,
            pool.page_size,
            max_running,
            self._sequence,
            work.total_prefill_uncached_tokens,
            work.total_prefill_busy_us,
            self.clock(),
            self._rank,
            sections.queues,
            disaggregation,
            sections.lora,
            sections.speculative,
            sections.memory,
            work.decode_moments,
            watermarks,
        )


def _count_queue(queue: Sequence[QueuedRequest]) -> tuple[int, int, int]:
    """Count ``(requests, pending_tokens, uncached_tokens)`` of a queue that does not keep totals."""
    pending_tokens = uncached_tokens = 0
    for request in queue:
        pending, uncached = count_request_tokens(request)
        pending_tokens += pending
        uncached_tokens += uncached
    return len(queue), pending_tokens, uncached_tokens
