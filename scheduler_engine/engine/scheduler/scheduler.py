"""Scheduler: continuous batching for one rank, composed of small parts. One thread, no sockets.

``Scheduler.compose`` wires the parts. ``Scheduler.step`` runs them:

    agreement.step()                agree with the other ranks on the time, finished page transfers and waiting
                                    requests, and compare what all ranks have decided since the last agreement
    rooms.pop_departures()          queue the requests that have what they need, end those that cannot get it
    deadlines.pop_expired()         end the requests that have waited or run too long
    batcher.next_batch()            choose what to compute; allocate pages, retract the latest arrivals if necessary
    device.launch(batch)
    kv_events.idle()                send the events of the previous step while the device computes
    forward_passes.idle()           send what the previous batch was
    results.process(device.wait())  append tokens, cache full pages, finish requests, stream outputs
    kv_events.publish_kv_events()   publish what the cache stored and removed in this step
    metrics.emit()                  report load and statistics
    integrity.checker.after_step()  every few steps, check that every page has exactly one owner

All ranks of a replica make the same calls in the same order and therefore take the same decisions. No decision depends
on a clock or on the rank. ``state_digest`` lets the ranks verify that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler_components import (
    BatchResultProcessor,
    ConfigError,
    LiveStats,
    LoadInquirer,
    MetricsEmitter,
    OutputStreamer,
    ParallelState,
    RadixCache,
    RequestResult,
    SchedulerKvEventsPublisher,
)
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.batcher import BatchConditions, Batcher
from scheduler_components.cache import RadixNode
from scheduler_components.forward_pass_publisher import ForwardPassPublisher
from scheduler_components.kv_events import NullEventPublisher
from scheduler_components.metrics.request_tracer import RequestTracer
from scheduler_components.ports import (
    KvEventSink,
    LoadSource,
    MetricsSink,
    NullDecisionLog,
    NullMetricsSink,
    NullOutputSink,
    NullReportSink,
    NullSpanSink,
    OutputSink,
    ReportSink,
    SpanSink,
)
from scheduler_components.quiesce import QuiesceState, weight_namespace
from scheduler_components.scheduling.dp_attn import DpBatchSync
from scheduler_components.scheduling.dynamic_chunk_sizer import DynamicChunkSizer
from scheduler_components.scheduling.preemption_policy import make_preemption_policy
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.scheduling.scheduling_policy import make_policy
from scheduler_components.scheduling.tier_prefetcher import TierPrefetcher
from scheduler_components.values import (
    DEFAULT_WEIGHT_VERSION,
    FinishReason,
    ForwardMode,
    ForwardPassMetrics,
    KvMetrics,
    RequestState,
    ScheduledBatch,
    SessionParams,
)
from scheduler_components.waiting.agreed_queue import DepartureReason, WaitingRoom, WaitingRooms
from scheduler_components.waiting.lora_queue import LoraLimits, LoraQueue
from scheduler_components.waiting.request_deadlines import RequestDeadlines
from scheduler_components.waiting.session_kv_releaser import SessionKvReleaser
from scheduler_components.waiting.sessions import SessionTable
from scheduler_components.watchdog import IDLE_PHASE
from scheduler_engine.device.device import Device, DeviceOutput
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.batcher_settings import BatcherSettings, make_ratio_tracker
from scheduler_engine.engine.scheduler.batching_report import BatchingReport
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers, DeviceOnlyTiers, PrefixCache
from scheduler_engine.engine.scheduler.integrity import SchedulerIntegrity
from scheduler_engine.engine.scheduler.prefill_forecast import PrefillForecast
from scheduler_engine.engine.scheduler.request import Request
from scheduler_engine.engine.scheduler.request_identity import RequestIdentity
from scheduler_engine.engine.scheduler.request_limits import (
    check_grammar_served,
    check_request_fits,
    check_tokens_known,
)
from scheduler_engine.engine.scheduler.request_metrics import RequestMetrics
from scheduler_engine.engine.scheduler.scheduler_sections import SchedulerSections
from scheduler_engine.engine.scheduler.state_digest import StateDigest

__all__ = ["ROOM_POLL_S", "Clocks", "Scheduler", "SchedulerSinks", "StepResult", "TimedRequests"]

ROOM_POLL_S = 0.02
"""Time between two steps of a replica that only waits for rooms: short compared with compiling a grammar."""

_FINISH_REASONS: dict[DepartureReason, FinishReason] = {
    "failed": FinishReason.REFUSED,
    "error": FinishReason.ERROR,
    "expired": FinishReason.QUEUE_TIMEOUT,
}


@dataclass(slots=True, kw_only=True)
class Scheduler:  # noqa: SCH003 - the composition: every component is a field
    """Serves requests in steps. One thread makes all calls.

    It has more fields than other components because it is where all of them come together. Between two steps, and while
    there is no work, its owner may call ``load.get_loads()``, ``output.flush()``, ``kv_events.idle()`` and
    ``metrics.emit()``.

    Attributes:
        device: computes batches.
        queues: the waiting and running requests.
        agreement: agrees with the other ranks once per step.
        rooms: what requests wait for besides pages.
        deadlines: ends requests that wait or take too long.
        lora: the adapters; one of the rooms if the engine has any.
        sessions: conversations that keep their pages between turns.
        tiers: the prefix cache with the tiers behind it.
        prefetcher: fetches the prefixes of waiting requests from these tiers.
        settings: the sizes, which can change while requests run.
        batcher: makes batches and allocates their pages.
        results: applies the result of a batch to its requests.
        output: streams the tokens of requests.
        kv_events: publishes what the cache stored and removed.
        load: reports how busy this replica is.
        request_metrics: counts and times requests.
        metrics: reports the statistics of each step.
        forward_passes: reports what each batch was, to planners.
        integrity: checks the pools between steps, and tracks the progress of a step for the watchdog.
        digest: notes the results of each step in the decision log of this rank.
    """

    device: Device
    queues: RequestQueues[Request]
    agreement: StepAgreement
    rooms: WaitingRooms[Request]
    deadlines: RequestDeadlines[Request]
    lora: LoraQueue[Request]
    sessions: SessionTable[RadixNode]
    tiers: CacheTiers
    prefetcher: TierPrefetcher[Request]
    settings: BatcherSettings
    batcher: Batcher[Request]
    results: BatchResultProcessor[Request]
    output: OutputStreamer
    kv_events: SchedulerKvEventsPublisher
    load: LoadSource
    request_metrics: RequestMetrics
    metrics: MetricsEmitter
    forward_passes: ForwardPassPublisher
    integrity: SchedulerIntegrity
    digest: StateDigest

    @classmethod
    def compose(
        cls,
        config: SchedulerConfig,
        parallel: ParallelState,
        device: Device,
        *,
        tiers: CacheTiers | None = None,
        sinks: SchedulerSinks | None = None,
        clocks: Clocks | None = None,
        quiesce: QuiesceState | None = None,
        dp: DpBatchSync | None = None,
        decisions: DecisionLog | NullDecisionLog | None = None,
        rooms: Sequence[WaitingRoom[Request]] = (),
        lora: LoraQueue[Request] | None = None,
        groups: ParallelGroups | None = None,
    ) -> Scheduler:
        """Wire a scheduler.

        Args:
            config: sizes.
            parallel: the rank. Only the rank that owns the KV event stream records events.
            device: computes batches.
            tiers: the prefix cache with the tiers behind it. The default is a ``RadixCache`` without further tiers.
            sinks: where outputs, events and statistics go. The default drops them.
            clocks: sources of time.
            quiesce: what control requests allow now. The default allows everything.
            dp: exchange with the other replicas under DP attention. The default has no other replicas.
            decisions: the log of this rank's decisions, over the same groups. The default stops all ranks at the first
                difference.
            rooms: what requests may wait for besides pages, in one order on all ranks.
            lora: the adapters of the rank. The default has none, and refuses requests that name one.
            groups: the ranks of the replica, which agree once per step. The default is a replica of one rank.
        """
        sinks, clocks = sinks or SchedulerSinks(), clocks or Clocks()
        quiesce, dp, groups = quiesce or QuiesceState(), dp or DpBatchSync(), groups or ParallelGroups()
        decisions = decisions or DecisionLog(groups=groups, policy="stop")
        tiers = tiers or DeviceOnlyTiers(cache=_device_cache(config, parallel))
        cache = tiers.cache
        cache.record_decisions(decisions)
        queues = RequestQueues[Request](max_running_requests=config.num_request_slots)
        sessions = SessionTable[RadixNode](cache=cache, limits=config.session_limits, decisions=decisions)
        if lora is None:
            lora = LoraQueue(limits=LoraLimits(max_loaded=1, max_registered=1))
        else:
            lora.decisions, rooms = decisions, (*rooms, lora)
        conditions = BatchConditions[Request](
            gate=quiesce,
            dp=dp,
            new_token_ratio=make_ratio_tracker(config),
            chunk_sizer=DynamicChunkSizer(page_size=config.page_size),
            idle_pages=sessions,
        )

        # Observers: they read the parts above and decide nothing.
        tracer = RequestTracer(parallel=parallel, sink=sinks.spans, model_name=sinks.model_name, clock=clocks.wall)
        forecast = PrefillForecast(conditions=conditions)
        forecast.predictor.clock = clocks.monotonic
        request_metrics = RequestMetrics(clock=clocks.monotonic, forecast=forecast, tracer=tracer)
        integrity = SchedulerIntegrity.compose(config.integrity, parallel, tiers, queues, sessions)
        load = LoadInquirer(
            parallel=parallel,
            queues=queues,
            pool=cache,
            rates=request_metrics.rates,
            work=request_metrics.work,
            sections=SchedulerSections(lora=lora).load_sections,
            clock=clocks.wall,
        )
        kv_events = SchedulerKvEventsPublisher(
            parallel=parallel,
            source=integrity.events,
            sink=sinks.events,
            load=load,
            metrics_sink=sinks.kv_metrics,
            clock=clocks.wall,
        )
        forward_passes = ForwardPassPublisher(
            parallel=parallel,
            queues=queues,
            sink=sinks.forward_passes,
            worker_id=sinks.worker_id,
            clock=clocks.monotonic,
        )
        output = OutputStreamer(sink=sinks.outputs)
        # The path of a request: rooms, batcher, device, results.
        waiting_rooms = WaitingRooms[Request](rooms=rooms)
        for room in rooms:
            room.queue.decisions = decisions
        deadlines = RequestDeadlines[Request](defaults=config.timeouts)
        agreement = StepAgreement(
            groups=groups,
            parts=(decisions, *tiers.agreement_parts, *rooms, sessions),
            clock=clocks.monotonic,
            leads=parallel.leads_replica or not groups.groups,
        )
        kv_cache = RequestKvCache(
            cache=cache,
            counters=request_metrics.counters,
            allocation_log=integrity.allocation_log,
            decisions=decisions,
            namespaces=RequestIdentity(),
        )
        prefetcher = conditions.prefetcher = TierPrefetcher[Request](tiers=tiers, kv_cache=kv_cache, queues=queues)
        batcher = Batcher[Request](
            limits=config.batch_limits,
            queues=queues,
            kv_cache=kv_cache,
            policy=make_policy(config.schedule_policy, match_length=kv_cache.match_length),
            preemption=make_preemption_policy(config.preemption_policy),
            conditions=conditions,
            observer=request_metrics,
            decisions=decisions,
        )
        metrics = MetricsEmitter(
            parallel=parallel,
            load=load,
            sink=sinks.metrics,
            sources={
                "counters": request_metrics,
                "publisher": kv_events,
                "latencies": request_metrics.latencies,
                "tiers": tiers,
                "receiver": LiveStats(request_metrics.receiver),
                "quiesce": quiesce,
                "integrity": integrity.checker,
                "pools": integrity.pools,
                "batching": BatchingReport(batcher=batcher, request_metrics=request_metrics),
                "outputs": output,
                "forward_passes": forward_passes,
                "spans": tracer,
                "rooms": waiting_rooms,
                "deadlines": deadlines,
                "decisions": decisions,
                "sessions": sessions,
                "adapters": lora,
            },
        )
        results = BatchResultProcessor(
            kv=SessionKvReleaser(kv=kv_cache, sessions=sessions),
            requests=TimedRequests(batcher=batcher, rooms=waiting_rooms, deadlines=deadlines),
            output=output,
            observer=request_metrics,
            eos_token_ids=frozenset(config.tokens.eos_token_ids),
        )
        return cls(
            device=device,
            queues=queues,
            agreement=agreement,
            rooms=waiting_rooms,
            deadlines=deadlines,
            lora=lora,
            sessions=sessions,
            tiers=tiers,
            prefetcher=prefetcher,
            settings=BatcherSettings(config=config, batcher=batcher),
            batcher=batcher,
            results=results,
            output=output,
            kv_events=kv_events,
            load=load,
            request_metrics=request_metrics,
            metrics=metrics,
            forward_passes=forward_passes,
            integrity=integrity,
            digest=StateDigest(decisions=decisions),
        )

    def submit(self, request: Request, session: SessionParams | None = None) -> None:
        """Queue a request. A refused request changes nothing.

        Args:
            request: its tokens are those that ``sessions.extend`` returned, if it is a turn of a session.
            session: what the turn continues. Turns in flight that it replaces are aborted.

        Raises:
            ConfigError: the pool or the model's context cannot hold the request, the model does not know a token, the
                id is in use by a request in flight or an abort that is not streamed yet, the request is not new, or it
                asks for something that a room cannot prepare.
            QueueFullError: too many requests wait for what this one needs.
        """
        config = self.settings.config
        check_request_fits(config, request.num_input_tokens, request.limits.max_new_tokens)
        check_tokens_known(config, request.token_ids)
        check_grammar_served(config, request.grammar_key)
        if request.rid in self.queues:
            raise ConfigError("rid", request.rid, "is already in flight", "give each request an id of its own")
        if request.state is not RequestState.WAITING or request.num_output_tokens:
            raise ConfigError("rid", request.rid, "has been served before", "make a new Request")
        self.lora.check(request.hints.lora)
        self.integrity.progress.enter_phase("submit", request.rid)
        if session is not None:
            request.session_id = session.id
        must_wait = self.rooms.enter(request)
        self.prefetcher.start(request)
        request.num_cached_tokens = self.prefetcher.kv_cache.match_length(request)
        forecast = self.request_metrics.forecast
        forecast.predict_first_token(request, self.queues, step_tokens=config.max_prefill_tokens)
        if must_wait:
            self.batcher.hold(request)
        else:
            self.batcher.add(request)
        self.deadlines.add(request)
        self.request_metrics.on_queued(request)
        if session is not None:
            for rid in self.sessions.begin_turn(session, request.rid):
                self.abort(rid)
        self.integrity.progress.enter_phase(IDLE_PHASE)

    def abort(self, rid: str) -> bool:
        """End a request immediately; the next step streams the abort. Return False if it is not in flight."""
        request = self.queues.find(rid)
        if request is None:
            return False
        self.integrity.progress.enter_phase("abort", rid)
        self._end(request, FinishReason.ABORT)
        self.integrity.progress.enter_phase(IDLE_PHASE)
        return True

    def _end(self, request: Request, reason: FinishReason, problem: str = "") -> None:
        request.problem = problem
        self.tiers.prefetch_queue.cancel(request.rid)
        self.results.abort(request, reason)

    def step(self) -> StepResult:
        """Compute one batch, apply its results, publish and report.

        An exception of the device ends the requests of the batch with ``FinishReason.ERROR`` and nothing else. If only
        one rank has it, its state differs from the other ranks', which they detect before the next step.

        Raises:
            SyncTimeoutError, SyncDivergenceError: a rank did not take part in the step, or in another one.
            TierDivergenceError, QueueDivergenceError: the tiers or the waiting requests of the ranks differ.
        """
        progress = self.integrity.progress
        progress.begin_step(self.num_steps + 1, "agreement")
        self.agreement.step(self.num_steps + 1)
        self._apply_departures()
        for request, reason, problem in self.deadlines.pop_expired(self.agreement.now_s):
            self._end(request, reason, problem)
        self.prefetcher.update_prefetched_spans()
        progress.enter_phase("batch")
        batch = self.batcher.next_batch()
        if batch.has_work:
            updated = self._compute(batch)
        else:
            self.tiers.wait()
            updated = self.results.process()
        self.queues.on_aborts_streamed()
        self.digest.add_step(batch, len(updated), self.tiers)
        progress.enter_phase("report")
        self._report()
        is_idle = not self.queues.running and not self.tiers.num_operations
        self.integrity.checker.after_step(is_idle=is_idle)
        progress.enter_phase(IDLE_PHASE)
        return StepResult(
            step=self.num_steps,
            num_updated_requests=len(updated),
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            num_admitted=batch.num_admitted,
            num_retracted=batch.num_retracted,
            digest=self.state_digest,
        )

    def _apply_departures(self) -> None:
        """Queue the requests that have left all rooms, and end those that one room has failed or expired."""
        for departure in self.rooms.pop_departures():
            if departure.reason == "ready":
                self.batcher.release(departure.item)
            else:
                self._end(departure.item, _FINISH_REASONS[departure.reason], departure.problem)

    def _compute(self, batch: ScheduledBatch[Request]) -> list[Request]:
        """Compute a batch and apply its results. Return the requests that got tokens or ended."""
        started_s = self.request_metrics.clock()
        self.integrity.progress.enter_phase("device", batch.chunks[0].request.rid if batch.chunks else "")
        try:
            self.device.launch(batch)
            self.kv_events.idle()
            self.forward_passes.idle()
            output = self.device.wait()
            if len(output.token_ids) != len(batch.chunks):
                raise ValueError(f"the device returned {len(output.token_ids)} tokens for {len(batch.chunks)} chunks")
        except Exception as error:  # noqa: BLE001 - `fail` counts and logs it, and fails each request
            self.integrity.progress.enter_phase("results")
            return self.results.fail([chunk.request for chunk in batch.chunks], error)
        self.integrity.progress.enter_phase("results")
        busy_s = self.request_metrics.on_batch_computed(batch, begun_s=started_s)
        updated = self._apply(batch, output)
        self.forward_passes.publish_forward_pass(batch.chunks, busy_s)
        if batch.num_prefill_tokens:
            self.request_metrics.forecast.on_first_tokens(batch)
            for chunk in batch.chunks:
                if chunk.is_prefill:
                    self.queues.update_prefill_tokens(chunk.request)
        return updated

    def _apply(self, batch: ScheduledBatch[Request], output: DeviceOutput) -> list[Request]:
        for index, logprobs in output.logprobs.items():
            batch.chunks[index].request.append_logprobs(logprobs)
        errors = output.errors
        return self.results.process(
            RequestResult(chunk.request, chunk.start, chunk.end, (token,), chunk.is_prefill, errors.get(index, ""))
            for index, (chunk, token) in enumerate(zip(batch.chunks, output.token_ids, strict=True))
        )

    def _report(self) -> None:
        """Publish events and statistics, and now and then ``KvMetrics``."""
        self.kv_events.publish_kv_events()
        self.metrics.emit()
        if self.num_steps % self.settings.config.kv_metrics_every_steps == 0 or not self.has_work:
            self.kv_events.emit_kv_metrics()

    @property
    def has_work(self) -> bool:
        """True if a step has something to do.

        That is a request that may run, an abort to stream or a page transfer in flight, and under DP attention also a
        request of another replica. A request in a room is none of these: see ``next_step_in_s``.
        """
        is_busy = self.batcher.has_work or self.results.has_pending_outputs or self.tiers.num_operations
        return bool(is_busy or self.batcher.conditions.dp.last.any_work)

    @property
    def next_step_in_s(self) -> float:
        """Seconds until a step is due, by the clock of this rank, for the leading rank; infinite if none is.

        Steps without a batch let requests in rooms go, load adapters, end requests that have waited too long, and close
        idle sessions. What requests in rooms wait for ends on threads of all ranks, so such steps are taken every
        ``ROOM_POLL_S``.
        """
        if self.has_work:
            return 0.0
        deadline_s = min(self.deadlines.next_deadline_s, self.sessions.next_deadline_s)
        due_in_s = max(0.0, deadline_s - self.agreement.clock())
        return min(ROOM_POLL_S, due_in_s) if self.polls_rooms else due_in_s

    @property
    def polls_rooms(self) -> bool:
        """True while requests wait in rooms or adapters are loaded, so that steps are taken without a batch."""
        return bool(len(self.rooms)) or self.lora.has_pending_loads

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        return self.digest.num_steps

    @property
    def state_digest(self) -> int:
        """A 32-bit digest of all decisions and results, which is equal on all ranks after the same calls."""
        return self.digest.value

    @property
    def agreed_digest(self) -> int:
        """The 32-bit digest at the last agreement: equal on all ranks that take the same steps with the same input."""
        return self.decisions.agreed_tip % 2**32

    @property
    def decisions(self) -> DecisionLog | NullDecisionLog:
        """The log of the decisions of this rank."""
        return self.digest.decisions

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache over the KV pool."""
        return self.tiers.cache

    def drain(self) -> Iterator[StepResult]:
        """Step until there is no more work, no request waits in a room, and no adapter is loaded."""
        while self.has_work or self.polls_rooms:
            yield self.step()

    def retract_all(self) -> int:
        """Move every running request back to the waiting queue, with its output, and return their number."""
        num_retracted = self.batcher.retract_all()
        self.kv_events.flush()
        return num_retracted

    def clear_cache(self, weight_version: str = DEFAULT_WEIGHT_VERSION) -> None:
        """Remove every cached prefix from device and host, and send the events immediately.

        Sessions lose their pages and stay open.

        Args:
            weight_version: version of the weights that compute all later KV.

        Raises:
            CacheIntegrityError: a request runs or a page transfer is in flight; the cache has not changed.
        """
        self.sessions.release_all()
        self.cache.clear(weight_version)
        self.prefetcher.restart(weight_namespace(weight_version))
        self.kv_events.flush()

    def clear_storage_index(self) -> None:
        """Mark every page as not stored, and send the events immediately.

        Raises:
            CacheIntegrityError: a page transfer is in flight; nothing has changed.
        """
        self.tiers.clear_storage_index()
        self.kv_events.flush()

    def close(self) -> None:
        """Send the last events and outputs and close the sinks. Requests in flight get no more tokens.

        Safe to call twice.
        """
        self.kv_events.shutdown()
        self.output.close()
        self.forward_passes.close()
        self.request_metrics.tracer.close()
        self.tiers.close()


@dataclass(slots=True, kw_only=True)
class TimedRequests:
    """The ``RequestFinisher`` of a scheduler with rooms and deadlines."""

    batcher: Batcher[Request]
    rooms: WaitingRooms[Request]
    deadlines: RequestDeadlines[Request]

    def finish(self, request: Request, reason: FinishReason) -> None:
        self.batcher.finish(request, reason)
        self.rooms.end(request)
        self.deadlines.discard(request)


@dataclass(slots=True, kw_only=True)
class SchedulerSinks:
    """The sinks of a scheduler. ``Scheduler.close`` closes all but ``metrics``.

    Attributes:
        events: KV events; made by ``open_event_publisher``.
        outputs: tokens of requests.
        metrics: statistics of each step; its owner closes it.
        kv_metrics: ``KvMetrics``: request slots and KV blocks.
        forward_passes: what each batch was.
        spans: the spans of ended requests.
        worker_id, model_name: names of the engine and of its model for the readers of these two.
    """

    events: KvEventSink = field(default_factory=NullEventPublisher)
    outputs: OutputSink = field(default_factory=NullOutputSink)
    metrics: MetricsSink = field(default_factory=NullMetricsSink)
    kv_metrics: ReportSink[KvMetrics] | None = None
    forward_passes: ReportSink[ForwardPassMetrics] = field(default_factory=NullReportSink)
    spans: SpanSink = field(default_factory=NullSpanSink)
    worker_id: str = ""
    model_name: str = ""


@dataclass(slots=True, kw_only=True, frozen=True)
class Clocks:
    """Sources of time.

    Attributes:
        wall: seconds since the epoch, for time stamps.
        monotonic: seconds since any origin, for rates and latencies.
    """

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """The result of one ``Scheduler.step``.

    Attributes:
        step: number of the step, from 1.
        num_updated_requests: requests that got tokens or ended.
        num_prefill_tokens, num_decode_tokens: computed positions, by kind.
        num_admitted, num_retracted: requests that got their pages, and requests that lost them.
        digest: ``Scheduler.state_digest`` after the step.
    """

    step: int
    num_updated_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_admitted: int
    num_retracted: int
    digest: int

    @property
    def mode(self) -> ForwardMode:
        """The kinds of computed positions."""
        if self.num_prefill_tokens:
            return ForwardMode.MIXED if self.num_decode_tokens else ForwardMode.EXTEND
        return ForwardMode.DECODE if self.num_decode_tokens else ForwardMode.IDLE


def _device_cache(config: SchedulerConfig, parallel: ParallelState) -> RadixCache:
    return RadixCache(page_size=config.page_size, capacity_tokens=config.kv_tokens, record=parallel.owns_kv_stream)
