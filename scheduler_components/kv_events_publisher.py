"""SchedulerKvEventsPublisher: from the cache's records to the stream, every step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from scheduler_components.events import KVEventBatch
from scheduler_components.failure_log import FailureLog
from scheduler_components.metrics.kv_metrics import kv_metrics_of_load
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import (
    KvEventSink,
    KvEventSource,
    KvMetricsSink,
    LoadSource,
    NullKvMetricsSink,
    NullLoadSource,
)
from scheduler_components.values import PublisherStats

if TYPE_CHECKING:
    from scheduler_components.kv_events import KVEventsConfig

__all__ = ["SchedulerKvEventsPublisher"]

logger = logging.getLogger(__name__)

_TAKING = "taking KV events from the cache"
_PUBLISHING = "publishing KV events"
_WAITING = "sending KV events while the device works"
_COUNTING = "reading the event publisher's counters"
_METRICS = "emitting KV metrics"
_CLOSING = "closing the KV event publisher"


@dataclass(slots=True, kw_only=True)
class SchedulerKvEventsPublisher:
    """Takes a cache's events, stamps them with time and stream index, and hands them to the sink.

    Only the rank that owns its KV cache's stream publishes (``ParallelState.owns_kv_stream``): on any other rank
    the source's events are taken too, so that its record cannot grow, and nothing is handed on, whatever the sink.

    Nothing that a source or a sink raises reaches the scheduler's step. It is counted in ``failures`` and logged
    once per episode, and what is lost by it appears in ``stats().batches_dropped``.

    Attributes:
        parallel: decides who publishes, and as which stream.
        source: the cache that records events.
        sink: made by ``open_event_publisher``, or anything that takes batches.
        load: usually a ``LoadInquirer``; read by ``emit_kv_metrics``.
        metrics_sink: the way to the serving process.
        clock: wall-clock seconds since the epoch.
        failures: what went wrong so far.
    """

    parallel: ParallelState
    source: KvEventSource
    sink: KvEventSink
    load: LoadSource = field(default_factory=NullLoadSource)
    metrics_sink: KvMetricsSink = field(default_factory=NullKvMetricsSink)
    clock: Callable[[], float] = time.time
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))

    @classmethod
    def open(
        cls,
        config: str | KVEventsConfig | None,
        *,
        parallel: ParallelState,
        source: KvEventSource,
        load: LoadSource = NullLoadSource(),
        metrics_endpoint: str | None = None,
    ) -> SchedulerKvEventsPublisher:
        """Make one from what the operator wrote: a rank that owns a stream opens its sockets at its own ports.

        Args:
            config: text of ``--kv-events-config``, a ready config, or None for no events.
            parallel: a rank that owns no stream gets the null sink and opens no socket.
            source: the cache.
            load: read by ``emit_kv_metrics``.
            metrics_endpoint: where the serving process receives ``KvMetrics``; None sends none.

        Raises:
            ConfigError: the config or the endpoint cannot work; on every rank alike, owner or not.
            StartError: the machine refused a port.
        """
        # Imported here so that the component itself loads neither pyzmq nor pydantic.
        from scheduler_components.kv_events import open_event_publisher
        from scheduler_components.metrics import parse_kv_metrics_endpoint

        if metrics_endpoint is not None:
            parse_kv_metrics_endpoint(metrics_endpoint, bind=False)
        sink = open_event_publisher(config, parallel=parallel)
        publisher = cls(parallel=parallel, source=source, sink=sink, load=load)
        if metrics_endpoint is not None and parallel.reports_metrics:
            from scheduler_components.metrics import open_zmq_kv_metrics_sink

            try:
                publisher.metrics_sink = open_zmq_kv_metrics_sink(metrics_endpoint)
            except BaseException:
                sink.shutdown()
                raise
        return publisher

    def publish_kv_events(self) -> None:
        """Hand on what the cache recorded since the last call. Call it every step; nothing is sent for nothing.

        The batch is frozen before it leaves, so that no later change of the cache reaches the wire.
        """
        try:
            events = self.source.take_events()
        except Exception as error:  # noqa: BLE001 - events never raise into the step; counted and logged
            self.failures.failed(_TAKING, error)
            return
        self.failures.succeeded(_TAKING)
        if not events or not self.parallel.owns_kv_stream:
            return
        try:
            # A tuple stays the one that it is: ``ValidatedEvents`` of a cache need no second check.
            frozen = events if isinstance(events, tuple) else tuple(events)
            self.sink.publish(KVEventBatch(self.clock(), frozen, self.parallel.kv_stream_index))
        except Exception as error:  # noqa: BLE001 - as above; the batch is counted as dropped
            self.failures.failed(_PUBLISHING, error)
        else:
            self.failures.succeeded(_PUBLISHING)

    def idle(self) -> None:
        """Let the sink encode and send. Call it where the scheduler waits for its device."""
        try:
            self.sink.idle()
        except Exception as error:  # noqa: BLE001 - as above
            self.failures.failed(_WAITING, error)
        else:
            self.failures.succeeded(_WAITING)

    def flush(self) -> None:
        """Hand on and send what was recorded since the last step. Call it before a wait for requests.

        A cache that is flushed while the engine is idle records it outside of any step; readers would keep what is gone
        until the next request comes.
        """
        self.publish_kv_events()
        self.idle()

    def emit_kv_metrics(self) -> None:
        """Send this rank's slots and blocks to the serving process; ranks that do not report send nothing."""
        if not self.metrics_sink.wants_metrics or not self.parallel.reports_metrics:
            return
        try:
            self.metrics_sink.send(kv_metrics_of_load(self.load.get_loads()))
        except Exception as error:  # noqa: BLE001 - as above
            self.failures.failed(_METRICS, error)
        else:
            self.failures.succeeded(_METRICS)

    def stats(self) -> PublisherStats:
        """Return the sink's counters; a step whose events could not be drained or handed on is a dropped batch too."""
        try:
            stats = self.sink.stats()
        except Exception as error:  # noqa: BLE001 - as above
            self.failures.failed(_COUNTING, error)
            stats = PublisherStats()
        else:
            self.failures.succeeded(_COUNTING)
        lost = self.failures.counts.get(_TAKING, 0) + self.failures.counts.get(_PUBLISHING, 0)
        if not lost:
            return stats
        return msgspec.structs.replace(stats, batches_dropped=stats.batches_dropped + lost)

    def shutdown(self) -> None:
        """Publish the last step's events, then close both sinks. Safe to call twice; never raises."""
        self.publish_kv_events()
        for close in (self.sink.shutdown, self.metrics_sink.close):
            try:
                close()
            except Exception as error:  # noqa: BLE001 - the other sink must be closed all the same
                self.failures.failed(_CLOSING, error)
