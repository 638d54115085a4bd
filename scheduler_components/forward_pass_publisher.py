"""ForwardPassPublisher: report what each forward pass computed and what waits, for planners.

A planner fits the duration of a step to what the step computed. It needs each step for that, and `/metrics` has sums
over many. SGLang and Dynamo's scheduler for vLLM send one message per forward pass. This component sends the same one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.validators import check_number
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullReportSink, ReportSink
from scheduler_components.values import (
    FORWARD_PASS_VERSION,
    ForwardPassMetrics,
    ForwardPassStats,
    QueuedRequestMetrics,
    ScheduledRequestMetrics,
)

__all__ = [
    "FORWARD_PASS_HEARTBEAT_S",
    "ForwardPassPublisher",
    "WaitingQueue",
    "WaitingRequest",
    "ScheduledPart",
    "ScheduledRequest",
    "count_scheduled",
    "count_queued",
]

FORWARD_PASS_HEARTBEAT_S = 1.0
"""SGLang's (0.5.23) and Dynamo's interval between two messages of an idle engine."""

logger = logging.getLogger(__name__)

_SENDING = "sending forward-pass metrics"
_CLOSING = "closing the forward-pass metrics"


class ScheduledRequest(Protocol):
    """A scheduled request: the scheduler's own class."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        ...


class ScheduledPart(Protocol):
    """The positions of one request that a pass computes."""

    @property
    def request(self) -> ScheduledRequest:
        """The request."""
        ...

    @property
    def start(self) -> int:
        """The first computed position: so many tokens before it have their KV."""
        ...

    @property
    def end(self) -> int:
        """The position after the last computed one."""
        ...

    @property
    def is_prefill(self) -> bool:
        """False for the one new position of a decode."""
        ...


class WaitingRequest(Protocol):
    """A waiting request: the scheduler's own class."""

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill if none is cached: the prompt, and the output generated before a retraction."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated before a retraction; 0 for a new request."""
        ...


class WaitingQueue(Protocol):
    """The queue of waiting requests: the scheduler itself. Read late, so it may rebind ``self.waiting``."""

    @property
    def waiting(self) -> Iterable[WaitingRequest]:
        """Requests that wait for prefill."""
        ...


def count_scheduled(parts: Iterable[ScheduledPart]) -> ScheduledRequestMetrics:
    """Count the requests and tokens of a pass. Variances are exact before their division, also for long contexts."""
    num_prefills = num_tokens = num_kv_tokens = num_decodes = 0
    length_sum = length_squares = context_sum = context_squares = 0
    for part in parts:
        end = part.end
        if part.is_prefill:
            start, length = part.start, part.request.num_prompt_tokens
            num_prefills += 1
            num_tokens += end - start
            num_kv_tokens += start
            length_sum += length
            length_squares += length * length
        else:
            num_decodes += 1
            context_sum += end
            context_squares += end * end
    return ScheduledRequestMetrics(
        num_prefills,
        num_tokens,
        _variance(num_prefills, length_sum, length_squares),
        num_kv_tokens,
        num_decodes,
        context_sum,
        _variance(num_decodes, context_sum, context_squares),
    )


def count_queued(requests: Iterable[WaitingRequest]) -> QueuedRequestMetrics:
    """Count the waiting requests: new ones as prefills, retracted ones as decodes, as SGLang does."""
    num_prefills = length_sum = length_squares = num_decodes = context_sum = context_squares = 0
    for request in requests:
        length = request.num_input_tokens
        if request.num_output_tokens:
            num_decodes += 1
            context_sum += length
            context_squares += length * length
        else:
            num_prefills += 1
            length_sum += length
            length_squares += length * length
    return QueuedRequestMetrics(
        num_prefills,
        length_sum,
        _variance(num_prefills, length_sum, length_squares),
        num_decodes,
        context_sum,
        _variance(num_decodes, context_sum, context_squares),
    )


def _variance(count: int, total: int, squares: int) -> float:
    """Return the population variance of ``count`` integers from their sum and the sum of their squares."""
    return (count * squares - total * total) / (count * count) if count else 0.0


_NOTHING = ScheduledRequestMetrics()


@dataclass(slots=True, kw_only=True)
class ForwardPassPublisher:
    """Sends one message per forward pass, and one per second while the engine is idle.

    Only the rank that reports its replica's metrics sends (``ParallelState.reports_metrics``). SGLang lets the last
    pipeline stage send, and each attention-CP rank; Dynamo then reads a pass several times.

    A scheduler that calls ``idle`` while its device works pays for a message there: the message of a pass is counted
    and sent during the next pass. Its queue is then the one without the requests of that next pass, as in SGLang's
    overlapped schedule. Without ``idle`` a message is sent in ``publish_forward_pass``.

    An exception of the queue or of the sink never reaches the scheduler's step: ``failures`` counts it and logs each
    episode once. The message is lost, and its number with it.

    Attributes:
        parallel: decides whether this rank sends, and for which replica.
        queues: the waiting requests.
        sink: receives the messages; ``open_zmq_forward_pass_sink`` opens one.
        worker_id: name of this engine in the reader's discovery; Dynamo's planner keeps only workers that it knows.
        heartbeat_s: longest silence of an idle engine.
        clock: seconds from any origin.
        failures: counts the lost messages.

    Raises:
        ConfigError: ``heartbeat_s`` is not a time span.
    """

    parallel: ParallelState
    queues: WaitingQueue
    sink: ReportSink[ForwardPassMetrics] = field(default_factory=NullReportSink)
    worker_id: str = ""
    heartbeat_s: float = FORWARD_PASS_HEARTBEAT_S
    clock: Callable[[], float] = time.monotonic
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _counters: ForwardPassStats = field(default_factory=ForwardPassStats, init=False, repr=False)
    _num_messages: int = field(default=0, init=False, repr=False)
    _last_s: float = field(default=0.0, init=False, repr=False)  # of the last message
    _pending: tuple[Sequence[ScheduledPart], float] | None = field(default=None, init=False, repr=False)
    _has_idled: bool = field(default=False, init=False, repr=False)  # since the last pass

    def __post_init__(self) -> None:
        check_number("heartbeat_s", self.heartbeat_s)
        self._last_s = self.clock()

    def publish_forward_pass(self, parts: Sequence[ScheduledPart], wall_time_s: float) -> None:
        """Send what a pass computed, or keep it for ``idle``. Call it after the results of the pass were applied.

        Args:
            parts: what the device computed; empty for a pass that only takes part in the layers of other replicas. It
                must not change until it is sent.
            wall_time_s: duration of the pass, from its launch until its results were on the host. A value that is not
                finite or not above 0 is a failure, because a reader takes a duration of 0 for a heartbeat.
        """
        if self.sink.wants_reports and self.parallel.reports_metrics:
            self._send_pending()  # of a scheduler that has stopped calling `idle`
            self._pending = parts, wall_time_s
            if not self._has_idled:
                self._send_pending()
            self._has_idled = False

    def idle(self) -> None:
        """Send the message of the last pass. Call it where the scheduler waits for its device."""
        self._has_idled = True
        self._send_pending()

    def publish_idle(self) -> None:
        """Send what is pending, and a heartbeat if the last message is old enough. Call it while no request runs.

        A heartbeat's counts are 0, as in SGLang, except those of requests that wait although nothing is computed: in a
        paused engine.
        """
        self._send_pending()
        if (
            self.sink.wants_reports
            and self.parallel.reports_metrics
            and not 0.0 <= self.clock() - self._last_s < self.heartbeat_s
        ):
            with self.failures.guard(_SENDING):
                self._send(0.0, _NOTHING)
                self._counters.heartbeats += 1

    def _send_pending(self) -> None:
        if self._pending is None:
            return
        (parts, wall_time_s), self._pending = self._pending, None
        with self.failures.guard(_SENDING):
            if not 0.0 < wall_time_s < math.inf:
                raise ValueError(f"a forward pass took {wall_time_s} s")
            self._send(wall_time_s, count_scheduled(parts))

    def _send(self, wall_time_s: float, scheduled: ScheduledRequestMetrics) -> None:
        self._last_s = self.clock()
        number, self._num_messages = self._num_messages, self._num_messages + 1
        self.sink.send(
            ForwardPassMetrics(
                FORWARD_PASS_VERSION,
                self.worker_id,
                self.parallel.kv_stream_index,
                number,
                wall_time_s,
                scheduled,
                count_queued(self.queues.waiting),
            )
        )
        self._counters.sent += 1

    def stats(self) -> ForwardPassStats:
        """Return the counters."""
        counters = self._counters
        return ForwardPassStats(counters.sent, counters.heartbeats, self.failures.counts.get(_SENDING, 0))

    def close(self) -> None:
        """Send what is pending and close the sink. Safe to call twice; never raises."""
        self._send_pending()
        sink, self.sink = self.sink, NullReportSink()
        with self.failures.guard(_CLOSING):
            sink.close()
