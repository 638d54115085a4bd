"""The table of metrics about followed streams: what whoever follows a worker's events exports of its own recovery.

Paths are fields of ``StreamStats``. Each metric is labelled with the stream's ``rank``.
"""

from __future__ import annotations

from typing import Literal

from observability.metric import Metric

__all__ = ["STREAM_CATALOG", "STREAM_PREFIX", "STREAM_STATE", "render_stream_markdown"]

STREAM_PREFIX = "kv_stream_"


def _metric(kind: Literal["gauge", "counter"], name: str, unit: str, path: str, help: str) -> Metric:
    return Metric(name=f"{STREAM_PREFIX}{name}", kind=kind, unit=unit, help=help, path=path)


STREAM_STATE = _metric(
    "gauge", "state", "flag", "state", "1 for the state that the stream is in (label state), 0 for the others."
)

STREAM_CATALOG = (
    _metric("gauge", "is_extended", "flag", "is_extended", "1 when the publisher's digest proves the view."),
    _metric("gauge", "last_sequence", "sequence", "last_seq", "Number of the last batch that the view has."),
    _metric("gauge", "blocks_held", "blocks", "blocks_held", "Blocks in the view, over all tiers."),
    _metric("gauge", "lag_seconds", "seconds", "lag_s", "Receive time minus the time stamp of the last live batch."),
    _metric("counter", "batches_total", "batches", "batches", "Batches and chunks of snapshots applied."),
    _metric("counter", "events_total", "events", "events", "Events in them."),
    _metric("counter", "blocks_stored_total", "blocks", "blocks_stored", "Blocks stored by them."),
    _metric("counter", "blocks_removed_total", "blocks", "blocks_removed", "Blocks removed by them."),
    _metric("counter", "gaps_total", "gaps", "gaps", "Times that a live batch did not follow on the one before."),
    _metric("counter", "batches_recovered_total", "batches", "recovered", "Batches that came by replay."),
    _metric("counter", "losses_total", "losses", "losses", "Times that the stream became partial."),
    _metric("counter", "restarts_total", "restarts", "restarts", "Times that the publisher turned out to be another."),
    _metric("counter", "verified_total", "proofs", "verified", "Times that the publisher's digest agreed."),
    _metric("counter", "splices_total", "splices", "splices", "Times that it did not, and all began anew."),
    _metric("counter", "snapshots_total", "snapshots", "snapshots", "Views that were swapped in whole."),
    _metric("counter", "duplicates_total", "batches", "duplicates", "Batches at or below the last applied number."),
    _metric("counter", "replays_asked_total", "questions", "replays_asked", "Questions to the replay channel."),
    _metric(
        "counter", "replays_unanswered_total", "questions", "replays_unanswered", "The part without an end in time."
    ),
    _metric("counter", "replays_cut_total", "questions", "replays_cut", "Extended answers that led no further."),
    _metric("counter", "disconnects_total", "connections", "disconnects", "Times that the live connection was lost."),
    _metric("counter", "decode_errors_total", "errors", "decode_errors", "Batches or single events not readable."),
    _metric("counter", "bad_frames_total", "messages", "bad_frames", "Messages that are not frames of this wire."),
    _metric("counter", "rank_mismatches_total", "batches", "rank_mismatches", "Batches that name another rank."),
    _metric("counter", "unknown_removals_total", "blocks", "unknown_removals", "Removed blocks that were not held."),
    _metric("counter", "unknown_media_total", "events", "unknown_media", "Events that name an unknown medium."),
)


def render_stream_markdown() -> str:
    """Return the table as Markdown, for the documentation."""
    lines = ["| Metric | Kind | Unit | Meaning |", "| --- | --- | --- | --- |"]
    for metric in (STREAM_STATE, *STREAM_CATALOG):
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} |")
    return "\n".join(lines) + "\n"
