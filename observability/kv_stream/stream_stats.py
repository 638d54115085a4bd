"""Position and statistics of one stream, as users and collectors read them."""

from __future__ import annotations

import msgspec

from observability.kv_stream.stream_state import StreamState

__all__ = ["MAX_STREAMS", "StreamPosition", "StreamStats"]

MAX_STREAMS = 1_024
"""Per worker and per subscriber. A stream costs three file descriptors; no engine comes near this limit."""


class StreamPosition(msgspec.Struct, frozen=True, gc=False):
    """The position of one stream's view.

    Attributes:
        rank, state, last_seq: as in ``StreamStats``.
        is_settled: connected, without a recovery in progress: waiting will not improve the view.
    """

    rank: int
    state: StreamState
    last_seq: int
    is_settled: bool


class StreamStats(msgspec.Struct, frozen=True, gc=False):
    """State and counters of one stream since its subscriber was opened.

    Attributes:
        rank: number of the stream.
        endpoint: where the subscriber reads it.
        state: how far the view can be trusted.
        is_extended: the publisher has the extension, and its digest proves the view.
        last_seq: number of the last batch in the view; one below the publisher's first number for an empty view.
        batches, events: applied to the view, including replayed ones.
        blocks_stored, blocks_removed: blocks in those events; duplicates count as stored.
        blocks_held: blocks in the view now, over all tiers.
        gaps, recovered, losses, restarts, duplicates: see ``CursorCounters``.
        verified, splices, snapshots: likewise.
        replays_asked, replays_unanswered, replays_cut: likewise.
        disconnects: times that the live connection was lost.
        decode_errors: batches or single events that could not be read.
        bad_frames: messages that are not frames of this wire.
        other_topics: skipped live messages of another topic that begins with the stream's topic.
        rank_mismatches: batches that name another rank than the stream's.
        unknown_removals, unknown_media: events that changed nothing.
        fenced: skipped messages of another epoch in the same log; only JetStream has them.
        lag_s: receive time minus the batch's own time stamp, of the last live batch; None before the first. Clocks of
            two machines may differ.
        newest_batch_age_s: time now minus the time stamp of the newest batch in the view, live or replayed; None while
            no batch in the view has one, as in a snapshot. The reader's wall clock minus the publisher's, so the
            difference of the two clocks is added: it may be below 0. It grows while the publisher has nothing to send.
        last_error: the latest unreadable batch or event, for an operator; of a log also why the writer stores nothing.
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
    other_topics: int = 0
    rank_mismatches: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0
    fenced: int = 0
    lag_s: float | None = None
    newest_batch_age_s: float | None = None
    last_error: str = ""
