"""RequestLatencies: the times of all requests of a scheduler, in histograms.

Bounds are those of SGLang (0.5.23), so that histograms of a mixed fleet can be added.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from scheduler_components.metrics.histogram import Histogram, HistogramSnapshot
from scheduler_components.metrics.request_times import RequestPhase, RequestTimeStats

__all__ = ["LatencyTotals", "LatencyHistograms", "RequestLatencies"]

_FIRST_TOKEN_BOUNDS_S = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400,
)  # fmt: skip
_E2E_BOUNDS_S = (*_FIRST_TOKEN_BOUNDS_S, 600, 1200, 1800, 2400)
_TOKEN_BOUNDS_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8,
    1, 2, 4, 6, 8,
)  # fmt: skip
_QUEUE_BOUNDS_S = (
    0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300,
    400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000,
)  # fmt: skip


class LatencyTotals(msgspec.Struct, frozen=True, gc=False):
    """The histograms of one scheduler at one moment, seconds. The counts only grow.

    Attributes:
        time_to_first_token: from the first queueing, one value a request.
        inter_token: between tokens, one value a token; tokens that come together share their interval evenly.
        e2e: from the first queueing to the end, one value a request that ended, aborts too.
        queue: in the queue before the first prefill, one value a request. Waits after retractions are not in it, as
            in SGLang: they would look like arrivals that waited.
        prefill, decode: over all stays in these phases, one value a request that ended.
    """

    time_to_first_token: HistogramSnapshot
    inter_token: HistogramSnapshot
    e2e: HistogramSnapshot
    queue: HistogramSnapshot
    prefill: HistogramSnapshot
    decode: HistogramSnapshot


@dataclass(slots=True, kw_only=True)
class LatencyHistograms:
    """One histogram each; the bounds are SGLang's unless others are given."""

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_BOUNDS_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_BOUNDS_S))
    e2e: Histogram = field(default_factory=lambda: Histogram(_E2E_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(_QUEUE_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(_E2E_BOUNDS_S))
    decode: Histogram = field(default_factory=lambda: Histogram(_E2E_BOUNDS_S))


@dataclass(slots=True, kw_only=True)
class RequestLatencies:
    """Follows requests and books what their times say; the scheduler keeps each request's ``RequestTimeStats``.

    Each call costs one look at the clock and at most one addition in a histogram, except the last of a request.

    Attributes:
        histograms: where values are counted.
        clock: seconds from any origin.
    """

    histograms: LatencyHistograms = field(default_factory=LatencyHistograms)
    clock: Callable[[], float] = time.monotonic

    def queued(self) -> RequestTimeStats:
        """Begin a request's times: it enters the queue."""
        return RequestTimeStats(self.clock())

    def admitted(self, times: RequestTimeStats) -> None:
        """The request leaves the queue for prefill."""
        is_first = times.first_queue_s is None
        times.move_to(RequestPhase.PREFILL, self.clock())
        self._book_queue(times, is_first)

    def retracted(self, times: RequestTimeStats) -> None:
        """The request goes back to the queue."""
        times.move_to(RequestPhase.QUEUE, self.clock())

    def took_tokens(self, times: RequestTimeStats, num_tokens: int) -> None:
        """The request got ``num_tokens`` new tokens in one step; with speculation there are several."""
        if num_tokens < 1 or times.phase is RequestPhase.ENDED:
            return
        is_first = times.first_queue_s is None
        interval_s = times.took_token(self.clock())
        self._book_queue(times, is_first)
        if interval_s is not None:
            self.histograms.inter_token.observe(interval_s / num_tokens, num_tokens)
        elif times.first_token_s is not None:
            self.histograms.time_to_first_token.observe(times.first_token_s)

    def _book_queue(self, times: RequestTimeStats, is_first: bool) -> None:
        if is_first and times.first_queue_s is not None:
            self.histograms.queue.observe(times.first_queue_s)

    def ended(self, times: RequestTimeStats) -> None:
        """The request is over: finished, aborted or failed. A second end is not counted."""
        if times.phase is RequestPhase.ENDED:
            return
        times.move_to(RequestPhase.ENDED, self.clock())
        histograms = self.histograms
        histograms.e2e.observe(times.e2e_s)
        histograms.prefill.observe(times.prefill_s)
        histograms.decode.observe(times.decode_s)

    def totals(self) -> LatencyTotals:
        """Return the histograms of this moment. Copies only those that have changed since the last call."""
        histograms = self.histograms
        return LatencyTotals(
            histograms.time_to_first_token.snapshot(),
            histograms.inter_token.snapshot(),
            histograms.e2e.snapshot(),
            histograms.queue.snapshot(),
            histograms.prefill.snapshot(),
            histograms.decode.snapshot(),
        )
