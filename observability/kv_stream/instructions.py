"""What a stream cursor says: its states, its instructions to whoever owns the sockets, and its counters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

__all__ = [
    "Apply",
    "AskReplay",
    "Clear",
    "CursorCounters",
    "Instruction",
    "RetryLater",
    "StreamState",
]


class StreamState(StrEnum):
    """How far a view of one stream can be trusted.

    CONNECTING: no connection; the view, if any, is what was true when it was lost.
    SYNCING: connected; the history is being fetched, or nothing has been published yet.
    LIVE: the view is the publisher's state as of the last batch applied.
    RECOVERING: something is missing or unproved, and a replay of it is under way.
    PARTIAL: history is missing. What the view holds is true as far as every later batch could be read, but blocks
        may be missing from it.
    DEAD: the publisher has been unreachable for too long; the view of it is empty.
    """

    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    RECOVERING = "recovering"
    PARTIAL = "partial"
    DEAD = "dead"


class AskReplay(msgspec.Struct, frozen=True, gc=False):
    """Ask the replay channel for every batch from ``start``; answers are handed back under the number ``ask``.

    It replaces any question still open. Use a connection of its own for each, so that a late answer to an older
    one is never taken for an answer to this one.
    """

    ask: int
    start: int


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Apply one batch to the view, then report back with ``cleared()`` or ``damaged()`` where that is so."""

    seq: int
    payload: bytes
    replayed: bool


class Clear(msgspec.Struct, frozen=True, gc=False):
    """Forget every block of this stream; ``reason`` is for people."""

    reason: str


class RetryLater(msgspec.Struct, frozen=True, gc=False):
    """Call ``retry()`` after a pause that grows with ``failures``, the unanswered questions in a row."""

    failures: int


Instruction = AskReplay | Apply | Clear | RetryLater


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
        asks, unanswered: replay questions, and those whose answer did not come to its end in time.
        stale_answers: batches of an answer that nobody waits for any more.
    """

    applied: int = 0
    recovered: int = 0
    duplicates: int = 0
    gaps: int = 0
    losses: int = 0
    restarts: int = 0
    asks: int = 0
    unanswered: int = 0
    stale_answers: int = 0
