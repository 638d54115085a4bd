"""VirtualClock and EventHeap: time that passes only when an event says so.

Times are integers, in nanoseconds, because sums of floats depend on their order. Events of equal time run by their
order, then in the order in which they were pushed, so a run depends on nothing but its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

__all__ = ["MAX_SPAN_S", "NEVER_NS", "EventHeap", "VirtualClock", "nanoseconds"]

NEVER_NS = 2**63 - 1
"""A time after the end of every simulation."""

MAX_SPAN_S = 366 * 24 * 3600
"""The longest time span of a setting: a year, as in a trace."""


def nanoseconds(seconds: float) -> int:
    """Return a time span in nanoseconds, rounded."""
    return round(seconds * 1e9)


class VirtualClock:
    """A clock for components that take ``Callable[[], float]``. Only its owner moves it, also backwards.

    Args:
        now_s, now_ns: the present at first, in either unit.

    Attributes:
        now_ns: the present.
    """

    __slots__ = ("now_ns",)

    def __init__(self, now_s: float = 0.0, *, now_ns: int = 0) -> None:
        self.now_ns = now_ns or nanoseconds(now_s)

    def __call__(self) -> float:
        """Return the present in seconds."""
        return self.now_ns / 1e9

    @property
    def now_s(self) -> float:
        """The present in seconds, rounded to nanoseconds."""
        return self.now_ns / 1e9

    @now_s.setter
    def now_s(self, seconds: float) -> None:
        self.now_ns = nanoseconds(seconds)

    def advance(self, seconds: float) -> None:
        """Move the time forward."""
        self.now_ns += nanoseconds(seconds)


@dataclass(slots=True, kw_only=True)
class EventHeap:
    """What will happen, the earliest first.

    Attributes:
        now_ns: time of the event popped last.
    """

    now_ns: int = field(default=0, init=False)
    _events: list[tuple[int, int, int, Callable[[], None]]] = field(default_factory=list, init=False, repr=False)
    _num_pushed: int = field(default=0, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._events)

    def push(self, time_ns: int, action: Callable[[], None], *, order: int = 0) -> None:
        """Add an event. One in the past happens now.

        Args:
            time_ns: when it happens.
            action: what happens.
            order: of several events of one time, those of the lowest order run first.
        """
        heappush(self._events, (max(time_ns, self.now_ns), order, self._num_pushed, action))
        self._num_pushed += 1

    def pop(self) -> Callable[[], None]:
        """Remove the next event, advance ``now_ns`` to its time, and return its action.

        Raises:
            IndexError: there is none.
        """
        self.now_ns, _, _, action = heappop(self._events)
        return action
