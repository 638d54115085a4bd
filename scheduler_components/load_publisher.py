"""LoadPublisher: send the load of this replica to dispatchers when it changes, at a limited rate."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.validators import check_number
from scheduler_components.errors import ConfigError
from scheduler_components.load.load_stat import LOAD_HEARTBEAT_S
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import LoadSource, ReportSink
from scheduler_components.values import LoadSnapshot

if TYPE_CHECKING:
    from scheduler_components.kv_events import KVEventsConfig

__all__ = ["MIN_LOAD_INTERVAL_S", "GaugePacer", "LoadPublisher", "open_load_publisher"]

MIN_LOAD_INTERVAL_S = 0.05
"""20 samples per second follow a queue closely enough to balance it. A reader of 100 ranks receives 2,000 of them."""


class GaugePacer:
    """Decides when the load gauge, which is offered every step, is read and sent.

    The gauge is read at most every ``min_interval_s``. A sample is sent if it differs from the last one sent, or if the
    last one was sent ``heartbeat_s`` ago. A clock that is set back counts as no time passed, so it neither silences
    the gauge nor floods its readers.

    Attributes:
        sent: samples sent.
        throttled: offers within ``min_interval_s`` of the last read.
        unchanged: reads that found the sample sent last.

    Raises:
        ConfigError: an interval is negative or not finite, or the heartbeat is 0 or shorter than ``min_interval_s``.
    """

    __slots__ = (
        "min_interval_s", "heartbeat_s", "sent", "throttled", "unchanged",
        "_content", "_last_now", "_since_read_s", "_since_sent_s",
    )  # fmt: skip

    def __init__(self, *, min_interval_s: float = MIN_LOAD_INTERVAL_S, heartbeat_s: float = LOAD_HEARTBEAT_S) -> None:
        check_number("min_interval_s", min_interval_s, or_zero=True)
        check_number("heartbeat_s", heartbeat_s)
        if heartbeat_s < min_interval_s:
            raise ConfigError(
                "heartbeat_s", heartbeat_s, f"is shorter than min_interval_s={min_interval_s}", "give a longer one"
            )
        self.min_interval_s = min_interval_s
        self.heartbeat_s = heartbeat_s
        self.sent = self.throttled = self.unchanged = 0
        self._content: object = None
        self._last_now: float | None = None
        self._since_read_s = self._since_sent_s = math.inf

    def is_due(self, now: float) -> bool:
        """Return whether to read the gauge now; count an offer that is too early."""
        self._advance(now)
        if self._since_read_s < self.min_interval_s:
            self.throttled += 1
            return False
        return True

    def should_send(self, content: object, now: float) -> bool:
        """Return whether to send a sample with this content, which must not be None."""
        self._advance(now)
        self._since_read_s = 0.0
        if content == self._content and self._since_sent_s < self.heartbeat_s:
            self.unchanged += 1
            return False
        return True

    def on_sent(self, content: object, now: float) -> None:
        """Record the sample that was sent."""
        self._advance(now)
        self._since_sent_s = 0.0
        self._content = content
        self.sent += 1

    def _advance(self, now: float) -> None:
        if self._last_now is not None and now > self._last_now:
            self._since_read_s += now - self._last_now
            self._since_sent_s += now - self._last_now
        self._last_now = now

    def __repr__(self) -> str:
        return f"<GaugePacer: {self.sent} sent, {self.throttled} throttled, {self.unchanged} unchanged>"


logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class LoadPublisher:
    """Sends the load to its sinks when it has changed or the last report is old. The scheduler calls it every step.

    Only the rank that owns its KV stream sends, as with events. An exception of a source or sink never reaches the
    scheduler's step: ``failures`` counts it and logs each episode once, and the next step tries again. A sink that
    fails does not keep the load from the others.

    Attributes:
        parallel: decides whether this rank sends.
        load: usually a ``LoadInquirer``.
        sinks: receive the snapshots; ``open_load_publisher`` adds one for the load endpoint.
        pacer: limits the rate and sends heartbeats.
        clock: seconds from any origin.
        failures: counts failed reads and sends.
    """

    parallel: ParallelState
    load: LoadSource
    sinks: Sequence[ReportSink[LoadSnapshot]] = ()
    pacer: GaugePacer = field(default_factory=GaugePacer)
    clock: Callable[[], float] = time.monotonic
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))

    def publish_load(self) -> None:
        """Send the load if it is due. Call it at the end of every step, and at least once per heartbeat when idle."""
        if self.sinks and self.parallel.owns_kv_stream:
            now = self.clock()
            if self.pacer.is_due(now):
                self._offer(now)

    def flush(self) -> None:
        """Send a change that the pacer holds back. Call it before a wait of unknown length."""
        if self.sinks and self.parallel.owns_kv_stream:
            self._offer(self.clock())

    def _offer(self, now: float) -> None:
        sinks = [sink for sink in self.sinks if sink.wants_reports]
        if not sinks:
            return
        num_failed = self.failures.total
        content = None
        with self.failures.guard("reading the load"):
            load = self.load.get_loads()
            content = _content(load)
        if content is None or not self.pacer.should_send(content, now):
            return
        for place, sink in enumerate(sinks):
            with self.failures.guard(f"sending the load by sink {place} ({type(sink).__name__})"):
                sink.send(load)
        if self.failures.total == num_failed:
            self.pacer.on_sent(content, now)

    def close(self) -> None:
        """Close the sinks. Safe to call twice; never raises."""
        sinks, self.sinks = self.sinks, ()
        for sink in sinks:
            with self.failures.guard("closing the load publisher"):
                sink.close()


def _content(load: LoadSnapshot) -> tuple[object, ...]:
    """Return the fields whose change makes a report worth sending: all but its number, its time and decaying rates."""
    return (
        load.num_running_reqs,
        load.num_waiting_reqs,
        load.num_pending_tokens,
        load.num_waiting_uncached_tokens,
        load.num_used_tokens,
        load.num_total_tokens,
        load.max_total_num_tokens,
        load.max_running_requests,
        load.dispatched_watermarks,
        load.total_prefill_uncached_tokens,
        load.queues,
        load.disaggregation,
        load.lora,
    )


def open_load_publisher(
    config: str | Mapping[str, object] | KVEventsConfig | None,
    *,
    parallel: ParallelState,
    load: LoadSource,
    sinks: Sequence[ReportSink[LoadSnapshot]] = (),
    pacer: GaugePacer | None = None,
) -> LoadPublisher:
    """Open the load gauge of this rank's stream, from the configuration of its events.

    The rank binds ``load_endpoint`` at its own offset, independent of ``publisher``. Where ``auth`` is required, the
    same clients as for the events may connect. Every rank checks the whole configuration before it opens anything.
    The gauge opens nothing on a rank that owns no stream, and in an engine without ``load_endpoint``.

    Args:
        config: text of ``--kv-events-config``, its settings by name or parsed, or None for no load gauge.
        parallel: decides whether this rank sends, and for which stream.
        load: read when a report is due.
        sinks: further sinks of the same reports.
        pacer: other intervals than the default ones.

    Raises:
        ConfigError: the configuration does not fit this engine.
        StartError: the system refused the address.
    """
    publisher = LoadPublisher(parallel=parallel, load=load, sinks=tuple(sinks), pacer=pacer or GaugePacer())
    if not config:
        return publisher
    # Imported here so that the component itself imports neither pyzmq nor pydantic.
    from scheduler_components.kv_events import CurveServerKeys, KVEventsConfig
    from scheduler_components.load import open_zmq_load_sink

    settings = KVEventsConfig.read(config)
    plan = settings.port_plan(parallel.kv_stream_count)
    if plan.load is not None:
        plan.load.check_leaves_process(field="load_endpoint")
        if parallel.owns_kv_stream:
            access = CurveServerKeys.of(settings)
            gauge = open_zmq_load_sink(plan.load.offset(parallel.kv_stream_index), access=access)
            publisher.sinks = (gauge, *sinks)
    return publisher
