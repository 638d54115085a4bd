"""What a stream cursor says: its states, its instructions to whoever owns the sockets, and its counters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from scheduler_components.kv_events.replay_messages import ReplayRequest, ReplayVerb
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES

__all__ = [
    "STATE_TRANSITIONS",
    "Apply",
    "ApplyStaged",
    "SendReplayRequest",
    "StartStaging",
    "Clear",
    "CursorCounters",
    "AbortStaging",
    "Instruction",
    "RetryLater",
    "StreamState",
    "CommitStaging",
    "request_token",
]


class StreamState(StrEnum):
    """How far a view of one stream can be trusted.

    CONNECTING: no connection. The view, if any, is what was true when the connection was lost.
    SYNCING: connected. The history is being fetched, or nothing has been published yet.
    LIVE: the view is the publisher's state as of the last batch applied. That was proved (by its digest where the
        publisher has the extension, else by its history and its last payload), and every batch since followed on.
    RECOVERING: something is missing or not proved, and a replay of it is under way.
    PARTIAL: history is missing, or nothing can prove the view. What it holds is true as far as every later batch
        could be read, but blocks may be missing from it, and the last batches may have been lost.
    DEAD: the publisher has been unreachable for too long. The view of it is empty.
    """

    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    RECOVERING = "recovering"
    PARTIAL = "partial"
    DEAD = "dead"


_CONNECTED = frozenset({StreamState.SYNCING, StreamState.LIVE, StreamState.RECOVERING, StreamState.PARTIAL})
_NO_CONNECTION = frozenset({StreamState.CONNECTING, StreamState.DEAD})

STATE_TRANSITIONS: dict[StreamState, frozenset[StreamState]] = {
    StreamState.CONNECTING: frozenset(
        {StreamState.SYNCING, StreamState.RECOVERING, StreamState.PARTIAL, StreamState.DEAD}
    ),
    StreamState.DEAD: frozenset({StreamState.SYNCING, StreamState.PARTIAL}),
    **{state: (_CONNECTED | _NO_CONNECTION) - {state} for state in _CONNECTED},
}
"""Each state to those that may follow on it. A new connection is never ``LIVE`` at once: the proof comes first."""


class SendReplayRequest(msgspec.Struct, frozen=True, gc=False):
    """Ask the replay channel. Answers are handed back under the number ``ask``.

    It replaces any question that is still open. Use one connection per question, so that a late answer to an older
    question is never taken for an answer to this one.

    Attributes:
        ask: number of the question, which is also the token of an extended one.
        start: the first batch wanted, or that would be next.
        verb: of an extended question; None asks plainly.
        epoch: the life of the publisher that is held, zeros for none.
    """

    ask: int
    start: int
    verb: ReplayVerb | None = None
    epoch: bytes = bytes(EPOCH_BYTES)

    @property
    def request(self) -> ReplayRequest:
        """The question as it goes on the wire."""
        return ReplayRequest(self.start, self.verb, request_token(self.ask), self.epoch)


def request_token(ask: int) -> bytes:
    """The token by which an extended answer names its question."""
    return ask.to_bytes(8, "big")


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Apply one batch to the view, then report back with ``on_cleared()`` or ``on_damaged()`` where that is so."""

    seq: int
    payload: bytes
    replayed: bool


class StartStaging(msgspec.Struct, frozen=True, gc=False):
    """A snapshot begins: make an empty staging view of this stream. The present view stays until it is replaced."""


class ApplyStaged(msgspec.Struct, frozen=True, gc=False):
    """Apply one payload to the staging view, then report back as for ``Apply``.

    ``is_snapshot_chunk`` marks a chunk of the folded base; ``seq`` is then the last batch that the base covers.
    """

    seq: int
    payload: bytes
    is_snapshot_chunk: bool


class CommitStaging(msgspec.Struct, frozen=True, gc=False):
    """The staging view is whole: it replaces the present one at once."""


class AbortStaging(msgspec.Struct, frozen=True, gc=False):
    """The snapshot cannot be used: forget the staging view."""


class Clear(msgspec.Struct, frozen=True, gc=False):
    """Forget every block of this stream; ``reason`` is for people."""

    reason: str


class RetryLater(msgspec.Struct, frozen=True, gc=False):
    """Call ``on_retry_due()`` after a pause that grows with ``failures``, the unanswered questions in a row."""

    failures: int


Instruction = SendReplayRequest | Apply | StartStaging | ApplyStaged | CommitStaging | AbortStaging | Clear | RetryLater


@dataclass(slots=True)
class CursorCounters:
    """What a cursor has seen since it was made; each only ever grows.

    Attributes:
        applied: batches given out to apply.
        recovered: the part of them that came by replay.
        duplicates: batches at or below the last applied number, not applied.
        gaps: times that a live batch did not follow on the one before.
        losses: times that the stream became ``PARTIAL``.
        restarts: times that the stream turned out to be another life of its publisher.
        replays_asked, replays_unanswered: replay requests, and those whose answer did not come to its end in time.
        replays_cut: extended answers that could not be used to their end: cut by the publisher, with a hole, or never
            ended.
        stale_replays: messages of an answer that nobody waits for any more.
        verified: times that the publisher's digest agreed.
        splices: times that it did not agree: what was applied is not what the publisher sent.
        snapshots: staging views that replaced the present one.
    """

    applied: int = 0
    recovered: int = 0
    duplicates: int = 0
    gaps: int = 0
    losses: int = 0
    restarts: int = 0
    replays_asked: int = 0
    replays_unanswered: int = 0
    replays_cut: int = 0
    stale_replays: int = 0
    verified: int = 0
    snapshots: int = 0
    splices: int = 0
