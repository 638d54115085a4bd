"""Instructions of the stream cursors to the follower that owns the sockets and the clock."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from observability.kv_stream.log_records import SnapshotPointer
from scheduler_components.kv_events.replay_messages import ReplayRequest, ReplayVerb
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES

__all__ = [
    "Apply",
    "ApplyStaged",
    "Clear",
    "Instruction",
    "LogInstruction",
    "ProbeExtensionLater",
    "ReadLog",
    "ReadPointer",
    "ReadSnapshot",
    "RequestSnapshot",
    "RetryLater",
    "SendReplayRequest",
    "Staging",
    "ViewInstruction",
    "request_token",
]

# --- for the view ---


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Apply one batch to the view, then call ``on_clear_applied`` or ``on_batch_damaged`` if either is the case."""

    seq: int
    payload: bytes
    replayed: bool


class ApplyStaged(msgspec.Struct, frozen=True, gc=False):
    """Apply one payload to the staging view, then report what it contained as after ``Apply``.

    ``is_snapshot_chunk`` marks a chunk of the folded state. ``seq`` is then the last batch that the folded state
    covers.
    """

    seq: int
    payload: bytes
    is_snapshot_chunk: bool


class Staging(Enum):
    """A step of a snapshot.

    Attributes:
        START: create an empty staging view. The current view stays until ``COMMIT`` replaces it.
        COMMIT: replace the current view by the staging view, atomically.
        ABORT: discard the staging view: the snapshot cannot be used.
    """

    START = auto()
    COMMIT = auto()
    ABORT = auto()


class Clear(msgspec.Struct, frozen=True, gc=False):
    """Remove every block of this stream from the view. ``reason`` is a sentence for an operator."""

    reason: str


ViewInstruction = Apply | ApplyStaged | Staging | Clear

# --- for the replay channel ---


class SendReplayRequest(msgspec.Struct, frozen=True, gc=False):
    """Send a replay request. Its answers come back with this ``request_id``.

    The request replaces any request that is still open. Use one connection per request, so that a late answer to an
    older request is never taken for an answer to this one.

    Attributes:
        request_id: number of the request. It is also the token of an extended request.
        start: the first batch wanted, or the number that the next batch would have.
        verb: of an extended request; None sends a plain one.
        epoch: the epoch of the view, zeros without a view.
    """

    request_id: int
    start: int
    verb: ReplayVerb | None = None
    epoch: bytes = bytes(EPOCH_BYTES)

    @property
    def request(self) -> ReplayRequest:
        """The request in its wire format."""
        return ReplayRequest(self.start, self.verb, request_token(self.request_id), self.epoch)


def request_token(request_id: int) -> bytes:
    """Return the token by which an extended answer names its request."""
    return request_id.to_bytes(8, "big")


class RetryLater(msgspec.Struct, frozen=True, gc=False):
    """Call ``on_retry_due`` after a pause that grows with ``failures``, the number of unanswered requests in a row."""

    failures: int


class ProbeExtensionLater(msgspec.Struct, frozen=True, gc=False):
    """Call ``on_extension_probe_due`` after ``intervals`` probe intervals, whatever comes meanwhile."""

    intervals: int


Instruction = ViewInstruction | SendReplayRequest | RetryLater | ProbeExtensionLater
"""An instruction of ``StreamCursor``."""

# --- for the reader of a log ---


class ReadPointer(msgspec.Struct, frozen=True, gc=False):
    """Read the snapshot pointer for ``on_pointer_read``."""

    request_id: int


class ReadSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Read the snapshot that ``pointer`` names for ``on_snapshot_read``."""

    request_id: int
    pointer: SnapshotPointer


class ReadLog(msgspec.Struct, frozen=True, gc=False):
    """Read the log from ``log_seq`` on, and end the earlier reading."""

    log_seq: int


class RequestSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Ask the writer for another snapshot, because the stored one does not lead to the end of the log."""


LogInstruction = ViewInstruction | RetryLater | ReadPointer | ReadSnapshot | ReadLog | RequestSnapshot
"""An instruction of ``LogCursor``."""
