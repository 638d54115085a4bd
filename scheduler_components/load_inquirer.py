"""LoadInquirer: one snapshot of how loaded this replica is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_components.load.counting import count_request
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.load.token_counted_queue import TokenCountedQueue
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import LoadPartsSource, PoolSource, QueuedRequest, QueueSource, RateSource

__all__ = ["NO_PARTS", "NO_RATES", "LoadInquirer"]


class _NoRates:
    """The rates of a scheduler that keeps none."""

    gen_throughput = 0.0
    cache_hit_rate = 0.0


class _NoParts:
    """The optional parts of an engine that has none of them."""

    def queue_load(self) -> None:
        return None

    def disaggregation_load(self) -> None:
        return None

    def lora_load(self) -> None:
        return None

    def speculative_load(self) -> None:
        return None

    def memory_load(self) -> None:
        return None


NO_RATES: RateSource = _NoRates()
NO_PARTS: LoadPartsSource = _NoParts()


@dataclass(slots=True, kw_only=True)
class LoadInquirer:
    """Reads queues and pool when asked, and says what it found as one frozen value.

    O(1) when ``queues.waiting`` is a ``TokenCountedQueue``; any other sequence is walked. What a source raises is
    raised on: ``MetricsEmitter`` and ``SchedulerKvEventsPublisher`` keep it out of the scheduler's step.

    Attributes:
        parallel: whose load it is (``dp_rank`` of the snapshot is its ``kv_stream_index``).
        queues: running and waiting requests.
        pool: the KV token pool.
        rates: throughput and hit rate over the recent window.
        parts: disaggregation, LoRA, speculative, memory and special queues, where the engine has them.
        clock: wall-clock seconds since the epoch.
    """

    parallel: ParallelState
    queues: QueueSource
    pool: PoolSource
    rates: RateSource = NO_RATES
    parts: LoadPartsSource = NO_PARTS
    clock: Callable[[], float] = time.time
    _sequence: int = field(default=0, init=False, repr=False)

    def get_loads(self) -> LoadSnapshot:
        """Return the load of this moment; each snapshot's ``sequence`` is one above the last.

        Disaggregation queues add their requests and tokens to the plain counts. On a decode instance no token is
        uncached: what waits there was prefilled elsewhere (as in SGLang 0.5.23).
        """
        queues, pool, rates = self.queues, self.pool, self.rates
        waiting = queues.waiting
        num_running, max_running = len(queues.running), queues.max_running_requests
        if isinstance(waiting, TokenCountedQueue):
            num_waiting, pending_tokens, uncached_tokens = waiting.totals()
        else:
            num_waiting, pending_tokens, uncached_tokens = _walk(waiting)
        chunked_tokens = queues.num_chunked_tokens_left
        pending_tokens += chunked_tokens
        uncached_tokens += chunked_tokens
        special_queues = disaggregation = lora = speculative = memory = None
        if self.parts is not NO_PARTS:
            parts = self.parts
            special_queues, disaggregation = parts.queue_load(), parts.disaggregation_load()
            lora, speculative, memory = parts.lora_load(), parts.speculative_load(), parts.memory_load()
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
        return LoadSnapshot(  # by place: 21 keywords would take longer than all the rest
            self._sequence,
            self.clock(),
            self.parallel.kv_stream_index,
            num_running,
            num_waiting,
            pending_tokens,
            uncached_tokens,
            used_tokens,
            used_tokens + pending_tokens,
            capacity_tokens,
            pool.page_size,
            max_running,
            token_usage,
            rates.gen_throughput,
            rates.cache_hit_rate,
            token_usage if token_usage > slot_usage else slot_usage,  # max() costs a tenth of all
            special_queues,
            disaggregation,
            lora,
            speculative,
            memory,
        )


def _walk(queue: Sequence[QueuedRequest]) -> tuple[int, int, int]:
    """Return ``(requests, pending_tokens, uncached_tokens)`` of a queue that does not know them."""
    pending_tokens = uncached_tokens = 0
    for request in queue:
        pending, uncached = count_request(request)
        pending_tokens += pending
        uncached_tokens += uncached
    return len(queue), pending_tokens, uncached_tokens
