"""Position and statistics of one stream, as users and collectors read them.

The annotation of a field describes its metric.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from observability.kv_stream.stream_state import StreamState
from scheduler_components.values import PublisherStats
from scheduler_components.values.metric import counter, gauge

__all__ = ["MAX_STREAMS", "LogStats", "RelayedStreamStats", "StreamPosition", "StreamStats"]

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


# fmt: off
class StreamStats(msgspec.Struct, frozen=True, gc=False):
    """State and counters of one stream since its subscriber was opened.

    ``state`` says how far the view can be trusted. ``last_seq`` is one below the publisher's first number for an empty
    view. Batches and events include replayed ones; duplicates count as stored.

    Attributes:
        endpoint: where the subscriber reads the stream.
        lag_s: None before the first live batch. Clocks of two machines may differ.
        newest_batch_age_s: None while no batch in the view has a time stamp, as in a snapshot. The reader's wall clock
            minus the publisher's, so the difference of the two clocks is added: it may be below 0. It grows while the
            publisher has nothing to send.
        last_error: the latest unreadable batch or event, for an operator; of a log also why the writer stores nothing.
    """

    rank: int
    endpoint: str
    state: Annotated[StreamState, gauge("kv_stream_state", "flag",
        "1 for the state that the stream is in (label state), 0 for the others.")]
    is_extended: Annotated[bool, gauge("kv_stream_is_extended", "flag",
        "1 if the publisher has a digest, which verifies the view.")] = False
    last_seq: Annotated[int, gauge("kv_stream_last_sequence", "sequence", "Number of the last batch in the view.")] = -1
    blocks_held: Annotated[int, gauge("kv_stream_blocks_held", "blocks", "Blocks in the view, over all tiers.")] = 0
    lag_s: Annotated[float | None, gauge("kv_stream_lag_seconds", "seconds",
        "Receive time minus timestamp of the last live batch.")] = None
    newest_batch_age_s: Annotated[float | None, gauge("kv_stream_newest_batch_age_seconds", "seconds",
        "Time now minus timestamp of the newest batch in the view.")] = None
    batches: Annotated[int, counter("kv_stream_batches_total", "batches", "Batches and snapshot chunks applied.")] = 0
    events: Annotated[int, counter("kv_stream_events_total", "events", "Events in these batches.")] = 0
    blocks_stored: Annotated[int, counter("kv_stream_blocks_stored_total", "blocks",
        "Blocks stored by these events.")] = 0
    blocks_removed: Annotated[int, counter("kv_stream_blocks_removed_total", "blocks",
        "Blocks removed by these events.")] = 0
    gaps: Annotated[int, counter("kv_stream_gaps_total", "gaps", "Gaps in the numbers of live batches.")] = 0
    recovered: Annotated[int, counter("kv_stream_batches_recovered_total", "batches",
        "Batches received by replay.")] = 0
    losses: Annotated[int, counter("kv_stream_losses_total", "losses", "Times that the stream became partial.")] = 0
    restarts: Annotated[int, counter("kv_stream_restarts_total", "restarts", "Restarts of the publisher.")] = 0
    verified: Annotated[int, counter("kv_stream_verified_total", "proofs",
        "Times that the publisher's digest matched.")] = 0
    splices: Annotated[int, counter("kv_stream_splices_total", "splices",
        "Times that the publisher's digest did not match, and the view was rebuilt.")] = 0
    snapshots: Annotated[int, counter("kv_stream_snapshots_total", "snapshots", "Snapshots that replaced a view.")] = 0
    duplicates: Annotated[int, counter("kv_stream_duplicates_total", "batches",
        "Batches at or below the last applied number.")] = 0
    replays_asked: Annotated[int, counter("kv_stream_replays_asked_total", "questions",
        "Requests to the replay channel.")] = 0
    replays_unanswered: Annotated[int, counter("kv_stream_replays_unanswered_total", "questions",
        "Replay requests without a complete answer in time.")] = 0
    replays_cut: Annotated[int, counter("kv_stream_replays_cut_total", "questions",
        "Extended replay answers that could not be used completely.")] = 0
    disconnects: Annotated[int, counter("kv_stream_disconnects_total", "connections",
        "Times that the live connection was lost.")] = 0
    decode_errors: Annotated[int, counter("kv_stream_decode_errors_total", "errors",
        "Batches or single events that could not be decoded.")] = 0
    bad_frames: Annotated[int, counter("kv_stream_bad_frames_total", "messages",
        "Messages that are not frames of this protocol.")] = 0
    other_topics: Annotated[int, counter("kv_stream_other_topics_total", "messages",
        "Skipped messages of another topic with the same beginning.")] = 0
    rank_mismatches: Annotated[int, counter("kv_stream_rank_mismatches_total", "batches",
        "Batches of another rank.")] = 0
    unknown_removals: Annotated[int, counter("kv_stream_unknown_removals_total", "blocks",
        "Removed blocks that were not in the view.")] = 0
    unknown_media: Annotated[int, counter("kv_stream_unknown_media_total", "events",
        "Events with an unknown medium.")] = 0
    fenced: Annotated[int, counter("kv_stream_fenced_total", "messages",
        "Skipped messages of another epoch in the same log.")] = 0
    last_error: str = ""


class LogStats(msgspec.Struct, gc=False):
    """State and counters of one written stream since it was opened. Its writer increments the counters.

    Attributes:
        subject: of the messages.
        collapsed: batches that only the snapshot has: the broker was unreachable for too long, they were larger than
            its messages, or another client had used their id.
    """

    rank: int
    subject: str = ""
    is_connected: Annotated[bool, gauge("kv_log_is_connected", "flag", "1 while the broker is connected.")] = False
    is_superseded: Annotated[bool, gauge("kv_log_is_superseded", "flag",
        "1 after another writer has taken over the stream and this one has stopped.")] = False
    last_seq: Annotated[int, gauge("kv_log_last_sequence", "sequence", "Number of the last batch.")] = -1
    waiting: Annotated[int, gauge("kv_log_batches_waiting", "batches",
        "Batches that the broker has not stored yet.")] = 0
    stored: Annotated[int, counter("kv_log_batches_stored_total", "batches",
        "Batches that the broker has acknowledged.")] = 0
    retried: Annotated[int, counter("kv_log_batches_retried_total", "batches",
        "Batches sent again because no acknowledgement arrived.")] = 0
    collapsed: Annotated[int, counter("kv_log_batches_collapsed_total", "batches",
        "Batches sent only as part of a snapshot.")] = 0
    bases: Annotated[int, counter("kv_log_bases_total", "bases", "Snapshots stored.")] = 0
    failures: Annotated[int, counter("kv_log_failures_total", "failures",
        "Batches and snapshots that the broker refused.")] = 0
    broker_losses: Annotated[int, counter("kv_log_broker_losses_total", "losses",
        "Losses of the broker connection.")] = 0


class RelayedStreamStats(msgspec.Struct, frozen=True):
    """State of one published stream.

    Attributes:
        rank: of the stream.
        state: that of its least trusted source.
        is_whole: every source is live.
        num_sources: its sources, including those that do not answer.
        block_size: tokens per block of the last stored event, None before the first.
        publisher: the counters of its sink.
    """

    rank: int
    state: StreamState
    is_whole: Annotated[bool, gauge("kv_relay_is_whole", "flag", "1 while every source of the stream is complete.")]
    num_sources: Annotated[int, gauge("kv_relay_sources", "sources",
        "Sources of the stream, including those that do not answer.")]
    block_size: int | None
    publisher: PublisherStats
