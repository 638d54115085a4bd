"""LogTroubles: what happens to a log in JetStream, and how long its writer and its readers may need to recover.

Each limit is the sum of what the rules of the log allow: see ``observability.kv_stream.log_cursor`` and
``observability.jetstream.nats_writer``.
"""

from __future__ import annotations

from enum import Enum

from observability.jetstream.broker_preparation import PAUSE_S
from observability.jetstream.log_writer import ACK_TIMEOUT_S, HEARTBEAT_INTERVAL_S, REQUEST_PAUSE_S, SNAPSHOT_CHECK_S
from observability.kv_stream.log_cursor import STALLED_HEARTBEATS
from worlds.timeline import Timeline

__all__ = ["AGE_LIMIT_S", "JOIN_LIMIT_S", "LogTrouble", "LogTroubles"]

AGE_LIMIT_S = 0.1
"""Age of the oldest batch that a LIVE reader lacks, or that waits at the writer. A batch may wait while the snapshot is
stored, which takes three requests and some slices of building, and it takes two more ways to the reader."""

JOIN_LIMIT_S = 2 * HEARTBEAT_INTERVAL_S + 0.3
"""Time until a reader that joins is LIVE. It waits for a heartbeat and reads pointer, snapshot and log. If the snapshot
is newer than that heartbeat, the next one proves it. It may begin again, if the snapshot was replaced meanwhile."""

_STALL_S = (STALLED_HEARTBEATS + 1) * HEARTBEAT_INTERVAL_S
"""Time until a reader that lacks a message reads the snapshot."""


class LogTrouble(Enum):
    """What costs a writer or its readers a recovery, and how long that may take, in seconds.

    DELAYED: requests and messages took longer.
    RESTARTED: a writer begins an epoch, while the replaced one may still run: both read the pointer, store a snapshot
        again after a pause, and send a heartbeat each.
    STALLED: readers lack a message that the log does not have.
    REFUSED: the broker refuses a message, because the log was deleted. The writer prepares the broker, and stores a
        snapshot; readers are stalled.
    UNANSWERED: a request or its answer was lost, or the connection. The writer sends what was lost again after the
        timeout; readers are stalled meanwhile.
    DAMAGED: what the pointer names was deleted, or messages after it were. Readers stall, read what is there, stall
        again, and request a snapshot, which the writer stores after a pause and after one attempt that fails.
    """

    DELAYED = 0.5
    RESTARTED = PAUSE_S + HEARTBEAT_INTERVAL_S + JOIN_LIMIT_S
    STALLED = _STALL_S + JOIN_LIMIT_S
    REFUSED = PAUSE_S + _STALL_S + JOIN_LIMIT_S
    UNANSWERED = ACK_TIMEOUT_S + PAUSE_S + _STALL_S + JOIN_LIMIT_S
    DAMAGED = 3 * _STALL_S + REQUEST_PAUSE_S + SNAPSHOT_CHECK_S + PAUSE_S + JOIN_LIMIT_S


class LogTroubles:
    """The troubles of one log.

    Args:
        timeline: of the world.

    Attributes:
        noted_s: when the newest one happened.
        settled_s: from then on no trouble so far excuses anything.
    """

    __slots__ = ("_timeline", "noted_s", "settled_s")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.noted_s = self.settled_s = 0.0

    def note(self, trouble: LogTrouble) -> None:
        """A trouble happens now."""
        self.noted_s = self._timeline.now_s
        self.settled_s = max(self.settled_s, self.noted_s + trouble.value)

    @property
    def are_over(self) -> bool:
        """True while nothing has to be recovered from."""
        return self._timeline.now_s >= self.settled_s
