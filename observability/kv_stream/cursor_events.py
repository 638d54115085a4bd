"""Events that the followers report to the stream cursors."""

from __future__ import annotations

import msgspec

from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from scheduler_components.kv_events.replay_messages import ReplayMeta

__all__ = [
    "BatchDamaged",
    "BatchesApplied",
    "ClearApplied",
    "Connected",
    "ConnectionTimedOut",
    "CreditAvailable",
    "CursorEvent",
    "Disconnected",
    "ExtensionProbeDue",
    "HeartbeatReceived",
    "HeartbeatTimedOut",
    "LogEvent",
    "LogMessageReceived",
    "PointerRead",
    "ProbeDue",
    "ReadTimedOut",
    "ReplayBatchReceived",
    "ReplayEndReceived",
    "ReplayMetaReceived",
    "ReplayTimedOut",
    "RetryDue",
    "SnapshotRead",
    "ViewFeedback",
]

# --- of both kinds of stream ---


class ConnectionTimedOut(msgspec.Struct, frozen=True, gc=False):
    """The publisher has been unreachable for too long and counts as dead."""


class RetryDue(msgspec.Struct, frozen=True, gc=False):
    """The pause requested by ``RetryLater`` is over."""


class ClearApplied(msgspec.Struct, frozen=True, gc=False):
    """The batch just applied cleared all blocks."""


class BatchDamaged(msgspec.Struct, frozen=True, gc=False):
    """A part of the batch just applied could not be read, so the view may differ from the publisher's state."""


ViewFeedback = ClearApplied | BatchDamaged

# --- of a stream with a live channel and a replay channel ---


class Connected(msgspec.Struct, frozen=True, gc=False):
    """The live connection is up."""


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The live connection is lost."""


class ReplayBatchReceived(msgspec.Struct, frozen=True, gc=False):
    """One batch, or one chunk of a snapshot, of the answer to a request."""

    request_id: int
    seq: int
    payload: bytes


class ReplayMetaReceived(msgspec.Struct, frozen=True, gc=False):
    """One META message of the answer to an extended request."""

    request_id: int
    meta: ReplayMeta


class ReplayEndReceived(msgspec.Struct, frozen=True, gc=False):
    """The end marker of the answer to a request, without a META."""

    request_id: int


class ReplayTimedOut(msgspec.Struct, frozen=True, gc=False):
    """The answer to a request did not end in time, or cannot be read."""

    request_id: int


class CreditAvailable(msgspec.Struct, frozen=True, gc=False):
    """The follower has restored some ``ReplayCredit``."""


class ProbeDue(msgspec.Struct, frozen=True, gc=False):
    """A probe interval is over."""


class ExtensionProbeDue(msgspec.Struct, frozen=True, gc=False):
    """The time requested by ``ProbeExtensionLater`` is over."""


CursorEvent = (
    Connected
    | Disconnected
    | ConnectionTimedOut
    | ReplayBatchReceived
    | ReplayMetaReceived
    | ReplayEndReceived
    | ReplayTimedOut
    | CreditAvailable
    | RetryDue
    | ProbeDue
    | ExtensionProbeDue
    | ViewFeedback
)
"""An event of ``StreamCursor``. Live batches go to ``on_live_batch``."""

# --- of a stream in a log ---


class HeartbeatReceived(msgspec.Struct, frozen=True, gc=False):
    """The writer published its position."""

    heartbeat: LogHeartbeat


class HeartbeatTimedOut(msgspec.Struct, frozen=True, gc=False):
    """No heartbeat has come for too long, or the connection to the broker is lost."""


class LogMessageReceived(msgspec.Struct, frozen=True, gc=False):
    """The reader received a message of the log."""

    message: LogMessage


class BatchesApplied(msgspec.Struct, frozen=True, gc=False):
    """All instructions of the last event were carried out: the view may have reached the last heartbeat."""


class PointerRead(msgspec.Struct, frozen=True, gc=False):
    """The pointer; None when there is none or it could not be read."""

    request_id: int
    pointer: SnapshotPointer | None


class SnapshotRead(msgspec.Struct, frozen=True, gc=False):
    """The snapshot; None when it could not be read."""

    request_id: int
    snapshot: Snapshot | None


class ReadTimedOut(msgspec.Struct, frozen=True, gc=False):
    """The pointer or the snapshot did not come in time."""

    request_id: int


LogEvent = (
    HeartbeatReceived
    | HeartbeatTimedOut
    | LogMessageReceived
    | BatchesApplied
    | PointerRead
    | SnapshotRead
    | ReadTimedOut
    | ConnectionTimedOut
    | RetryDue
    | ViewFeedback
)
"""An event of ``LogCursor``."""
