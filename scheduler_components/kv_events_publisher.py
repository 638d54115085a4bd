"""SchedulerKvEventsPublisher: take the events that the cache recorded and publish them, every step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.events import AllBlocksCleared, KVCacheEvent, KVEventBatch
from scheduler_components.parallel_state import ParallelState
from scheduler_components.values import KvMetrics, PublisherStats

if TYPE_CHECKING:
    from scheduler_components.kv_events import KVEventsConfig
    from scheduler_components.ports import KvEventSink, KvEventSource, LoadSource, ReportSink
    from scheduler_components.values import LoadSnapshot

__all__ = ["SchedulerKvEventsPublisher", "kv_metrics_of_load"]

logger = logging.getLogger(__name__)

_TAKING = "taking KV events from the cache"
_PUBLISHING = "publishing KV events"
_IDLE = "sending KV events while the device works"
_STATS = "reading the event publisher's counters"
_METRICS = "emitting KV metrics"
_CLOSING = "closing the KV event publisher"

_FLUSH_POLL_S = 0.001
"""Time for a sink's thread to send what is pending, which takes it milliseconds."""


@dataclass(slots=True, kw_only=True)
class SchedulerKvEventsPublisher:
    """Take a cache's events, stamp them with the time and the stream's index, and pass them to the sink.

    Only the rank that owns the stream of its KV cache publishes (``ParallelState.owns_kv_stream``). On every other rank
    the publisher takes the events and drops them, so that the cache's record cannot grow.

    An exception of the source or of the sink never reaches the scheduler's step. ``failures`` counts it and logs it
    once per episode. ``stats().batches_dropped`` includes the batches lost by it.

    Attributes:
        parallel: decides whether this rank publishes, and as which stream.
        source: the cache that records events.
        sink: opened by ``open_event_publisher``, or any other ``KvEventSink``.
        load: usually a ``LoadInquirer``; read by ``emit_kv_metrics``.
        metrics_sink: sends ``KvMetrics`` to the serving process. Without it or without ``load``, none are sent.
        clock: returns wall-clock seconds since 1970.
        failures: counts the exceptions since the start.
    """

    parallel: ParallelState
    source: KvEventSource
    sink: KvEventSink
    load: LoadSource | None = None
    metrics_sink: ReportSink[KvMetrics] | None = None
    clock: Callable[[], float] = time.time
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))

    @classmethod
    def open(
        cls,
        config: str | Mapping[str, object] | KVEventsConfig | None,
        *,
        parallel: ParallelState,
        source: KvEventSource,
        load: LoadSource | None = None,
        metrics_endpoint: str | None = None,
    ) -> SchedulerKvEventsPublisher:
        """Open the publisher that the configuration describes, with this rank's own sockets and ports.

        Args:
            config: text of ``--kv-events-config``, its settings by name, a ``KVEventsConfig``, or None for no events.
            parallel: a rank that owns no stream gets the null sink and opens no socket.
            source: the cache.
            load: read by ``emit_kv_metrics``.
            metrics_endpoint: where the serving process receives ``KvMetrics``; None sends none.

        Raises:
            ConfigError: the config or the endpoint is invalid. Every rank raises it, also one that owns no stream.
            StartError: the system refused a port.
        """
        # Imported here so that the component itself loads neither pyzmq nor pydantic.
        from scheduler_components.kv_events import open_event_publisher

        if metrics_endpoint is not None:
            from scheduler_components.metrics.zmq_kv_metrics import open_zmq_kv_metrics_sink, parse_kv_metrics_endpoint

            parse_kv_metrics_endpoint(metrics_endpoint, bind=False)
        sink = open_event_publisher(config, parallel=parallel)
        publisher = cls(parallel=parallel, source=source, sink=sink, load=load)
        if metrics_endpoint is not None and parallel.reports_metrics:
            try:
                publisher.metrics_sink = open_zmq_kv_metrics_sink(metrics_endpoint)
            except BaseException:
                sink.shutdown()
                raise
        return publisher

    def publish_kv_events(self) -> None:
        """Publish the events that the cache recorded since the last call, as one batch. Call it every step.

        Without events no batch is sent. The batch holds a tuple of frozen events, so later changes of the cache cannot
        alter it.
        """
        events: Sequence[KVCacheEvent] = ()
        with self.failures.guard(_TAKING):
            events = self.source.take_events()
        if events:
            # A tuple keeps its type: the encoder skips its checks for the ``ValidatedEvents`` of a cache.
            self._publish(events if isinstance(events, tuple) else tuple(events))

    def publish_all_cleared(self) -> None:
        """Publish that this rank holds no block any more. Call it before ``shutdown`` when the engine stops.

        Without it, readers keep the blocks of a stopped engine until they notice its absence.
        """
        self.publish_kv_events()
        self._publish((AllBlocksCleared(),))

    def _publish(self, events: tuple[KVCacheEvent, ...]) -> None:
        if not self.parallel.owns_kv_stream:
            return
        with self.failures.guard(_PUBLISHING):
            self.sink.publish(KVEventBatch(self.clock(), events, self.parallel.kv_stream_index))

    def idle(self) -> None:
        """Let the sink encode and send. Call it where the scheduler waits for its device."""
        with self.failures.guard(_IDLE):
            self.sink.idle()

    def flush(self, deadline_s: float = 0.0) -> bool:
        """Publish and send the events that were recorded since the last step. Call it before waiting for requests.

        A flush of the cache in an idle engine records events outside of any step. Without this call, readers would
        keep the removed blocks until the next request arrives.

        Args:
            deadline_s: time to wait, in seconds, for a thread of the sink that sends. With 0 it sends what is left.

        Returns:
            True if every batch has its number, which ``stats().last_sequence`` then shows.
        """
        self.publish_kv_events()
        with self.failures.guard(_IDLE):
            until_s = time.monotonic() + deadline_s
            self.sink.idle()
            while self.sink.stats().batches_pending:
                if time.monotonic() >= until_s:
                    return False
                time.sleep(_FLUSH_POLL_S)
                self.sink.idle()
            return True
        return False

    def emit_kv_metrics(self) -> None:
        """Send this rank's slots and blocks to the serving process, if this rank reports metrics."""
        sink, load = self.metrics_sink, self.load
        if sink is not None and load is not None and sink.wants_reports and self.parallel.reports_metrics:
            with self.failures.guard(_METRICS):
                sink.send(kv_metrics_of_load(load.get_loads()))

    def stats(self) -> PublisherStats:
        """Return the sink's counters. A batch that could not be taken or published counts as dropped, too."""
        stats = PublisherStats()
        with self.failures.guard(_STATS):
            stats = self.sink.stats()
        num_lost = self.failures.counts.get(_TAKING, 0) + self.failures.counts.get(_PUBLISHING, 0)
        if not num_lost:
            return stats
        return msgspec.structs.replace(stats, batches_dropped=stats.batches_dropped + num_lost)

    def shutdown(self) -> None:
        """Publish the last step's events, then close both sinks. Safe to call twice; never raises."""
        self.publish_kv_events()
        with self.failures.guard(_CLOSING):
            self.sink.shutdown()
        if self.metrics_sink is not None:
            with self.failures.guard(_CLOSING):
                self.metrics_sink.close()


def kv_metrics_of_load(load: LoadSnapshot) -> KvMetrics:
    """Return a load snapshot in request slots and KV blocks.

    A partly used page counts as one active block. Tokens after the last whole page of the pool are no block, so the
    active blocks never exceed the total.
    """
    page_size = max(1, load.page_size)
    total_blocks = load.max_total_num_tokens // page_size
    return KvMetrics(
        request_active_slots=load.num_running_reqs,
        request_total_slots=load.max_running_requests,
        kv_active_blocks=min(total_blocks, -(-load.num_used_tokens // page_size)),
        kv_total_blocks=total_blocks,
        num_requests_waiting=load.num_waiting_reqs,
        gpu_cache_usage_perc=load.token_usage,
        gpu_prefix_cache_hit_rate=load.cache_hit_rate,
        data_parallel_rank=load.dp_rank,
    )
