"""Count and time the requests of a scheduler. No decision depends on these numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from scheduler_components import ConfigError, ParallelState, WorkCounters
from scheduler_components.metrics import RateMeter, RequestLatencyRecorder, RequestTimeStats
from scheduler_components.metrics.request_tracer import RequestTracer
from scheduler_components.scheduling.dynamic_chunk_sizer import FirstTokenPredictor, PrefillLatencyFit
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import FinishedRequest, FinishReason, ReceiverStats, ScheduledBatch, SchedulerCounters
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.request_limits import RequestTooLongError


@dataclass(slots=True)
class PriorityWaits:
    """Waits of requests with a priority above 0, of 0, and below 0.

    Attributes:
        num_requests: requests per class.
        total_s: sums of their waits.
    """

    num_requests: list[int] = field(default_factory=lambda: [0, 0, 0])
    total_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, priority: int, wait_s: float) -> None:
        """Record the wait of one request."""
        index = 1 - (priority > 0) + (priority < 0)
        self.num_requests[index] += 1
        self.total_s[index] += wait_s


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """The ``ResultObserver`` and ``BatchObserver`` of a scheduler, and the source of its ``SchedulerCounters``.

    Attributes:
        clock: monotonic seconds, for rates and request times.
        predictor: predicts times to first token. Its fit learns the duration of prefills.
        counters: incremented here, and by ``RequestKvCache`` for evictions.
        work: tickets of received requests and the work done, for load reports.
        rates: throughput and hit rate over the recent window.
        latencies: histograms of request times.
        waits: waits before the first admission, by priority.
        receiver: counters of the rank's ``RequestReceiver``.
        tracer: makes a span of each ended request.
    """

    clock: Callable[[], float] = time.monotonic
    predictor: FirstTokenPredictor = field(default_factory=lambda: FirstTokenPredictor(fit=PrefillLatencyFit()))
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    work: WorkCounters = field(default_factory=WorkCounters)
    receiver: ReceiverStats = field(default_factory=ReceiverStats)
    tracer: RequestTracer = field(default_factory=lambda: RequestTracer(parallel=ParallelState()))
    waits: PriorityWaits = field(default_factory=PriorityWaits)
    rates: RateMeter = field(init=False)
    latencies: RequestLatencyRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.rates = RateMeter(clock=self.clock)
        self.latencies = RequestLatencyRecorder(clock=self.clock)

    def predict_first_token(
        self, request: EngineRequest, queues: RequestQueues[EngineRequest], *, step_tokens: int
    ) -> None:
        """Predict the time to the first token of a request that is about to be queued.

        Args:
            request: its cached tokens are known.
            queues: the requests ahead of it.
            step_tokens: prefilled tokens per step.
        """
        slots_ahead = max(0, len(queues.running) + len(queues.waiting) + 1 - queues.max_running_requests)
        predicted_s = self.predictor.predict_s(
            request.num_input_tokens - request.num_cached_tokens,
            tokens_ahead=queues.waiting.uncached_tokens + queues.num_chunked_tokens_left,
            step_tokens=step_tokens,
            history_tokens=request.num_cached_tokens,
            slots_ahead=slots_ahead,
        )
        self.predictor.start(request.rid, predicted_s, slots_ahead=slots_ahead)

    def on_queued(self, request: EngineRequest) -> None:
        """Record a new request, which waits."""
        request.times = self.latencies.on_queued()
        self.counters.num_requests_total += 1

    def on_refused(self, error: ConfigError) -> None:
        """Record a request that was refused and would be refused again. A full queue counts its own refusals."""
        if isinstance(error, RequestTooLongError):
            self.counters.refused_too_long_total += 1
        else:
            self.counters.refused_invalid_total += 1

    def on_admitted(self, request: EngineRequest) -> None:
        """Record an admission. The prompt of a retracted request does not count again: it would hit its own pages."""
        times = _times(request)
        self.latencies.on_admitted(times)
        if not request.num_retractions:
            self.waits.add(request.hints.priority, times.first_queue_s or 0.0)
            self.counters.prompt_tokens_total += request.num_prompt_tokens
            self.counters.cached_tokens_total += request.num_cached_tokens
            self.rates.observe_prefill(request.num_prompt_tokens, request.num_cached_tokens)

    def on_retracted(self, request: EngineRequest) -> None:
        """Record that a request lost its pages to other requests and waits again."""
        self.latencies.on_retracted(_times(request))
        self.counters.num_retractions_total += 1
        self.rates.observe_preemption()

    def on_batch_computed(self, batch: ScheduledBatch[EngineRequest], *, begun_s: float) -> float:
        """Record that the device has computed a batch, which was launched at ``begun_s``. Return its seconds."""
        busy_s = self.clock() - begun_s
        if batch.num_prefill_tokens:
            self.work.record_prefill(batch.num_prefill_tokens, busy_s)
            pairs = sum(chunk.end**2 - chunk.start**2 for chunk in batch.chunks if chunk.is_prefill)
            self.predictor.fit.observe(batch.num_prefill_tokens, pairs, busy_s)
        else:
            self.work.record_decode(batch.num_decode_tokens, busy_s, batch.num_decode_tokens)
        return busy_s

    def on_results(self, batch: ScheduledBatch[EngineRequest]) -> None:
        """Record the requests of a batch that have received their first token."""
        for chunk in batch.chunks:
            if chunk.is_prefill and chunk.request.num_output_tokens == 1:
                self.predictor.on_first_token(chunk.request.rid)

    def on_tokens(self, requests: Sequence[EngineRequest], num_tokens: Sequence[int]) -> None:
        """Record the tokens that a step generated for each of these requests."""
        times = [request.times for request in requests]  # all were queued, so none is None
        self.latencies.on_batch_tokens(cast("list[RequestTimeStats]", times), num_tokens)
        num_all_tokens = sum(num_tokens)
        self.counters.generation_tokens_total += num_all_tokens
        self.rates.observe_decode(num_all_tokens)

    def on_finished(self, request: EngineRequest, reason: FinishReason) -> None:
        """Record the end of a request."""
        self.latencies.on_finished(_times(request))
        self.tracer.on_finished(_times(request), _facts(request, reason))
        if request.num_output_tokens:  # its first token may have ended it
            self.predictor.on_first_token(request.rid)
        else:
            self.predictor.discard(request.rid)
        if reason is FinishReason.ABORT:
            self.counters.num_aborted_requests_total += 1

    def stats(self) -> SchedulerCounters:
        """Return a copy of the counters."""
        return msgspec.structs.replace(self.counters, preemptions_per_s=self.rates.preemptions_per_s)


def _times(request: EngineRequest) -> RequestTimeStats:
    assert request.times is not None, f"{request!r} was never queued"
    return request.times


def _facts(request: EngineRequest, reason: FinishReason) -> FinishedRequest:
    limits, sampling = request.limits, request.sampling
    return FinishedRequest(
        rid=request.rid,
        finish_reason=reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_prompt_tokens,
        max_tokens=limits.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or None,
        parent=request.trace,
    )
