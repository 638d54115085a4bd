"""Values that metrics are made of: what a scheduler, its publisher and its counters say in one step."""

from __future__ import annotations

import msgspec

from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.metrics.request_latencies import LatencyTotals

__all__ = ["KvMetrics", "PublisherStats", "SchedulerStats", "SchedulerTotals"]


class KvMetrics(msgspec.Struct, frozen=True, gc=False):
    """Slots and blocks of one rank, as SGLang's schedulers push them to the serving process (0.5.x names).

    ``kv_active_blocks`` and ``kv_total_blocks`` count whole pages; the two ``perc`` and ``rate`` values run from
    0 to 1 as in the original.
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
        batches_sent, events_sent, bytes_sent: handed to the PUB socket.
        events_refused: could not be encoded; left out of their batch by name, the rest went out.
        batches_collapsed: merged with others into one, because more were pending than may be.
        batches_dropped: accepted by ``publish()`` and not sent before the deadline of ``close()``.
        replays_served, batches_replayed: finished replay answers, and batches in them.
        replays_refused: replay requests that were malformed or over the client limit.
        replays_truncated: replay answers cut before their end: the client was too slow, or the publisher closed.
        replays_open: answers being sent now.
        batches_buffered, bytes_buffered: kept for replay one by one, now.
        blocks_in_base: standing blocks of batches that left that window, now.
        batches_pending: accepted and not yet sent, now.
        lag_s: how long the oldest of them has waited at most, namely since the publisher last took a turn; 0 when there
            are none.
        last_sequence: number of the last batch sent, -1 before the first.
        subscribers_seen: connections of live subscribers that came about; tcp and ipc only.
        peers_refused: connections, live and replay, that did not: no or wrong keys, or no ZeroMQ peer.
        open_bind_without_auth: 1 when the stream listens beyond loopback without authentication.
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
    batches_pending: int = 0
    lag_s: float = 0.0
    last_sequence: int = -1
    subscribers_seen: int = 0
    peers_refused: int = 0
    open_bind_without_auth: int = 0


class SchedulerTotals(msgspec.Struct, frozen=True, gc=False):
    """Running totals of one scheduler since it started; each only ever grows.

    ``latencies`` are the histograms of its requests' times, where it keeps them; ``tiers`` are the counters of its
    hierarchical cache, where it has one.
    """

    num_requests_total: int = 0
    num_aborted_requests_total: int = 0
    num_retractions_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    evicted_tokens_total: int = 0
    latencies: LatencyTotals | None = None
    tiers: TierStats | None = None


class SchedulerStats(msgspec.Struct, frozen=True, gc=False):
    """Everything that one rank reports at the end of one step.

    ``labels`` are ``ParallelState.metric_labels``: they tell the ranks apart in one sink.
    """

    labels: tuple[tuple[str, str], ...]
    load: LoadSnapshot
    totals: SchedulerTotals = SchedulerTotals()
    publisher: PublisherStats = PublisherStats()
