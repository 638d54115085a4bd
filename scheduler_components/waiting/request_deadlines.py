"""RequestDeadlines: end requests that wait or take too long, in the same step on all ranks. Pure.

Both limits are counted from the first agreement after ``add`` and compared with the agreed clock (``StepAgreement``)
only, so a request ends in the same step on all ranks. They end in the order of their deadlines, equal ones in the order
in which they were added.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

from scheduler_components.values import DeadlineStats, FinishReason, RequestState, RequestTimeouts

__all__ = ["RequestDeadlines", "TimedRequest"]


class TimedRequest(Protocol):
    """A request, as ``RequestDeadlines`` reads it: the scheduler's own class."""

    @property
    def rid(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def timeouts(self) -> RequestTimeouts:
        """The limits that its client has set."""
        ...

    @property
    def state(self) -> RequestState:
        """A running request has been admitted."""
        ...

    @property
    def num_retractions(self) -> int:
        """How often it lost its pages. A retracted request waits, but has been admitted before."""
        ...


R = TypeVar("R", bound=TimedRequest)


class _Deadline(NamedTuple):
    at_s: float
    number: int  # of its request, in the order in which they were added
    reason: FinishReason
    rid: str


_REASONS = (FinishReason.QUEUE_TIMEOUT, FinishReason.TIMEOUT)


@dataclass(slots=True, kw_only=True)
class RequestDeadlines(Generic[R]):
    """The deadlines of the requests in flight. A ``StatsSource``.

    Requests without a limit cost nothing. The deadlines of the others are in one sorted list.

    Attributes:
        defaults: the limits of requests whose client has set none; a client may also set longer ones.
    """

    defaults: RequestTimeouts = field(default_factory=RequestTimeouts)
    _new: dict[str, R] = field(default_factory=dict, init=False, repr=False)
    _timed: dict[str, tuple[R, list[_Deadline]]] = field(default_factory=dict, init=False, repr=False)
    _deadlines: list[_Deadline] = field(default_factory=list, init=False, repr=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False, repr=False)
    _counts: dict[FinishReason, int] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """Return how many requests in flight have a limit."""
        return len(self._new) + len(self._timed)

    @property
    def next_deadline_s(self) -> float:
        """A lower bound of the agreed time at which a request expires; infinite if no limit is counted."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def add(self, request: R) -> None:
        """Watch a new request. Its limits are counted from the next ``pop_expired`` on."""
        queue_s, total_s = self._limits_of(request)
        if queue_s is not None or total_s is not None:
            self._new[request.rid] = request

    def discard(self, request: R) -> None:
        """Forget a request that has ended. No effect if it has no limit."""
        self._new.pop(request.rid, None)
        _, deadlines = self._timed.pop(request.rid, (request, ()))
        for deadline in deadlines:
            del self._deadlines[bisect_left(self._deadlines, deadline)]

    def pop_expired(self, now_s: float) -> list[tuple[R, FinishReason, str]]:
        """Return the requests that have reached a limit, each once. Call it after each agreement, with its time.

        With each come the reason, ``QUEUE_TIMEOUT`` or ``TIMEOUT``, and the limit in words, for the client.

        A request that was admitted once has no queue limit any more, also after a retraction.
        """
        for request in self._new.values():
            self._start(request, now_s)
        self._new.clear()
        expired = []
        while self._deadlines and self._deadlines[0].at_s <= now_s:
            deadline = self._deadlines[0]
            request, deadlines = self._timed[deadline.rid]
            if deadline.reason is FinishReason.QUEUE_TIMEOUT and _was_admitted(request):
                del self._deadlines[0]
                deadlines.remove(deadline)
                continue
            self.discard(request)
            self._counts[deadline.reason] = self._counts.get(deadline.reason, 0) + 1
            expired.append((request, deadline.reason, self._problem(request, deadline.reason)))
        return expired

    def stats(self) -> DeadlineStats:
        return DeadlineStats(
            waiting=len(self),
            queue_timeouts=self._counts.get(FinishReason.QUEUE_TIMEOUT, 0),
            timeouts=self._counts.get(FinishReason.TIMEOUT, 0),
        )

    def _start(self, request: R, now_s: float) -> None:
        number = next(self._numbers)
        deadlines = [
            _Deadline(now_s + limit_s, number, reason, request.rid)
            for limit_s, reason in zip(self._limits_of(request), _REASONS, strict=True)
            if limit_s is not None
        ]
        self._timed[request.rid] = request, deadlines
        for deadline in deadlines:
            insort(self._deadlines, deadline)

    def _limits_of(self, request: R) -> tuple[float | None, float | None]:
        own, defaults = request.timeouts, self.defaults
        return (
            defaults.queue_s if own.queue_s is None else own.queue_s,
            defaults.total_s if own.total_s is None else own.total_s,
        )

    def _problem(self, request: R, reason: FinishReason) -> str:
        queue_s, total_s = self._limits_of(request)
        if reason is FinishReason.QUEUE_TIMEOUT:
            return f"queue_timeout={queue_s:g}: the request was not admitted within {queue_s:g} s; try again later"
        return f"timeout={total_s:g}: the request was not complete within {total_s:g} s; ask for less or allow more"


def _was_admitted(request: TimedRequest) -> bool:
    return request.state is RequestState.RUNNING or request.num_retractions > 0
