"""What one followed stream says of itself: a value to show in a table, export, or compare in a test."""

from __future__ import annotations

import msgspec

from observability.kv_stream.instructions import StreamState

__all__ = ["StreamStats"]


class StreamStats(msgspec.Struct, frozen=True, gc=False):
    """One stream at one moment; counters run from when the subscriber was opened.

    Attributes:
        rank: the stream's number; endpoint: where it is read.
        state: how far the view of it can be trusted.
        last_seq: number of the last batch applied, -1 before the first.
        batches, events: applied to the view, replayed ones included.
        blocks_stored, blocks_removed: blocks in those events; duplicates count in the first.
        blocks_held: blocks in the view now, over all tiers.
        gaps: times that a live batch did not follow on the one before; recovered: batches that came by replay.
        losses: times that history turned out to be gone; restarts: times that the publisher was another.
        duplicates: batches at or below the last applied number.
        replays_asked, replays_unanswered: questions, and those that got no end marker in time.
        disconnects: times that the live connection was lost.
        decode_errors: batches or single events that could not be read.
        bad_frames: messages that are not frames of this wire.
        rank_mismatches: batches that name another rank than the stream's.
        unknown_removals, unknown_media: events that changed nothing.
        lag_s: receive time minus the batch's own time stamp, of the last live batch; None before it. Two clocks
            of two machines may differ.
        last_error: the latest unreadable thing, for people.
    """

    rank: int
    endpoint: str
    state: StreamState
    last_seq: int = -1
    batches: int = 0
    events: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    blocks_held: int = 0
    gaps: int = 0
    recovered: int = 0
    losses: int = 0
    restarts: int = 0
    duplicates: int = 0
    replays_asked: int = 0
    replays_unanswered: int = 0
    disconnects: int = 0
    decode_errors: int = 0
    bad_frames: int = 0
    rank_mismatches: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0
    lag_s: float | None = None
    last_error: str = ""
