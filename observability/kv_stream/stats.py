"""What one followed stream says of itself: values to show in a table, export, or compare in a test."""

from __future__ import annotations

import msgspec

from observability.kv_stream.instructions import StreamState

__all__ = ["StreamPosition", "StreamStats"]


class StreamPosition(msgspec.Struct, frozen=True, gc=False):
    """Where the view of one stream stands.

    Attributes:
        rank, state, last_seq: as in ``StreamStats``.
        is_settled: connected, with no recovery under way: the view will not get better by waiting.
    """

    rank: int
    state: StreamState
    last_seq: int
    is_settled: bool


class StreamStats(msgspec.Struct, frozen=True, gc=False):
    """One stream at one moment; counters run from when the subscriber was opened.

    Attributes:
        rank: the stream's number; endpoint: where it is read.
        state: how far the view of it can be trusted.
        is_extended: the publisher has the extension, so that its digest proves the view.
        last_seq: number of the last batch that the view has; one below the publisher's first before there is any.
        batches, events: applied to the view, replayed ones included.
        blocks_stored, blocks_removed: blocks in those events; duplicates count in the first.
        blocks_held: blocks in the view now, over all tiers.
        gaps: times that a live batch did not follow on the one before; recovered: batches that came by replay.
        losses: times that the stream became partial; restarts: times that the publisher was another.
        verified: times that the publisher's digest agreed; splices: times that it did not, and all began anew.
        snapshots: views that were swapped in whole.
        duplicates: batches at or below the last applied number.
        replays_asked, replays_unanswered: questions, and those that got no end marker in time.
        replays_cut: extended answers that led no further: cut by the publisher, with a hole, or never ended.
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
    is_extended: bool = False
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
    verified: int = 0
    splices: int = 0
    snapshots: int = 0
    duplicates: int = 0
    replays_asked: int = 0
    replays_unanswered: int = 0
    replays_cut: int = 0
    disconnects: int = 0
    decode_errors: int = 0
    bad_frames: int = 0
    rank_mismatches: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0
    lag_s: float | None = None
    last_error: str = ""
