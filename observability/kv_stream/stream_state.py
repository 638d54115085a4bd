"""What all cursors share: the states of a stream and their changes, counters, credit and feedback."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

__all__ = [
    "MAX_REPLAY_CREDIT",
    "STATE_TRANSITIONS",
    "UNCONNECTED",
    "CursorCounters",
    "StreamState",
    "ViewFeedback",
    "change_state",
]


class StreamState(StrEnum):
    """How far the view of one stream can be trusted.

    CONNECTING: there is no connection. The view, if any, is the one from before the connection was lost.
    SYNCING: connected. The subscriber fetches the history, or the publisher has not published anything yet.
    LIVE: the view equals the publisher's state after the last applied batch. A proof showed this (the digest where the
        publisher has the extension, else the history and the last payload), and every later batch was contiguous.
    RECOVERING: something is missing or not proved, and a replay of it is in progress.
    PARTIAL: history is missing, or the view cannot be proved. Every block in the view is correct as far as all later
        batches could be read, but blocks may be missing, and the last batches may have been lost.
    DEAD: the publisher has been unreachable for too long. The view is empty.
    """

    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    RECOVERING = "recovering"
    PARTIAL = "partial"
    DEAD = "dead"


UNCONNECTED = (StreamState.CONNECTING, StreamState.DEAD)

_CONNECTED = frozenset({StreamState.SYNCING, StreamState.LIVE, StreamState.RECOVERING, StreamState.PARTIAL})

STATE_TRANSITIONS: dict[StreamState, frozenset[StreamState]] = {
    StreamState.CONNECTING: frozenset(
        {StreamState.SYNCING, StreamState.RECOVERING, StreamState.PARTIAL, StreamState.DEAD}
    ),
    StreamState.DEAD: frozenset({StreamState.SYNCING, StreamState.PARTIAL}),
    **{state: (_CONNECTED | frozenset(UNCONNECTED)) - {state} for state in _CONNECTED},
}
"""Each state and the states that may follow it. A new connection never becomes ``LIVE`` directly: it needs a proof."""


MAX_REPLAY_CREDIT = 4
"""Enough for a status, an incremental replay, a snapshot and one answer that was cut, without a pause."""


@dataclass(slots=True)
class CursorCounters:
    """What a cursor has seen since it was created. Every counter only grows, except for ``credit``.

    Attributes:
        applied: batches handed out to apply.
        recovered: those of them that came by replay.
        duplicates: batches at or below the last applied number, not applied.
        gaps: live batches that did not follow the one before.
        losses: times that the stream became ``PARTIAL``.
        restarts: times that the stream turned out to belong to another epoch of its publisher.
        replays_asked: replay requests.
        replays_unanswered: replay requests whose answer did not end in time.
        replays_cut: extended answers that could not be used to their end: cut by the publisher, with a hole, or never
            ended.
        stale_replays: messages that answer an older request.
        verified: times that the publisher's digest matched.
        splices: times that it did not match: the applied batches are not what the publisher sent.
        snapshots: staging views that replaced the current one.
        credit: requests that may be sent now. The follower takes one for each request that it sends, holds a request
            back while there is none, and calls ``on_credit_available`` when it has restored some.
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
    credit: int = MAX_REPLAY_CREDIT


def change_state(old: StreamState, new: StreamState, counters: CursorCounters) -> StreamState:
    """Return ``new`` after checking it against ``STATE_TRANSITIONS``, and count a change to ``PARTIAL`` as a loss."""
    if new is not old:
        assert new in STATE_TRANSITIONS[old], f"{old} may not become {new}"
        counters.losses += new is StreamState.PARTIAL
    return new


class ViewFeedback(Enum):
    """What a cursor must know of the batch that was just applied.

    Attributes:
        CLEARED: it cleared all blocks.
        DAMAGED: a part of it could not be read, so the view may differ from the publisher's state.
    """

    CLEARED = auto()
    DAMAGED = auto()
