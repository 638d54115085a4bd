"""What a KV-event publisher reports: its counters, and the slots and blocks of its rank."""

from __future__ import annotations

import msgspec

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


class PublisherStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of one event publisher since it was opened.

    Attributes:
        batches_sent, events_sent, bytes_sent: passed to the PUB socket.
        events_refused: events that readers could not decode. The publisher leaves them out of their batch.
        batches_collapsed: batches merged with others because the queue of pending batches was full.
        batches_dropped: batches accepted by `publish()` and not sent before the deadline of `close()`.
        replays_served, batches_replayed: complete replay answers, and batches in them.
        replays_refused: replay requests that were malformed or over the client limit.
        replays_truncated: incomplete replay answers: the client was too slow, or the publisher closed.
        replays_open: answers in progress.
        batches_buffered, bytes_buffered: current content of the replay buffer.
        blocks_in_base: blocks in the snapshot: those of batches that left the replay buffer and were not removed since.
        bytes_in_base: size of the payloads with these blocks. A payload is rewritten when more than half of its blocks
            are removed. The snapshot takes another 100 bytes per block.
        batches_pending: batches accepted and not sent yet.
        lag_s: upper bound of the age of the oldest pending batch: the time since the publisher last emptied its
            queue; 0 without pending batches.
        last_sequence: sequence number of the last batch sent; -1 before the first.
        subscribers_seen: connections of live subscribers so far; tcp and ipc only.
        peers_refused: rejected connections, live and replay: missing or wrong keys, or not a ZeroMQ peer.
        open_bind_without_auth: 1 if the stream listens beyond loopback without authentication.
        replays_waiting: replay requests that wait for the end of an open answer.
        send_stalls: times that batches waited while the sockets stayed in use: a call was stuck for a second, or a
            signal handler's exception interrupted one. After the latter, sending goes on.
    """

    batches_sent: int = 0
    events_sent: int = 0
    bytes_sent: int = 0
    events_refused: int = 0
    batches_collapsed: int = 0
    batches_dropped: int = 0
    replays_served: int = 0
    batches_replayed: int = 0
    replays_refused: int = 0
    replays_truncated: int = 0
    replays_open: int = 0
    batches_buffered: int = 0
    bytes_buffered: int = 0
    blocks_in_base: int = 0
    bytes_in_base: int = 0
    batches_pending: int = 0
    lag_s: float = 0.0
    last_sequence: int = -1
    subscribers_seen: int = 0
    peers_refused: int = 0
    open_bind_without_auth: int = 0
    replays_waiting: int = 0
    send_stalls: int = 0
