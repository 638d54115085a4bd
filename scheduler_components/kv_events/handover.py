"""Handover: decide what ``publish()`` does itself and what it leaves to the publisher's thread. Pure: no clock.

The thread has measured how late its polls were. A late thread is not counted on for a while: then ``publish()`` sends,
and serves replays for a share of the time.
"""

from __future__ import annotations

import math

from scheduler_components.kv_events.backlog import MAX_WAIT_S, MAX_WAITING, Backlog
from scheduler_components.kv_events.live_sender import HEAVY_BYTES, LiveSender
from scheduler_components.kv_events.replay import ReplaySessions

__all__ = ["IDLE_REPLAY_S", "PAUSE_S", "PUBLISH_S", "REQUESTS_EVERY_S", "Handover"]

# Time limits of a drain, in seconds. A drain always sends one batch and one turn of a replay, if there are any.

PUBLISH_S = 75e-6
"""Time that ``publish()`` sends. The rest is left to the thread or to the next call."""

IDLE_REPLAY_S = 0.0003
"""Time that ``idle()`` serves replays, while the scheduler waits for its device."""

REQUESTS_EVERY_S = 0.004
"""Polling for replay requests costs a system call, so a scheduler with fast steps polls only in some of them."""

_MIN_REPLAY_S, _MAX_REPLAY_S, _REPLAY_SHARE = 50e-6, 0.005, 0.1
"""Time that ``publish()`` serves replays: a share of the time since it last did. More than clients need costs live
batches their place on the processors.
"""

_MIN_SLICE_S, _MAX_SLICE_S, _SLICE_SHARE = 0.0003, 0.001, 0.25
"""Time that the thread works before it offers the GIL: a share of the time for which it waited, within bounds. With
0.5 ms at least, four replaying clients took 0.45 ms of a step that sleeps 0.2 ms, not 0.13.
"""

# Intervals of the thread.

PAUSE_S = 0.0001
"""Pause between two slices, in which the scheduler gets the GIL."""

_STALLED_AFTER_S = 0.005
"""A scheduler that has not called ``idle()`` or ``publish()`` for this long does not drain, so the thread does."""

_LATE_S = 0.003
"""A thread with this delay got the GIL only when the interpreter took it from the scheduler."""

_REQUESTS_LATE_S = 0.05
"""Maximum time until a late thread receives replay requests. It interrupts a step for this."""

_LATE_FOR_S = 1.0
"""Time for which a thread that was late is not counted on."""

_LULL_AFTER_S = 0.02
"""Time to wait for a busy scheduler's next batch, because waking the thread for it costs its step a system call."""

_QUIET_AFTER_S = 0.5
"""Time to wait for the next call or request, while the thread waits on its descriptors."""

_POLL_S = 0.008
_POLL_STUCK_S = 0.5
"""A stuck client that accepts messages again usually wakes the thread by its descriptor."""


class Handover:
    """The division of work between the scheduler's calls and the publisher's thread.

    Args:
        live: with the pending batches.
        sessions: the open answers.
        max_waiting: as of ``Backlog``.
        is_inline: each call of ``publish()`` sends its batch.

    Attributes:
        backlog: the ages of the waiting batches.
        is_active: True while batches are left to the thread, because the scheduler publishes and does not call
            ``idle()``.
        drained_at_s: when a call of the scheduler last drained.
    """

    __slots__ = (
        "_busy_at_s", "_is_inline", "_late_at_s", "_live", "_replayed_at_s", "_sessions", "backlog", "drained_at_s",
        "is_active",
    )  # fmt: skip

    def __init__(self, live: LiveSender, sessions: ReplaySessions, *, max_waiting: int, is_inline: bool) -> None:
        self._live = live
        self._sessions = sessions
        self._is_inline = is_inline
        self.backlog = Backlog(1 if is_inline else max_waiting)
        self.is_active = False
        self.drained_at_s = self._busy_at_s = self._replayed_at_s = 0.0
        self._late_at_s = -math.inf

    # --- in calls of the scheduler; due_s is the time of the thread's next poll, infinite while it sleeps ---

    def is_thread_prompt(self, now_s: float, due_s: float) -> bool:
        """Return whether the thread has been getting the GIL in time, as far as its polls show."""
        return now_s - self._late_at_s >= _LATE_FOR_S and now_s - due_s < _LATE_S

    def may_wait(self, now_s: float, due_s: float) -> bool:
        """Record the batch that has just become pending. Return True if it may be left to the thread."""
        is_prompt = self.is_thread_prompt(now_s, due_s)
        if not self.backlog.may_wait(now_s, len(self._live.pending), is_prompt=is_prompt):
            return False
        return is_prompt or self._live.payload_bytes < HEAVY_BYTES

    def replay_s(self, now_s: float, due_s: float) -> float:
        """Return the time in seconds that this call of ``publish()`` serves replays.

        0 if the thread can, or if a call just did.
        """
        if not len(self._sessions) or not (self._is_inline or now_s - due_s >= _LATE_S):
            return 0.0
        replay_s = min(_MAX_REPLAY_S, (now_s - self._replayed_at_s) * _REPLAY_SHARE)
        if replay_s < _MIN_REPLAY_S:
            return 0.0
        self._replayed_at_s = now_s
        return replay_s

    # --- in the polls of the thread ---

    def pause_s(self, now_s: float, late_s: float, requests_at_s: float) -> float:
        """Return the seconds until the next poll if this one is left to the scheduler; 0 if it must drain.

        Args:
            now_s: monotonic time.
            late_s: delay of this poll: the GIL was not free, or the machine is busy.
            requests_at_s: when replay requests were last received.
        """
        backlog = self.backlog
        if late_s >= _LATE_S:
            self._late_at_s = now_s
            # publish() sends in this thread's place, which would interrupt a step for nothing.
            if (
                self.is_active
                and now_s - backlog.last_s < MAX_WAIT_S
                and now_s - requests_at_s < _REQUESTS_LATE_S
                and not len(self._sessions)
            ):
                return _POLL_S
        called_s = now_s - max(self.drained_at_s, backlog.last_s)
        if not self.is_active and called_s < _STALLED_AFTER_S:
            return max(PAUSE_S, _STALLED_AFTER_S - called_s)
        return 0.0

    @staticmethod
    def slice_s(late_s: float) -> float:
        """Return the seconds for which a poll sends, and for which it serves replays."""
        return min(_MAX_SLICE_S, max(_MIN_SLICE_S, late_s * _SLICE_SHARE))

    def next_poll_s(self, now_s: float, *, was_busy_at_s: float | None, unfinished: bool) -> float:
        """Return the seconds until the next poll after one that drained; infinite if there is nothing to do.

        Args:
            now_s: monotonic time.
            was_busy_at_s: when the poll began, if it sent anything.
            unfinished: there is more to do.
        """
        if was_busy_at_s is not None:
            self._busy_at_s = was_busy_at_s
        num_waiting = len(self._live.pending)
        if unfinished or num_waiting >= MAX_WAITING:
            return PAUSE_S
        can_progress = self._sessions.can_progress(now_s)
        last_s = self.backlog.last_s
        if num_waiting or (self.is_active and (can_progress or now_s - last_s <= _LULL_AFTER_S)):
            is_heavy = self._live.payload_bytes >= HEAVY_BYTES
            return self.backlog.next_poll_in_s(now_s, num_waiting, is_heavy=is_heavy)
        if can_progress:
            return _POLL_S
        if len(self._sessions):
            return _POLL_STUCK_S
        is_lull = self.is_active or now_s - max(self.drained_at_s, self._busy_at_s) > _QUIET_AFTER_S
        return math.inf if is_lull else _POLL_S
