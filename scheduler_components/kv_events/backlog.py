"""Backlog: decide which batches ``publish()`` leaves to the publisher's thread. Pure: it has no clock."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["POLL_INTERVAL_S", "MAX_WAITING", "MAX_WAIT_S", "Backlog"]

# The theory of leaving batches to a thread.
#
# Encoding, sending and folding a batch costs 20 to 300 microseconds. A scheduler that leaves its batches to another
# thread saves this time, as long as it releases the GIL now and then. A scheduler that never does starves the thread,
# which gets the GIL after the interpreter's switch interval of 5 ms; and one that makes small system calls starves it
# for longer, because each of them starts the interval again.
#
# Here both work. A batch is left to the thread while few wait. When many wait, or one for long, each call of publish()
# sends for a short time, and at least one batch.
#
# Invariant, at the end of each call of publish() that found the sockets free: fewer than MAX_WAITING batches wait,
# unless the sockets were in use before; and if the oldest was as old as MAX_WAIT_S when the call began, it was sent.
#
# Between two calls only the thread works. So a batch is left to it only if the thread has been on time lately, or if
# the previous call was recent, so that the next one is probable.

MAX_WAITING = 12
"""Batches. A loop with steps of 0.3 ms publishes ten until the thread polls. If this were eight, ``publish()`` would
send in every seventh step what the thread was about to send.
"""

POLL_INTERVAL_S = 0.003
"""Age at which the thread sends the oldest small batch. Each poll takes the GIL from a step. Its first batch takes some
100 us, because the caches and libzmq's thread have gone cold; further ones take 30.
"""

MAX_WAIT_S = 0.004
"""Age at which the thread is assumed to have missed a batch."""

_MIN_POLL_S = 0.0001
"""Minimum time between two polls, so that the scheduler gets the GIL."""


class Backlog:
    """Decide for each batch whether it may wait. Used by one publisher and the calls of its ``publish()``.

    Waiting batches are always sent oldest first, so their number identifies them.

    Args:
        max_waiting: batches that may wait, including the new one; at most ``MAX_WAITING``. With 1, none waits.

    Attributes:
        last_s: time of the last batch.
    """

    __slots__ = ("_given_s", "_max_waiting", "_since_last_s", "last_s")

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = min(MAX_WAITING, max_waiting)
        # Time of each of the last batches. Unknown ones count as too old.
        self._given_s = deque([-math.inf] * MAX_WAITING, maxlen=MAX_WAITING)
        self.last_s = -math.inf
        self._since_last_s = MAX_WAIT_S

    def may_wait(self, now_s: float, num_waiting: int, *, is_prompt: bool) -> bool:
        """Record a new batch. Return False if batches must be sent now.

        Args:
            now_s: monotonic time.
            num_waiting: waiting batches, including this one.
            is_prompt: True if the thread has been on time lately.
        """
        self._given_s.append(now_s)
        since_last_s = self._since_last_s = now_s - self.last_s
        self.last_s = now_s
        if num_waiting >= self._max_waiting or now_s - self.oldest_at_s(num_waiting) >= MAX_WAIT_S:
            return False
        return is_prompt or since_last_s < MAX_WAIT_S

    def next_poll_in_s(self, now_s: float, num_waiting: int, *, is_heavy: bool) -> float:
        """Return the seconds until the thread's next poll: small batches are sent together, heavy ones one by one.

        With heavy batches the poll is due when the next one is expected, so the thread gets the GIL when the scheduler
        releases it.
        """
        if is_heavy:
            due_s = self.last_s + self._since_last_s
        else:
            due_s = (self.oldest_at_s(num_waiting) if num_waiting else now_s) + POLL_INTERVAL_S
        return min(POLL_INTERVAL_S, max(_MIN_POLL_S, due_s - now_s))

    def oldest_at_s(self, num_waiting: int) -> float:
        """Return the time of the oldest of ``num_waiting`` batches, as far as it is known."""
        return self._given_s[-min(max(num_waiting, 1), MAX_WAITING)]
