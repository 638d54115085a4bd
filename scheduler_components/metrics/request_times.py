"""How long one request was where: times that only grow, whatever happens to the request or to the clock."""

from __future__ import annotations

import enum

__all__ = ["RequestPhase", "RequestTimeStats"]


class RequestPhase(enum.IntEnum):
    """Where a request spends its time. A retraction leads from PREFILL or DECODE back to QUEUE."""

    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    ENDED = 3


class RequestTimeStats:
    """The times of one request, fed by whoever moves it.

    Every moment from the first queueing to the end belongs to exactly one phase, so queue, prefill and decode times
    add up to the end-to-end time. A phase that is entered again, after a retraction, goes on where it stopped. A
    moment before the last one counts as no time passed: with a clock that is set back no time is negative.

    Attributes:
        phase: where the request is.
        times_s: seconds spent in QUEUE, PREFILL and DECODE.
        first_queue_s: seconds in the queue before the first prefill; None before it.
        first_token_s: seconds from the first queueing to the first token; None before it.
        num_retractions: how often it went back to the queue.
    """

    __slots__ = (
        "phase", "times_s", "first_queue_s", "first_token_s", "num_retractions", "_last_token_s", "_now",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.phase = RequestPhase.QUEUE
        self.times_s = [0.0, 0.0, 0.0]
        self.first_queue_s: float | None = None
        self.first_token_s: float | None = None
        self.num_retractions = 0
        self._last_token_s = 0.0
        self._now = now

    @property
    def e2e_s(self) -> float:
        """Seconds from the first queueing to the last moment that was told."""
        return sum(self.times_s)

    @property
    def queue_s(self) -> float:
        """Seconds in the queue, after retractions too."""
        return self.times_s[RequestPhase.QUEUE]

    @property
    def prefill_s(self) -> float:
        """Seconds in prefill, that of tokens computed before a retraction too."""
        return self.times_s[RequestPhase.PREFILL]

    @property
    def decode_s(self) -> float:
        """Seconds in decode."""
        return self.times_s[RequestPhase.DECODE]

    def advance(self, now: float) -> None:
        """Give the time up to ``now`` to the present phase; an ended request takes none."""
        if self.phase is not RequestPhase.ENDED:
            if now > self._now:
                self.times_s[self.phase] += now - self._now
            self._now = now

    def move_to(self, phase: RequestPhase, now: float) -> None:
        """Enter ``phase``. Entering the present one again changes nothing; an ended request stays ended."""
        self.advance(now)
        if self.phase is RequestPhase.ENDED or phase is self.phase:
            return
        if phase is RequestPhase.QUEUE:
            self.num_retractions += 1
        elif phase is not RequestPhase.ENDED and self.first_queue_s is None:
            self.first_queue_s = self.queue_s
        self.phase = phase

    def took_token(self, now: float) -> float | None:
        """Note that tokens came now; returns the seconds since those before them, None for the first ones.

        A request with tokens is in DECODE from here on. The wait after a retraction is part of the interval: to
        the client it is one.
        """
        self.move_to(RequestPhase.DECODE, now)
        elapsed_s = self.e2e_s
        interval_s = None if self.first_token_s is None else max(0.0, elapsed_s - self._last_token_s)
        if self.first_token_s is None:
            self.first_token_s = elapsed_s
        self._last_token_s = elapsed_s
        return interval_s

    def __repr__(self) -> str:
        queue_s, prefill_s, decode_s = self.times_s
        return (
            f"<RequestTimeStats {self.phase.name.lower()}: queue={queue_s:.3f}s prefill={prefill_s:.3f}s "
            f"decode={decode_s:.3f}s retractions={self.num_retractions}>"
        )
