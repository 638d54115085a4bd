"""Backlog: decide which batches ``publish()`` leaves to the publisher's thread. Pure: it has no clock."""

from __future__ import annotations

import math
from collections import deque
from functools import cache
from typing import Any

import msgspec

from scheduler_components.events import EventBatch

__all__ = ["POLL_INTERVAL_S", "MAX_WAITING", "MAX_WAITING_COST", "MAX_WAIT_S", "Backlog", "InlineBacklog", "batch_cost"]

# The theory of handing over batches.
#
# Encoding, sending and folding a batch costs 30 to 300 microseconds. A scheduler that leaves its batches to another
# thread saves this time, as long as it releases the GIL now and then. A scheduler that never does starves the thread:
# each time that the thread itself releases the GIL (three times per batch, in its sends), it gets it back after the
# interpreter's switch interval of 5 ms. So a queue and a thread alone are late by seconds.
#
# Here both work. A batch is left to the thread while little waits. When much waits, or for long, the call of publish()
# that finds it so sends all of it.
#
# Invariant, at the end of each call of publish() that found the sockets free: fewer than MAX_WAITING batches wait, they
# cost less than MAX_WAITING_COST, and the oldest of them was younger than MAX_WAIT_S when the call began.
#
# Between two calls only the thread works. So a batch is left to it only if the thread has been on time lately, or if
# the previous call was recent, so that the next one is probable. Otherwise, in a loop of long steps that never releases
# the GIL, each call sends its own batch.

MAX_WAITING = 8
"""Batches. Most of the cost of a small one is waking libzmq's thread, which wakes once for all of them."""

POLL_INTERVAL_S = 0.003
"""Interval of the thread's polls. Each poll takes the GIL from a step."""

MAX_WAIT_S = 0.004
"""Age at which the thread is assumed to have missed a batch."""

MAX_WAITING_COST = 240
"""Half a millisecond of work, in units of one event of one block: the most that a call of ``publish()`` may take."""

_HEAVY_COST = MAX_WAITING_COST / MAX_WAITING
"""Average cost above which the cost of the waiting batches is the bound, and not their number."""

_MIN_POLL_S = 0.0001
"""Minimum time between two polls, so that the scheduler gets the GIL; a short release inside a send does not grant it.
"""

_BATCH_COST = 16
_TOKENS_PER_COST = 100
_INVALID_COST = MAX_WAITING_COST
"""Cost of an object that is no batch: it is refused immediately."""


class Backlog:
    """Decide for each batch whether it may wait. Used by one publisher and the calls of its ``publish()``.

    Waiting batches are always sent oldest first, so their number identifies them.

    Args:
        max_waiting: batches that may wait, including the new one; at most ``MAX_WAITING``.

    Attributes:
        is_prompt: True if the thread has been on time lately; set by the thread.
        last_s: time of the last batch.
    """

    __slots__ = ("_given", "_max_waiting", "_since_last_s", "_total_cost", "is_prompt", "last_s")

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = min(MAX_WAITING, max_waiting)
        # Time of each of the last batches, and the cost of all before it. Unknown ones count as too old.
        self._given: deque[tuple[float, float]] = deque([(-math.inf, 0.0)] * MAX_WAITING, maxlen=MAX_WAITING)
        self._total_cost = 0.0
        self.last_s = -math.inf
        self._since_last_s = MAX_WAIT_S
        self.is_prompt = True

    def may_wait(self, cost: float, now_s: float, num_waiting: int) -> bool:
        """Record a new batch. Return False if it must be sent now, with all waiting ones.

        Args:
            cost: ``batch_cost`` of the batch.
            now_s: monotonic time.
            num_waiting: waiting batches, including this one.
        """
        given, before = self._given, self._total_cost
        given.append((now_s, before))
        self._total_cost = total = before + cost
        since_last_s = self._since_last_s = now_s - self.last_s
        self.last_s = now_s
        if num_waiting >= self._max_waiting:
            return False
        oldest_at_s, cost_before = given[-num_waiting or -1]
        if total - cost_before >= MAX_WAITING_COST or now_s - oldest_at_s >= MAX_WAIT_S:
            return False
        return self.is_prompt or since_last_s < MAX_WAIT_S

    def next_poll_in_s(self, now_s: float) -> float:
        """Return the seconds until the thread's next poll: small batches are sent together, large ones one by one.

        The poll is due when the next batch is expected, so the thread gets the GIL when the scheduler releases it.
        """
        given = self._given
        if self._total_cost - given[-1][1] < _HEAVY_COST:
            return POLL_INTERVAL_S
        return min(POLL_INTERVAL_S, max(_MIN_POLL_S, self.last_s + self._since_last_s - now_s))

    def oldest_at_s(self, num_waiting: int) -> float:
        """Return the time of the oldest of ``num_waiting`` batches, as far as it is known."""
        return self._given[-min(max(num_waiting, 1), MAX_WAITING)][0]


_BURST_GAP_S = 0.0001
"""Calls within this interval are a burst once there are ``MAX_WAITING``: no scheduler steps as fast."""


class InlineBacklog:
    """Let each call send its own batch; in a burst, send up to ``max_waiting`` batches together.

    Attributes:
        is_prompt: unused here.
        last_s: time of the last batch.
    """

    __slots__ = ("_max_waiting", "_num_close_calls", "is_prompt", "last_s")

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = min(MAX_WAITING, max_waiting)
        self._num_close_calls = 0
        self.last_s = -math.inf
        self.is_prompt = True

    def may_wait(self, cost: float, now_s: float, num_waiting: int) -> bool:  # noqa: ARG002 - every call sends
        """See ``Backlog.may_wait``."""
        self._num_close_calls = self._num_close_calls + 1 if now_s - self.last_s <= _BURST_GAP_S else 1
        self.last_s = now_s
        return self._num_close_calls > MAX_WAITING and num_waiting < self._max_waiting

    def next_poll_in_s(self, now_s: float) -> float:  # noqa: ARG002 - the thread gets no batches
        """See ``Backlog.next_poll_in_s``."""
        return POLL_INTERVAL_S

    def oldest_at_s(self, num_waiting: int) -> float:  # noqa: ARG002 - no batch waits longer than its burst
        """Return the time of the last batch."""
        return self.last_s


def batch_cost(batch: EventBatch) -> float:
    """Estimate the work of a batch by its last event. Reading all events would cost as much as it saves."""
    try:
        events: Any = batch.events
        num_events, last = len(events), events[-1]
        kind: object = type(last)
        num_tokens = len(last.token_ids) if _has_tokens(kind) else 0
    except IndexError:
        return _BATCH_COST
    except (TypeError, AttributeError):
        return _INVALID_COST
    return _BATCH_COST + num_events * (1 + num_tokens / _TOKENS_PER_COST)


@cache
def _has_tokens(kind: type) -> bool:
    """Return whether a class of events, which may be an engine's, has tokens."""
    return issubclass(kind, msgspec.Struct) and "token_ids" in kind.__struct_fields__
