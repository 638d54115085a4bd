"""LoadPublisher: tells dispatchers how loaded this replica is, when it has changed and often enough."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_components.errors import ConfigError
from scheduler_components.failure_log import FailureLog
from scheduler_components.load import LOAD_HEARTBEAT_S
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import LoadSink, LoadSource, NullLoadSink
from scheduler_components.validators import check_number
from scheduler_components.values import LoadSnapshot

if TYPE_CHECKING:
    from scheduler_components.kv_events import KVEventsConfig

__all__ = ["MIN_LOAD_INTERVAL_S", "GaugePacer", "LoadPublisher", "open_load_publisher"]

MIN_LOAD_INTERVAL_S = 0.05
"""20 samples per second follow a queue closely enough to balance it, and a reader of 100 ranks gets 2,000 of them."""


class GaugePacer:
    """Decides about a gauge that is offered every step.

    A sample is due when the last look at the gauge was ``min_interval_s`` ago. What is found goes out when it is not
    what went out last, or when the last sample is ``heartbeat_s`` old. A clock that is set back counts as no time
    passed, so it neither silences the gauge nor floods its readers.

    Attributes:
        sent: samples that went out.
        throttled: offers that came too soon to look.
        unchanged: looks that found what was sent already.

    Raises:
        ConfigError: an interval is negative or not finite, or the heartbeat is 0 or shorter than the throttle.
    """

    __slots__ = (
        "min_interval_s", "heartbeat_s", "sent", "throttled", "unchanged",
        "_content", "_last_now", "_since_look_s", "_since_sent_s",
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
        self._since_look_s = self._since_sent_s = math.inf

    def is_due(self, now: float) -> bool:
        """Say whether to look at the gauge now; an offer that comes too soon is counted."""
        self._advance(now)
        if self._since_look_s < self.min_interval_s:
            self.throttled += 1
            return False
        return True

    def should_send(self, content: object, now: float) -> bool:
        """Say whether to send what a look found; ``content`` must not be None."""
        self._advance(now)
        self._since_look_s = 0.0
        if content == self._content and self._since_sent_s < self.heartbeat_s:
            self.unchanged += 1
            return False
        return True

    def on_sent(self, content: object, now: float) -> None:
        """Note what was sent."""
        self._advance(now)
        self._since_sent_s = 0.0
        self._content = content
        self.sent += 1

    def _advance(self, now: float) -> None:
        if self._last_now is not None and now > self._last_now:
            self._since_look_s += now - self._last_now
            self._since_sent_s += now - self._last_now
        self._last_now = now

    def __repr__(self) -> str:
        return f"<GaugePacer: {self.sent} sent, {self.throttled} throttled, {self.unchanged} repeated>"


logger = logging.getLogger(__name__)

_PUBLISHING = "publishing the load"
_CLOSING = "closing the load publisher"


@dataclass(slots=True, kw_only=True)
class LoadPublisher:
    """Offers the load to a sink every step, and hands it on when it is news or the last report grows old.

    Only the rank that owns its KV stream speaks, as with events. Nothing that a source or sink raises reaches the
    scheduler's step: it is counted in ``failures``, logged once per episode, and the next step tries again.

    Attributes:
        parallel: decides who speaks.
        load: usually a ``LoadInquirer``.
        sink: made by ``open_load_publisher``, or anything that takes snapshots.
        pacer: throttle, dedupe and heartbeat; counts what it held back.
        clock: seconds from any origin.
        failures: what went wrong so far.
    """

    parallel: ParallelState
    load: LoadSource
    sink: LoadSink
    pacer: GaugePacer = field(default_factory=GaugePacer)
    clock: Callable[[], float] = time.monotonic
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))

    def publish_load(self) -> None:
        """Report the load if it is due. Call it at the end of every step, and at least once per heartbeat when idle.

        While the throttle holds, this costs one look at the clock.
        """
        if not self.sink.wants_load or not self.parallel.owns_kv_stream:
            return
        now = self.clock()
        if self.pacer.is_due(now):
            self._offer(now)

    def flush(self) -> None:
        """Report what the throttle may have held back. Call it before a wait of unknown length."""
        if self.sink.wants_load and self.parallel.owns_kv_stream:
            self._offer(self.clock())

    def _offer(self, now: float) -> None:
        try:
            load = self.load.get_loads()
            content = _content(load)
            if not self.pacer.should_send(content, now):
                return
            self.sink.send(load)
        except Exception as error:  # noqa: BLE001 - a gauge never raises into the step; counted and logged
            self.failures.failed(_PUBLISHING, error)
            return
        self.pacer.on_sent(content, now)
        self.failures.succeeded(_PUBLISHING)

    def close(self) -> None:
        """Close the sink. Safe to call twice; never raises."""
        sink, self.sink = self.sink, NullLoadSink()
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - a scheduler that ends has other things to close
            self.failures.failed(_CLOSING, error)


def _content(load: LoadSnapshot) -> tuple[object, ...]:
    """What makes a report news. The number, the time and rates that decay by themselves do not."""
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
    config: str | KVEventsConfig | None,
    *,
    parallel: ParallelState,
    load: LoadSource,
    pacer: GaugePacer | None = None,
) -> LoadPublisher:
    """Gate, offset and open: the load gauge of this rank's stream, from the configuration of its events.

    ``load_endpoint`` is bound at this rank's offset, whatever ``publisher`` is, and lets in the same clients as the
    events where ``auth`` is required. The configuration is checked in full on every rank before anything opens. A
    rank that owns no stream, and an engine without ``load_endpoint``, get a publisher that does nothing.

    Args:
        config: text of ``--kv-events-config``, a ready config, or None for no load gauge.
        parallel: decides whether this rank speaks, and as which stream.
        load: read when a report is due.
        pacer: other intervals than the default ones.

    Raises:
        ConfigError: the configuration is not right for this engine.
        StartError: the machine refused the address.
    """
    publisher = LoadPublisher(parallel=parallel, load=load, sink=NullLoadSink(), pacer=pacer or GaugePacer())
    if not config:
        return publisher
    # Imported here so that the component itself loads neither pyzmq nor pydantic.
    from scheduler_components.kv_events import CurveServerKeys, KVEventsConfig
    from scheduler_components.load import check_load_endpoint, open_zmq_load_sink

    settings = KVEventsConfig.read(config)
    plan = settings.port_plan(parallel.kv_stream_count)
    if plan.load is not None:
        check_load_endpoint(plan.load)
        if parallel.owns_kv_stream:
            access = CurveServerKeys.of(settings)
            publisher.sink = open_zmq_load_sink(plan.load.offset(parallel.kv_stream_index), access=access)
    return publisher
