"""What ``publish()`` has left to the publisher's thread, and when it must send that itself. Pure: it has no clock."""

from __future__ import annotations

import math
from collections import deque
from functools import cache
from typing import Any

import msgspec

from scheduler_components.events import EventBatch

__all__ = ["POLL_INTERVAL_S", "MAX_WAITING", "MAX_WAITING_COST", "MAX_WAIT_S", "Backlog", "InlineBacklog", "batch_cost"]

# The theory of handing over.
#
# To encode, send and fold a batch costs 30 to 300 microseconds. A scheduler that hands its batches to another thread
# saves them, as long as it lets go of the GIL now and then. One that never does starves the thread: each time that
# this one lets go of the GIL itself (three times per batch, in its sends), it gets it back after the interpreter's
# switch interval, 5 ms. So a queue and a thread alone are late by seconds.
#
# Here both work. A batch is left to the thread while little waits. When much waits, or for long, the call of
# publish() that finds it so sends all of it.
#
# Invariant, at the end of each call of publish() that found the sockets free: fewer than MAX_WAITING batches wait,
# they cost less than MAX_WAITING_COST, and the oldest of them was younger than MAX_WAIT_S when the call was made.
#
# Between two calls there is only the thread. So a batch is left to it only if the thread has come in time lately, or
# if the last call was a short while ago, so that the next one can be hoped for. Otherwise, in a loop of long steps that
# never lets go of the GIL, each batch is sent by its own call.

MAX_WAITING = 8
"""Batches. What costs most of a small one is to wake libzmq's thread, and it wakes once for all of them."""

POLL_INTERVAL_S = 0.003
"""The thread looks this often: each look takes the GIL from a step."""

MAX_WAIT_S = 0.004
"""Who has waited for longer has been forgotten by the thread."""

MAX_WAITING_COST = 240
"""Half a millisecond's work, in what an event of one block costs: so much may a call of ``publish()`` take at most."""

_HEAVY_COST = MAX_WAITING_COST / MAX_WAITING
"""From there on not the number but the cost of those that wait is the bound."""

_LEAST_LOOK_S = 0.0001
"""Between two looks: the scheduler gets the GIL, which a short release inside a send does not grant."""

_BATCH_COST = 16
_TOKENS_PER_COST = 100
_ODD_COST = MAX_WAITING_COST
"""Of what is no batch: it is refused at once."""


class Backlog:
    """Says of each batch whether it may wait; written for one publisher and the calls of its ``publish()``.

    What is taken out meanwhile is always the oldest, so the number of those that wait says which they are.

    Args:
        max_waiting: batches that may wait, with the one that comes; at most ``MAX_WAITING``.

    Attributes:
        is_prompt: whether the thread has come in time lately; the thread says it.
        last_s: when the last batch came.
    """

    __slots__ = ("_given", "_max_waiting", "_since_last_s", "_total_cost", "is_prompt", "last_s")

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = min(MAX_WAITING, max_waiting)
        # When each of the last batches came, and the cost of all before it. Those that are not known of are too old.
        self._given: deque[tuple[float, float]] = deque([(-math.inf, 0.0)] * MAX_WAITING, maxlen=MAX_WAITING)
        self._total_cost = 0.0
        self.last_s = -math.inf
        self._since_last_s = MAX_WAIT_S
        self.is_prompt = True

    def may_wait(self, cost: float, now_s: float, num_waiting: int) -> bool:
        """Note a batch that has just come; False when it must be sent now, with all that waits.

        ``num_waiting`` counts it in; ``cost`` is ``batch_cost`` its events; ``now_s`` is monotonic.
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
        """How long the thread may stay away: several small batches go out together, of large ones each is work enough.

        It then comes when the next batch is there, and has the GIL when the scheduler lets it go.
        """
        given = self._given
        if self._total_cost - given[-1][1] < _HEAVY_COST:
            return POLL_INTERVAL_S
        return min(POLL_INTERVAL_S, max(_LEAST_LOOK_S, self.last_s + self._since_last_s - now_s))

    def oldest_at_s(self, num_waiting: int) -> float:
        """When the oldest of ``num_waiting`` batches came, as far as it is known."""
        return self._given[-min(max(num_waiting, 1), MAX_WAITING)][0]


_BURST_GAP_S = 0.0001
"""Calls that follow each other within this are a burst once ``MAX_WAITING`` have: no scheduler steps as quickly."""


class InlineBacklog:
    """The same, where each batch is sent by its own call: of a burst, ``max_waiting`` go out together.

    Attributes:
        is_prompt: of no use here.
        last_s: when the last batch came.
    """

    __slots__ = ("_max_waiting", "_num_close_calls", "is_prompt", "last_s")

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = min(MAX_WAITING, max_waiting)
        self._num_close_calls = 0
        self.last_s = -math.inf
        self.is_prompt = True

    def may_wait(self, cost: float, now_s: float, num_waiting: int) -> bool:  # noqa: ARG002 - all are sent at once
        """See ``Backlog.may_wait``."""
        self._num_close_calls = self._num_close_calls + 1 if now_s - self.last_s <= _BURST_GAP_S else 1
        self.last_s = now_s
        return self._num_close_calls > MAX_WAITING and num_waiting < self._max_waiting

    def next_poll_in_s(self, now_s: float) -> float:  # noqa: ARG002 - nothing is left to the thread
        """See ``Backlog.next_poll_in_s``."""
        return POLL_INTERVAL_S

    def oldest_at_s(self, num_waiting: int) -> float:  # noqa: ARG002 - none waits for longer than its burst
        """When the last batch came."""
        return self.last_s


def batch_cost(batch: EventBatch) -> float:
    """About how much work a batch is. Its last event stands for all: to walk them would cost what is to be saved."""
    try:
        events: Any = batch.events
        num_events, last = len(events), events[-1]
        kind: object = type(last)
        num_tokens = len(last.token_ids) if _has_tokens(kind) else 0
    except IndexError:
        return _BATCH_COST
    except (TypeError, AttributeError):
        return _ODD_COST
    return _BATCH_COST + num_events * (1 + num_tokens / _TOKENS_PER_COST)


@cache
def _has_tokens(kind: type) -> bool:
    """Of a class of events, which may be an engine's own."""
    return issubclass(kind, msgspec.Struct) and "token_ids" in kind.__struct_fields__
