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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

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
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.forward_pass_publisher import ForwardPassPublisher
from scheduler_components.metrics.request_tracer import RequestTracer
from scheduler_components.ports import NullAllocationSink, NullDecisionLog, StatsSource
from scheduler_components.quiesce import QuiesceState, weight_namespace
from scheduler_components.scheduling.composition import (
    Clocks,
    PoolChecks,
    SchedulerSinks,
    WaitingPath,
    compose_batcher,
    compose_reports,
    note_step,
)
from scheduler_components.scheduling.dp_attn import DpBatchSync
from scheduler_components.scheduling.dynamic_chunk_sizer import DynamicChunkSizer, FirstTokenPredictor
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import (
    DEFAULT_WEIGHT_VERSION,
    FinishReason,
    ForwardMode,
    RequestState,
    ScheduledBatch,
    SessionParams,
)
from scheduler_components.waiting.agreed_queue import WaitingRoom, WaitingRooms
from scheduler_components.waiting.grammar_queue import GrammarQueue
from scheduler_components.waiting.lora_queue import LoraLimits, LoraQueue
from scheduler_components.waiting.request_deadlines import RequestDeadlines
from scheduler_components.waiting.session_kv_releaser import SessionKvReleaser
from scheduler_components.waiting.sessions import SessionTable
from scheduler_components.watchdog import IDLE_PHASE, StepProgress
from scheduler_engine.device.device import Device, DeviceOutput
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.batcher_settings import BatcherSettings, make_ratio_tracker
from scheduler_engine.engine.scheduler.batching_report import BatchingReport
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers, DeviceOnlyTiers, PrefixCache
from scheduler_engine.engine.scheduler.integrity import compose_integrity
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.request_limits import (
    check_grammar_served,
    check_request_fits,
    check_tokens_known,
)
from scheduler_engine.engine.scheduler.request_metrics import RequestMetrics

ROOM_POLL_S = 0.02
"""Time between two steps of a replica that only waits for rooms: short compared with compiling a grammar."""


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
        waiting: what requests wait for besides pages, and how long.
        lora: the adapters; one of the rooms if the engine has any.
        sessions: conversations that keep their pages between turns.
        tiers: the prefix cache with the tiers behind it.
        kv_cache: the pages of requests.
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
        decisions: the log of the decisions of this rank.
        num_steps: number of completed steps.
    """

    device: Device
    queues: RequestQueues[EngineRequest]
    agreement: StepAgreement
    waiting: WaitingPath[EngineRequest]
    lora: LoraQueue[EngineRequest]
    sessions: SessionTable[RadixNode]
    tiers: CacheTiers
    kv_cache: RequestKvCache[RadixNode]
    settings: BatcherSettings
    batcher: Batcher[EngineRequest]
    results: BatchResultProcessor[EngineRequest]
    output: OutputStreamer
    kv_events: SchedulerKvEventsPublisher
    load: LoadInquirer
    request_metrics: RequestMetrics
    metrics: MetricsEmitter
    forward_passes: ForwardPassPublisher
    integrity: PoolChecks
    decisions: DecisionLog | NullDecisionLog
    num_steps: int = field(default=0, init=False)

    @classmethod
    def compose(
        cls, config: SchedulerConfig, parallel: ParallelState, device: Device, **parts: Unpack[SchedulerParts]
    ) -> Scheduler:
        """Compose a scheduler.

        Args:
            config: sizes.
            parallel: the rank. Only the rank that owns the KV event stream records events.
            device: computes batches.
            parts: what the owner of the scheduler has opened.
        """
        return _Composer(config=config, parallel=parallel, parts=parts).compose(device)

    def submit(self, request: EngineRequest, session: SessionParams | None = None) -> None:
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
        must_wait = self.waiting.rooms.enter(request)
        self.kv_cache.start(request)
        self.request_metrics.predict_first_token(request, self.queues, step_tokens=config.max_prefill_tokens)
        self.waiting.add(request, must_wait=must_wait)
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

    def _end(self, request: EngineRequest, reason: FinishReason, problem: str = "") -> None:
        request.problem = problem
        self.kv_cache.cancel(request.rid)
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
        for request, reason, problem in self.waiting.pop_ended(self.agreement.now_s):
            self._end(request, reason, problem)
        self.queues.recount_prefetched(self.kv_cache.prefetched_spans())
        progress.enter_phase("batch")
        batch = self.batcher.next_batch()
        if batch.has_work:
            updated = self._compute(batch)
        else:
            self.tiers.wait()
            updated = self.results.process()
        self.batcher.on_results(batch)
        self.num_steps += 1
        if self.decisions.wants_decisions:
            shapes = [shape.num_tokens for shape in batch.replicas]
            transfers = self.tiers.num_operations, self.tiers.state_digest
            computed = [chunk.request for chunk in batch.chunks]
            note_step(self.decisions, len(updated), computed, self.cache, transfers, shapes)
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

    def _compute(self, batch: ScheduledBatch[EngineRequest]) -> list[EngineRequest]:
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
            self.request_metrics.on_results(batch)
        return updated

    def _apply(self, batch: ScheduledBatch[EngineRequest], output: DeviceOutput) -> list[EngineRequest]:
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
        deadline_s = min(self.waiting.deadlines.next_deadline_s, self.sessions.next_deadline_s)
        due_in_s = max(0.0, deadline_s - self.agreement.clock())
        return min(ROOM_POLL_S, due_in_s) if self.polls_rooms else due_in_s

    @property
    def polls_rooms(self) -> bool:
        """True while requests wait in rooms or adapters are loaded, so that steps are taken without a batch."""
        return bool(len(self.waiting.rooms)) or self.lora.has_pending_loads

    @property
    def state_digest(self) -> int:
        """A 32-bit digest of all decisions and results, which is equal on all ranks after the same calls."""
        return self.decisions.tip % 2**32

    @property
    def agreed_digest(self) -> int:
        """The 32-bit digest at the last agreement: equal on all ranks that take the same steps with the same input."""
        return self.decisions.agreed_tip % 2**32

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
        waiting = self.queues.waiting
        self.kv_cache.restart(waiting, weight_namespace(weight_version))
        for request in waiting:
            waiting.recount(request)
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


class SchedulerParts(TypedDict, total=False):
    """What a scheduler is composed of that its owner opens. Each part has a default, also in the place of None.

    Attributes:
        tiers: the prefix cache with the tiers behind it. The default is a ``RadixCache`` without further tiers.
        sinks: where outputs, events and statistics go. The default drops them.
        clocks: sources of time.
        quiesce: what control requests allow now. The default allows everything.
        dp: exchange with the other replicas under DP attention. The default has no other replicas.
        decisions: the log of this rank's decisions, over the same groups; the queues of ``rooms`` and ``lora`` have it,
            too. The default stops all ranks at the first difference.
        rooms: what requests may wait for besides pages, in one order on all ranks.
        lora: the adapters of the rank. The default has none, and refuses requests that name one.
        groups: the ranks of the replica, which agree once per step. The default is a replica of one rank.
    """

    tiers: CacheTiers | None
    sinks: SchedulerSinks | None
    clocks: Clocks | None
    quiesce: QuiesceState | None
    dp: DpBatchSync | None
    decisions: DecisionLog | NullDecisionLog | None
    rooms: Sequence[WaitingRoom[EngineRequest]]
    lora: LoraQueue[EngineRequest] | None
    groups: ParallelGroups | None


class _Reports(TypedDict):
    load: LoadInquirer
    kv_events: SchedulerKvEventsPublisher
    metrics: MetricsEmitter
    forward_passes: ForwardPassPublisher


@dataclass(slots=True, kw_only=True)
class _Composer:
    """Composes a scheduler path by path: first what decides, then what observes and reports."""

    config: SchedulerConfig
    parallel: ParallelState
    parts: SchedulerParts
    sinks: SchedulerSinks = field(init=False)
    clocks: Clocks = field(init=False)
    groups: ParallelGroups = field(init=False)
    quiesce: QuiesceState = field(init=False)
    decisions: DecisionLog | NullDecisionLog = field(init=False)
    tiers: CacheTiers = field(init=False)
    lora: LoraQueue[EngineRequest] = field(init=False)
    sessions: SessionTable[RadixNode] = field(init=False)

    def __post_init__(self) -> None:
        config, parallel, parts = self.config, self.parallel, self.parts
        self.sinks, self.clocks = parts.get("sinks") or SchedulerSinks(), parts.get("clocks") or Clocks()
        self.groups, self.quiesce = parts.get("groups") or ParallelGroups(), parts.get("quiesce") or QuiesceState()
        self.decisions = parts.get("decisions") or DecisionLog(groups=self.groups, policy="stop")
        self.lora = parts.get("lora") or LoraQueue(limits=LoraLimits(max_loaded=1, max_registered=1))
        self.tiers = parts.get("tiers") or DeviceOnlyTiers(
            cache=RadixCache(
                page_size=config.page_size, capacity_tokens=config.kv_tokens, record=parallel.owns_kv_stream
            )
        )
        cache = self.tiers.cache
        cache.record_decisions(self.decisions)
        self.sessions = SessionTable(cache=cache, limits=config.session_limits, decisions=self.decisions)

    def compose(self, device: Device) -> Scheduler:
        """Compose all paths."""
        clocks, sinks, tiers = self.clocks, self.sinks, self.tiers
        conditions = self._conditions()
        metrics = RequestMetrics(
            clock=clocks.monotonic,
            predictor=FirstTokenPredictor(fit=conditions.chunk_sizer.fit, clock=clocks.monotonic),
            tracer=RequestTracer(
                parallel=self.parallel, sink=sinks.spans, model_name=sinks.model_name, clock=clocks.wall
            ),
        )
        progress, one_in = StepProgress(), self.config.integrity.owners_one_in
        log = AllocationLog(progress=progress, one_in=one_in) if one_in else None
        kv_cache = RequestKvCache[RadixNode](
            cache=tiers.cache,
            tiers=None if isinstance(tiers.cache, RadixCache) else tiers.cache,
            counters=metrics.counters,
            allocation_log=NullAllocationSink() if log is None else log,
            decisions=self.decisions,
            namespaces=EngineRequest.namespace_in,
            on_cached_prompt=EngineRequest.record_cached_prompt,
        )
        waiting = self._waiting(kv_cache, conditions, metrics)
        batcher = waiting.batcher
        checks = compose_integrity(
            self.config.integrity, self.parallel, tiers, batcher.queues, self.sessions, progress, log
        )
        output = OutputStreamer(sink=sinks.outputs)
        results = BatchResultProcessor(
            kv=SessionKvReleaser(kv=kv_cache, sessions=self.sessions),
            requests=waiting,
            output=output,
            observer=metrics,
            eos_token_ids=frozenset(self.config.tokens.eos_token_ids),
        )
        return Scheduler(
            device=device,
            queues=batcher.queues,
            agreement=self._agreement(waiting),
            waiting=waiting,
            lora=self.lora,
            sessions=self.sessions,
            tiers=tiers,
            kv_cache=kv_cache,
            settings=BatcherSettings(config=self.config, batcher=batcher),
            batcher=batcher,
            results=results,
            output=output,
            request_metrics=metrics,
            integrity=checks,
            decisions=self.decisions,
            **self._reports(waiting, metrics, checks, output),
        )

    def _waiting(
        self, kv_cache: RequestKvCache[RadixNode], conditions: BatchConditions, metrics: RequestMetrics
    ) -> WaitingPath[EngineRequest]:
        """Compose the path of a request until it is computed: rooms, queues, batcher."""
        config, rooms = self.config, tuple(self.parts.get("rooms", ()))
        if self.parts.get("lora") is not None:
            rooms = (*rooms, self.lora)
        batcher = compose_batcher(
            kv_cache,
            config.batch_limits,
            schedule_policy=config.schedule_policy,
            preemption_policy=config.preemption_policy,
            conditions=conditions,
            observer=metrics,
            decisions=self.decisions,
        )
        deadlines = RequestDeadlines[EngineRequest](defaults=config.timeouts)
        return WaitingPath(batcher=batcher, rooms=WaitingRooms(rooms=rooms), deadlines=deadlines)

    def _conditions(self) -> BatchConditions:
        return BatchConditions(
            gate=self.quiesce,
            dp=self.parts.get("dp") or DpBatchSync(),
            new_token_ratio=make_ratio_tracker(self.config),
            chunk_sizer=DynamicChunkSizer(page_size=self.config.page_size),
            idle_pages=self.sessions,
        )

    def _agreement(self, waiting: WaitingPath[EngineRequest]) -> StepAgreement:
        return StepAgreement(
            groups=self.groups,
            parts=(self.decisions, *self.tiers.agreement_parts, *waiting.rooms.rooms, self.sessions),
            clock=self.clocks.monotonic,
            leads=self.parallel.leads_replica or not self.groups.groups,
        )

    def _reports(
        self, waiting: WaitingPath[EngineRequest], metrics: RequestMetrics, checks: PoolChecks, output: OutputStreamer
    ) -> _Reports:
        """Compose what reports load, events and statistics."""
        parallel, clocks, sinks, queues = self.parallel, self.clocks, self.sinks, waiting.batcher.queues
        load = LoadInquirer(
            parallel=parallel,
            queues=queues,
            pool=self.tiers.cache,
            rates=metrics.rates,
            work=metrics.work,
            sections=self.lora.load_sections,
            clock=clocks.wall,
        )
        forward_passes = ForwardPassPublisher(
            parallel=parallel,
            queues=queues,
            sink=sinks.forward_passes,
            worker_id=sinks.worker_id,
            clock=clocks.monotonic,
        )
        sources: dict[str, StatsSource[object]] = {
            "counters": metrics,
            "latencies": metrics.latencies,
            "tiers": self.tiers,
            "receiver": LiveStats(metrics.receiver),
            "quiesce": self.quiesce,
            "integrity": checks.checker,
            "pools": checks.pools,
            "batching": BatchingReport(batcher=waiting.batcher, request_metrics=metrics),
            "outputs": output,
            "forward_passes": forward_passes,
            "spans": metrics.tracer,
            "rooms": waiting.rooms,
            "deadlines": waiting.deadlines,
            "decisions": self.decisions,
            "sessions": self.sessions,
            "adapters": self.lora,
        }
        for room in waiting.rooms.rooms:
            if isinstance(room, GrammarQueue):
                sources["grammars"] = room
        kv_events, emitter = compose_reports(load, checks.events, sinks, sources)
        return {"load": load, "kv_events": kv_events, "metrics": emitter, "forward_passes": forward_passes}


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
