"""LoadInquirer: one snapshot of how loaded this replica is."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_components.load import CountedQueue, count_request_tokens, is_valid_dispatcher_name
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import (
    LoadSectionsSource,
    NullLoadSectionsSource,
    NullRateSource,
    NullWorkSource,
    PoolSource,
    QueuedRequest,
    QueueSource,
    RateSource,
    WorkSource,
)
from scheduler_components.values import DecodeMoments, LoadSnapshot

__all__ = ["MAX_DISPATCHERS", "LoadInquirer", "WorkCounters"]


@dataclass(slots=True, kw_only=True)
class LoadInquirer:
    """Reads queues and pool when asked, and says what it found as one frozen value.

    O(1) when ``queues.waiting`` is a ``CountedQueue``, as ``TokenCountedQueue`` is; any other sequence is walked. What
    a source raises is raised on: ``MetricsEmitter`` and ``SchedulerKvEventsPublisher`` keep it out of the step.

    Attributes:
        parallel: whose load it is (``dp_rank`` of the snapshot is its ``kv_stream_index``).
        queues: running and waiting requests.
        pool: the KV token pool.
        rates: throughput and hit rate over the recent window.
        sections: disaggregation, LoRA, speculative, memory and special queues, where the engine has them.
        work: what was taken in and computed since the start, usually ``WorkCounters``.
        clock: wall-clock seconds since the epoch.
    """

    parallel: ParallelState
    queues: QueueSource
    pool: PoolSource
    rates: RateSource = field(default_factory=NullRateSource)
    sections: LoadSectionsSource = field(default_factory=NullLoadSectionsSource)
    work: WorkSource = field(default_factory=NullWorkSource)
    clock: Callable[[], float] = time.time
    _sequence: int = field(default=0, init=False, repr=False)
    _rank: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rank = self.parallel.kv_stream_index

    def get_loads(self) -> LoadSnapshot:
        """Return the load of this moment; each snapshot's ``sequence`` is one above the last.

        Disaggregation queues add their requests and tokens to the plain counts. On a decode instance no token is
        uncached: what waits there was prefilled elsewhere (as in SGLang 0.5.23).

        The watermarks are read first: a request that comes in between is counted by the load and not yet by them. Its
        dispatcher counts it twice for one report then, which is better than not at all.
        """
        queues, pool, rates, work = self.queues, self.pool, self.rates, self.work
        watermarks = work.dispatched_watermarks
        waiting = queues.waiting
        num_running, max_running = len(queues.running), queues.max_running_requests
        if isinstance(waiting, CountedQueue):
            num_waiting, pending_tokens, uncached_tokens = waiting.totals()
        else:
            num_waiting, pending_tokens, uncached_tokens = _walk(waiting)
        chunked_tokens = queues.num_chunked_tokens_left
        pending_tokens += chunked_tokens
        uncached_tokens += chunked_tokens
        sections = self.sections.load_sections()
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
        return LoadSnapshot(  # by place: 25 keywords would take longer than all the rest
            self._sequence,
            self.clock(),
            self._rank,
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
            sections.queues,
            disaggregation,
            sections.lora,
            sections.speculative,
            sections.memory,
            work.total_prefill_uncached_tokens,
            work.total_prefill_busy_us,
            work.decode_moments,
            watermarks,
        )


def _walk(queue: Sequence[QueuedRequest]) -> tuple[int, int, int]:
    """Return ``(requests, pending_tokens, uncached_tokens)`` of a queue that does not know them."""
    pending_tokens = uncached_tokens = 0
    for request in queue:
        pending, uncached = count_request_tokens(request)
        pending_tokens += pending
        uncached_tokens += uncached
    return len(queue), pending_tokens, uncached_tokens


# What a scheduler has taken in and worked off since it started, and load reports that say it.

MAX_DISPATCHERS = 64
"""Dispatchers that are remembered at a time; the one that has been silent longest makes room for a new one."""

_MAX_TICKET = 2**63 - 1


@dataclass(slots=True, kw_only=True)
class WorkCounters:
    """The kit's ``WorkSource``: the scheduler counts here as things happen.

    Attributes:
        total_prefill_uncached_tokens: tokens computed by prefill.
        total_prefill_busy_us: time of the steps that computed them.
        invalid_tickets: tickets that no dispatcher of this kit writes; each costs itself.
        decode_moments: sums over the steps that decoded; None before the first.
        dispatched_watermarks: the highest ticket taken in from each dispatcher, sorted by dispatcher.
    """

    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    invalid_tickets: int = 0
    decode_moments: DecodeMoments | None = field(default=None, init=False)
    dispatched_watermarks: tuple[tuple[str, int], ...] = field(default=(), init=False)
    _tickets: OrderedDict[str, int] = field(default_factory=OrderedDict, init=False, repr=False)

    def on_request_received(self, dispatcher: str, ticket: int) -> None:
        """Count a request when it enters the queue, or is refused: it is no longer on its way.

        Args:
            dispatcher: who sent it.
            ticket: the number that the dispatcher gave it. Tickets of one dispatcher rise in the order of sending.
        """
        if not is_valid_dispatcher_name(dispatcher) or not 0 <= ticket <= _MAX_TICKET:
            self.invalid_tickets += 1
            return
        tickets = self._tickets
        known = tickets.get(dispatcher)
        tickets[dispatcher] = highest = ticket if known is None or ticket > known else known
        tickets.move_to_end(dispatcher)
        if len(tickets) == 1:
            self.dispatched_watermarks = ((dispatcher, highest),)
        elif known is None:
            if len(tickets) > MAX_DISPATCHERS:
                tickets.popitem(last=False)
            self.dispatched_watermarks = tuple(sorted(tickets.items()))
        elif highest != known:  # a request alone pays: a load inquiry, of which there are several in a step, reads
            watermarks = self.dispatched_watermarks
            at = bisect_left(watermarks, (dispatcher, known))
            self.dispatched_watermarks = (*watermarks[:at], (dispatcher, highest), *watermarks[at + 1 :])

    def record_prefill(self, uncached_tokens: int, busy_s: float) -> None:
        """Count one step's prefill; what is negative counts as 0, for a clock may be set back."""
        self.total_prefill_uncached_tokens += max(0, uncached_tokens)
        self.total_prefill_busy_us += max(0, round(busy_s * 1e6))

    def record_decode(self, num_requests: int, busy_s: float, num_tokens: int) -> None:
        """Count one step that decoded and prefilled nothing; one without requests, or that took no time, is left out.

        Args:
            num_requests: in the batch.
            busy_s: how long the step took.
            num_tokens: generated by it.
        """
        time_us = round(busy_s * 1e6)
        if num_requests > 0 and time_us > 0:
            was = self.decode_moments or _NO_MOMENTS
            self.decode_moments = DecodeMoments(
                was.steps + 1,
                was.requests + num_requests,
                was.time_us + time_us,
                was.requests_squared + num_requests * num_requests,
                was.requests_time_us + num_requests * time_us,
                was.tokens + num_tokens,
            )


_NO_MOMENTS = DecodeMoments()
