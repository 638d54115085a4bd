"""What a KV-event publisher reports: its counters, and the slots and blocks of its rank."""

from __future__ import annotations

from typing import Annotated

import msgspec

from scheduler_components.values.metric import counter, gauge

__all__ = ["KvMetrics", "PublisherStats"]


class KvMetrics(msgspec.Struct, frozen=True, gc=False):
    """Slots and blocks of one rank, as SGLang's schedulers push them to the serving process (0.5.x names).

    `kv_active_blocks` and `kv_total_blocks` count whole pages. The ``perc`` and ``rate`` values range from 0 to 1,
    as in SGLang.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0
    data_parallel_rank: int = 0


# fmt: off
class PublisherStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of one event publisher since it was opened.

    ``lag_s`` is an upper bound of the age of the oldest pending batch: the time since the publisher last emptied its
    queue. ``subscribers_seen`` counts tcp and ipc only. A payload in the snapshot (``bytes_in_base``) is rewritten when
    more than half of its blocks are removed; the snapshot takes another 100 bytes per block. Sending goes on after a
    stall that a signal handler's exception caused.
    """

    batches_sent: Annotated[int, counter("kv_events_batches_sent_total", "batches", "KV-event batches sent.")] = 0
    events_sent: Annotated[int, counter("kv_events_sent_total", "events", "KV events sent.")] = 0
    bytes_sent: Annotated[int, counter("kv_events_bytes_sent_total", "bytes", "Bytes of KV-event batches sent.")] = 0
    events_refused: Annotated[int, counter("kv_events_refused_total", "events",
        "Invalid KV events, left out of their batch.")] = 0
    batches_dropped: Annotated[int, counter("kv_events_batches_dropped_total", "batches",
        "KV-event batches accepted and not sent: overflow, shutdown or a failing publisher.")] = 0
    batches_collapsed: Annotated[int, counter("kv_events_batches_collapsed_total", "batches",
        "KV-event batches merged into one because too many were pending; no state is lost.")] = 0
    send_stalls: Annotated[int, counter("kv_events_send_stalls_total", "stalls",
        "Times that batches waited because a call was stuck for a second, or interrupted by an exception.")] = 0
    replays_served: Annotated[int, counter("kv_events_replays_served_total", "replays",
        "Replay answers sent completely.")] = 0
    batches_replayed: Annotated[int, counter("kv_events_batches_replayed_total", "batches",
        "Batches sent in replay answers.")] = 0
    replays_refused: Annotated[int, counter("kv_events_replays_refused_total", "replays",
        "Replay requests refused.")] = 0
    replays_truncated: Annotated[int, counter("kv_events_replays_truncated_total", "replays",
        "Replay answers sent partially: the client left or was too slow, or the publisher closed.")] = 0
    subscribers_seen: Annotated[int, counter("kv_events_subscribers_seen_total", "connections",
        "Connections of subscribers to the live stream.")] = 0
    peers_refused: Annotated[int, counter("kv_events_peers_refused_total", "connections",
        "Connections refused: no or wrong keys, or no ZeroMQ peer.")] = 0
    replays_open: Annotated[int, gauge("kv_events_replays_open", "replays", "Replay answers being sent.")] = 0
    replays_waiting: Annotated[int, gauge("kv_events_replays_waiting", "replays",
        "Replay requests that wait for a free slot.")] = 0
    batches_buffered: Annotated[int, gauge("kv_events_batches_buffered", "batches", "Batches kept for replay.")] = 0
    bytes_buffered: Annotated[int, gauge("kv_events_bytes_buffered", "bytes", "Bytes kept for replay.")] = 0
    batches_pending: Annotated[int, gauge("kv_events_batches_pending", "batches",
        "Batches accepted and not yet sent.")] = 0
    blocks_in_base: Annotated[int, gauge("kv_events_blocks_in_base", "blocks",
        "Blocks of the snapshot: stored by batches before the replay buffer and not removed since.")] = 0
    bytes_in_base: Annotated[int, gauge("kv_events_bytes_in_base", "bytes",
        "Bytes of the payloads that the snapshot keeps.")] = 0
    lag_s: Annotated[float, gauge("kv_events_lag_seconds", "seconds", "Age of the oldest batch not yet sent.")] = 0.0
    last_sequence: Annotated[int, gauge("kv_events_last_sequence", "sequence",
        "Number of the last batch sent, or -1.")] = -1
    open_bind_without_auth: Annotated[int, gauge("kv_events_open_bind_without_auth", "flag",
        "1 when the stream listens beyond loopback without authentication.")] = 0
