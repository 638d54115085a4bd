"""Histograms, rates over a recent window, and queue, prefill and decode times of requests. Memory is constant."""

from __future__ import annotations

import enum
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from scheduler_components._internal.validators import check_integer, check_number
from scheduler_components.errors import ConfigError
from scheduler_components.values import HistogramSnapshot, LatencySnapshot

__all__ = [
    "Histogram",
    "RateMeter",
    "RollingSums",
    "RequestPhase",
    "RequestTimeStats",
    "LatencyHistograms",
    "RequestLatencyRecorder",
]


class Histogram:
    """Counts values in fixed buckets.

    Raises:
        ConfigError: there are no bounds, they do not increase, or one is not finite.
    """

    __slots__ = ("_bounds", "_counts", "_snapshot", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        rising = all(low < high for low, high in pairwise(bounds))
        if not bounds or not rising or not all(map(math.isfinite, bounds)):
            raise ConfigError(
                "bounds", tuple(bounds), "are not rising numbers", "give at least one, each above the last"
            )
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._snapshot: HistogramSnapshot | None = None

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times. A negative value counts as 0. Infinite values and NaN are ignored."""
        if times > 0 and -math.inf < value < math.inf:
            if value < 0.0:
                value = 0.0
            self._counts[bisect_left(self._bounds, value)] += times
            self._total += value * times
            self._snapshot = None

    def snapshot(self) -> HistogramSnapshot:
        """Return the counts; the same object as last time if no value was observed since."""
        if self._snapshot is None:
            self._snapshot = HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
        return self._snapshot

    def __repr__(self) -> str:
        return f"<Histogram: {sum(self._counts)} values in {len(self._counts)} buckets>"


_GENERATED, _INPUT, _CACHED, _PREEMPTED = range(4)


class RollingSums:
    """Sums of ``num_sums`` counters over the last ``window_s``, in ``num_buckets`` time buckets.

    ``advance`` provides the time. A clock that is set back counts as no time passed, so it neither freezes nor empties
    the window.

    Raises:
        ConfigError: the window is not positive, or there is no bucket.
    """

    __slots__ = ("sums", "_bucket_end_s", "_bucket_s", "_buckets", "_index", "_last_now", "_start_s", "_window_start_s")

    def __init__(self, *, num_sums: int, window_s: float, num_buckets: int, now: float) -> None:
        check_number("window_s", window_s)
        check_integer("num_buckets", num_buckets)
        self.sums = [0] * num_sums
        self._buckets = [[0] * num_sums for _ in range(num_buckets)]
        self._bucket_s = window_s / num_buckets
        self._index = 0  # of the current bucket since the start; modulo the number of buckets, its position in the ring
        # Times of the clock; they move back with it.
        self._start_s = self._window_start_s = self._last_now = now
        self._bucket_end_s = now + self._bucket_s

    def advance(self, now: float) -> list[int]:
        """Move to ``now``, subtract the buckets that leave the window, and return the sums."""
        if self._last_now <= now < self._bucket_end_s:  # the common case
            self._last_now = now
            return self.sums
        if now < self._last_now:
            self._set_back(self._last_now - now)
        self._last_now = now
        if now >= self._bucket_end_s:
            self._expire(int((now - self._start_s) / self._bucket_s))
        return self.sums

    def _set_back(self, by_s: float) -> None:
        self._start_s -= by_s
        self._window_start_s -= by_s
        self._bucket_end_s -= by_s

    def _expire(self, index: int) -> None:
        ring = len(self._buckets)
        for step in range(1, min(index - self._index, ring) + 1):
            bucket = self._buckets[(self._index + step) % ring]
            for column, amount in enumerate(bucket):
                self.sums[column] -= amount
                bucket[column] = 0
        self._index = index
        self._bucket_end_s = self._start_s + (index + 1) * self._bucket_s
        self._window_start_s = self._start_s + max(0, index + 1 - ring) * self._bucket_s

    def add(self, column: int, amount: int) -> None:
        """Add ``amount`` to the current bucket; a negative amount counts as 0."""
        if amount > 0:
            self._buckets[self._index % len(self._buckets)][column] += amount
            self.sums[column] += amount

    @property
    def span_s(self) -> float:
        """Seconds that the sums cover: the window without the rest of the current bucket, at least one bucket."""
        covered_s = self._last_now - self._window_start_s
        return covered_s if covered_s > self._bucket_s else self._bucket_s


@dataclass(slots=True, kw_only=True)
class RateMeter:
    """Generation throughput, cache hit rate and preemptions over a rolling window: the kit's ``RateSource``.

    Tokens are summed in time buckets, so a rate changes in steps of one bucket, and becomes 0 one window after the last
    token. Directly after the start the window is as long as the age of the meter.

    Attributes:
        window_s: length of the window.
        num_buckets: resolution of the window.
        clock: seconds from any origin.

    Raises:
        ConfigError: the window or the number of buckets is not positive.
    """

    window_s: float = 10.0
    num_buckets: int = 20
    clock: Callable[[], float] = time.monotonic
    _window: RollingSums = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._window = RollingSums(num_sums=4, window_s=self.window_s, num_buckets=self.num_buckets, now=self.clock())

    def observe_prefill(self, input_tokens: int, cached_tokens: int) -> None:
        """Count a request that entered prefill: its input tokens, and the part in a cached prefix."""
        window = self._window
        window.advance(self.clock())
        window.add(_INPUT, input_tokens)
        window.add(_CACHED, min(cached_tokens, input_tokens))

    def observe_decode(self, tokens: int) -> None:
        """Count the tokens that a step generated over all requests."""
        window = self._window
        window.advance(self.clock())
        window.add(_GENERATED, tokens)

    def observe_preemption(self) -> None:
        """Count a request that lost its pages to other requests."""
        window = self._window
        window.advance(self.clock())
        window.add(_PREEMPTED, 1)

    @property
    def gen_throughput(self) -> float:
        """Generated tokens per second over the window."""
        window = self._window
        generated = window.advance(self.clock())[_GENERATED]
        return generated / window.span_s if generated else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Cached / input tokens over the window, 0 to 1; 0 without any prefill."""
        sums = self._window.advance(self.clock())
        input_tokens = sums[_INPUT]
        return sums[_CACHED] / input_tokens if input_tokens else 0.0

    @property
    def preemptions_per_s(self) -> float:
        """Preemptions per second over the window."""
        window = self._window
        preempted = window.advance(self.clock())[_PREEMPTED]
        return preempted / window.span_s if preempted else 0.0


class RequestPhase(enum.IntEnum):
    """The phase of a request. A retraction leads from PREFILL or DECODE back to QUEUE."""

    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    FINISHED = 3


_DECODE = int(RequestPhase.DECODE)  # a list index by int takes half the time of one by IntEnum


class RequestTimeStats:
    """The times of one request.

    Every moment from the first queueing to the end belongs to exactly one phase, so queue, prefill and decode times
    add up to the end-to-end time. The time of a phase that is entered again after a retraction continues. A clock that
    is set back counts as no time passed, so no time is negative.

    Attributes:
        phase: current phase.
        times_s: seconds spent in QUEUE, PREFILL and DECODE.
        first_queue_s: seconds in the queue before the first prefill; None before it.
        first_token_s: seconds from the first queueing to the first token; None before it.
        num_retractions: number of returns to the queue.
    """

    __slots__ = (
        "phase", "times_s", "first_queue_s", "first_token_s", "num_retractions", "_now", "_since_token_s",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.phase = RequestPhase.QUEUE
        self.times_s = [0.0, 0.0, 0.0]
        self.first_queue_s: float | None = None
        self.first_token_s: float | None = None
        self.num_retractions = 0
        self._now = now
        self._since_token_s = 0.0  # since the first queueing, before the first token

    @property
    def e2e_s(self) -> float:
        """Seconds from the first queueing to the last update."""
        return sum(self.times_s)

    @property
    def queue_s(self) -> float:
        """Seconds in the queue, including after retractions."""
        return self.times_s[RequestPhase.QUEUE]

    @property
    def prefill_s(self) -> float:
        """Seconds in prefill, including tokens that a retraction discarded."""
        return self.times_s[RequestPhase.PREFILL]

    @property
    def decode_s(self) -> float:
        """Seconds in decode."""
        return self.times_s[RequestPhase.DECODE]

    def advance(self, now: float) -> None:
        """Add the time up to ``now`` to the current phase, unless the request has finished."""
        if self.phase is not RequestPhase.FINISHED:
            if now > self._now:
                passed_s = now - self._now
                self.times_s[self.phase] += passed_s
                self._since_token_s += passed_s
            self._now = now

    def move_to(self, phase: RequestPhase, now: float) -> None:
        """Enter ``phase``. Entering the current phase, or any phase after FINISHED, changes nothing."""
        self.advance(now)
        if self.phase is RequestPhase.FINISHED or phase is self.phase:
            return
        if phase is RequestPhase.QUEUE:
            self.num_retractions += 1
        elif phase is not RequestPhase.FINISHED and self.first_queue_s is None:
            self.first_queue_s = self.queue_s
        self.phase = phase

    def on_token(self, now: float) -> float | None:
        """Record new tokens; return the seconds since the previous ones, None for the first ones.

        The request is in DECODE afterwards. The wait after a retraction is part of the interval, as it is for the
        client.
        """
        self.move_to(RequestPhase.DECODE, now)
        interval_s, self._since_token_s = self._since_token_s, 0.0
        if self.first_token_s is None:
            self.first_token_s = self.e2e_s
            return None
        return interval_s

    def add_decode_interval(self, now: float) -> float | None:
        """Do the same as ``on_token``, faster, for a request without an update since its last token.

        Return None and change nothing for any other request.
        """
        if self._since_token_s or self.first_token_s is None or self.phase is not RequestPhase.DECODE:
            return None
        passed_s = now - self._now
        self._now = now
        if passed_s <= 0.0:
            return 0.0
        self.times_s[_DECODE] += passed_s
        return passed_s

    def __repr__(self) -> str:
        queue_s, prefill_s, decode_s = self.times_s
        return (
            f"<RequestTimeStats {self.phase.name.lower()}: queue={queue_s:.3f}s prefill={prefill_s:.3f}s "
            f"decode={decode_s:.3f}s retractions={self.num_retractions}>"
        )


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


@dataclass(slots=True, kw_only=True)
class LatencyHistograms:
    """The histograms of one scheduler. The default bounds are SGLang's."""

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_BOUNDS_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_BOUNDS_S))
    e2e: Histogram = field(default_factory=lambda: Histogram(_E2E_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(_QUEUE_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(_E2E_BOUNDS_S))
    decode: Histogram = field(default_factory=lambda: Histogram(_E2E_BOUNDS_S))


@dataclass(slots=True, kw_only=True)
class RequestLatencyRecorder:
    """Records the times of requests in histograms. The scheduler keeps each request's ``RequestTimeStats``.

    Each call reads the clock once and observes at most one value, except the last call of a request.
    ``on_batch_tokens`` records a whole step with mostly one observation, because requests that decode together have the
    same interval between tokens.

    Attributes:
        histograms: count the values.
        clock: seconds from any origin.
    """

    histograms: LatencyHistograms = field(default_factory=LatencyHistograms)
    clock: Callable[[], float] = time.monotonic

    def on_queued(self) -> RequestTimeStats:
        """Return the times of a new request, which enters the queue."""
        return RequestTimeStats(self.clock())

    def on_admitted(self, times: RequestTimeStats) -> None:
        """Record that the request leaves the queue for prefill."""
        is_first = times.first_queue_s is None
        times.move_to(RequestPhase.PREFILL, self.clock())
        self._record_queue_time(times, is_first)

    def on_retracted(self, times: RequestTimeStats) -> None:
        """Record that the request returns to the queue."""
        times.move_to(RequestPhase.QUEUE, self.clock())

    def on_tokens(self, times: RequestTimeStats, num_tokens: int) -> None:
        """Record ``num_tokens`` new tokens of one step; speculation yields several."""
        self._on_tokens(times, num_tokens, self.clock())

    def on_batch_tokens(self, times: Sequence[RequestTimeStats], num_tokens: Sequence[int]) -> None:
        """Record the new tokens of all requests of one step, as ``on_tokens`` for each."""
        now = self.clock()
        observe = self.histograms.inter_token.observe
        same_s, num_same = 0.0, 0  # consecutive requests with one token after the same interval
        for each, num in zip(times, num_tokens, strict=True):
            passed_s = each.add_decode_interval(now) if num == 1 else None
            if passed_s is None:
                self._on_tokens(each, num, now)
            elif passed_s == same_s:
                num_same += 1
            else:
                observe(same_s, num_same)
                same_s, num_same = passed_s, 1
        observe(same_s, num_same)

    def _on_tokens(self, times: RequestTimeStats, num_tokens: int, now: float) -> None:
        if num_tokens < 1 or times.phase is RequestPhase.FINISHED:
            return
        is_first = times.first_queue_s is None
        interval_s = times.on_token(now)
        self._record_queue_time(times, is_first)
        if interval_s is not None:
            self.histograms.inter_token.observe(interval_s / num_tokens, num_tokens)
        elif times.first_token_s is not None:
            self.histograms.time_to_first_token.observe(times.first_token_s)

    def _record_queue_time(self, times: RequestTimeStats, is_first: bool) -> None:
        if is_first and times.first_queue_s is not None:
            self.histograms.queue.observe(times.first_queue_s)

    def on_finished(self, times: RequestTimeStats) -> None:
        """Record the end of a request: finished, aborted or failed. Further calls are ignored."""
        if times.phase is RequestPhase.FINISHED:
            return
        times.move_to(RequestPhase.FINISHED, self.clock())
        histograms = self.histograms
        histograms.e2e.observe(times.e2e_s)
        histograms.prefill.observe(times.prefill_s)
        histograms.decode.observe(times.decode_s)

    def stats(self) -> LatencySnapshot:
        """Return the histograms of this moment. Copies only those that changed since the last call."""
        return LatencySnapshot(
            *[getattr(self.histograms, name).snapshot() for name in LatencySnapshot.__struct_fields__]
        )
