"""WorkCounters: what a scheduler has received and computed since its start, for load reports."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

from scheduler_components.load.token_counted_queue import is_valid_dispatcher_name
from scheduler_components.values import DecodeMoments

__all__ = ["MAX_DISPATCHERS", "WorkCounters"]

MAX_DISPATCHERS = 64
"""Dispatchers to remember; a new one replaces the one whose last request is oldest."""

_MAX_TICKET = 2**63 - 1


@dataclass(slots=True, kw_only=True)
class WorkCounters:
    """Counters of received requests and finished work, which the scheduler increments and load reports include.

    Attributes:
        total_prefill_uncached_tokens: tokens computed by prefill.
        total_prefill_busy_us: time of the steps that computed them.
        invalid_tickets: ignored tickets, which no dispatcher of this kit issues.
        decode_moments: sums over the steps that decoded; None before the first.
        dispatched_watermarks: the highest ticket received from each dispatcher, sorted by dispatcher.
    """

    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    invalid_tickets: int = 0
    decode_moments: DecodeMoments | None = field(default=None, init=False)
    dispatched_watermarks: tuple[tuple[str, int], ...] = field(default=(), init=False)
    _tickets: OrderedDict[str, int] = field(default_factory=OrderedDict, init=False, repr=False)

    def on_request_received(self, dispatcher: str, ticket: int) -> None:
        """Count a request that enters the queue or is refused, and so is no longer in transit.

        Args:
            dispatcher: name of the sender.
            ticket: number of the request at the dispatcher. Tickets of one dispatcher increase in order of sending.
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
        elif highest != known:  # sorted per request and not per load inquiry, of which a step has several
            watermarks = self.dispatched_watermarks
            at = bisect_left(watermarks, (dispatcher, known))
            self.dispatched_watermarks = (*watermarks[:at], (dispatcher, highest), *watermarks[at + 1 :])

    def record_prefill(self, uncached_tokens: int, busy_s: float) -> None:
        """Count the prefill of one step. Negative values count as 0, because a clock may be set back."""
        self.total_prefill_uncached_tokens += max(0, uncached_tokens)
        self.total_prefill_busy_us += max(0, round(busy_s * 1e6))

    def record_decode(self, num_requests: int, busy_s: float, num_tokens: int) -> None:
        """Count one step that only decoded. A step without requests, or that took no time, does not count.

        Args:
            num_requests: size of the batch.
            busy_s: duration of the step.
            num_tokens: tokens that it generated.
        """
        time_us = round(busy_s * 1e6)
        if num_requests > 0 and time_us > 0:
            self.record_decodes(1, num_requests, time_us, num_tokens)

    def record_decodes(self, num_steps: int, num_requests: int, time_us: int, num_tokens: int) -> None:
        """Count steps that only decoded, all with the same requests.

        Args:
            num_steps: number of steps. Each of them took time.
            num_requests: size of each batch.
            time_us: duration of all steps, the sum of whole microseconds per step.
            num_tokens: tokens that all steps generated.
        """
        last = self.decode_moments or _NO_MOMENTS
        self.decode_moments = DecodeMoments(
            last.steps + num_steps,
            last.requests + num_steps * num_requests,
            last.time_us + time_us,
            last.requests_squared + num_steps * num_requests * num_requests,
            last.requests_time_us + num_requests * time_us,
            last.tokens + num_tokens,
        )


_NO_MOMENTS = DecodeMoments()
