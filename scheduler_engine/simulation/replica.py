"""SimulatedReplica: one real scheduler over a virtual clock and a device that only charges its cost.

A step receives the requests that have arrived, makes a batch, charges the duration of the batch to the clock, applies
the results, and publishes. It makes the calls of the reference engine in the same order, so both note equal decisions.

**Fast-forward.** Most steps decode: nothing waits that could be admitted, no request is in prefill, none ends. What
such a step does follows from the step before it: each request gets one token and, every ``page_size`` steps, one page.
``fast_forward`` makes exactly these changes without building the batches. It ends before a step that does anything
else, such as one that polls the end of a transfer between tiers. ``tests/scheduler_engine/simulation/test_replica.py``
compares decisions, times and events with those of single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import attrs

from scheduler_components._internal.validators import MAX_TOKENS, choice_validator, integer_validator, number_validator
from scheduler_components._internal.virtual_clock import NEVER_NS, VirtualClock, nanoseconds
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.batch_result_processor import BatchResultProcessor, RequestResult
from scheduler_components.batcher import BatchConditions, Batcher
from scheduler_components.cache import RadixCache, RadixNode
from scheduler_components.errors import ConfigError
from scheduler_components.events import EventBatch
from scheduler_components.hicache import HiRadixCache
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from scheduler_components.load.work_counters import WorkCounters
from scheduler_components.load_inquirer import LoadInquirer
from scheduler_components.metrics import RateMeter
from scheduler_components.output_streamer import OutputStreamer
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullDecisionLog, NullOutputSink
from scheduler_components.scheduling.admission_budget import BATCH_MODES, BatchLimits, BatchMode
from scheduler_components.scheduling.composition import SchedulerSinks, compose_batcher, compose_reports, note_step
from scheduler_components.scheduling.dynamic_chunk_sizer import DynamicChunkSizer
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.scheduling.preemption_policy import PREEMPTION_POLICY_NAMES
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.scheduling.scheduling_policy import check_policy_name
from scheduler_components.values import (
    BatchShape,
    FinishReason,
    LoadSnapshot,
    PublisherStats,
    ScheduledBatch,
    TierStats,
)
from scheduler_engine.simulation.request import SimulatedRequest
from scheduler_engine.simulation.simulated_model import CostModel, SimulatedModel
from scheduler_engine.simulation.tiers import (
    DeviceOnly,
    SimulatedTiers,
    TierConfig,
    check_num_pages,
    make_storage,
)
from scheduler_engine.simulation.virtual_page_mover import SimulatedStorage


def _check_policy(_: object, __: object, value: str) -> None:
    check_policy_name(value)


@attrs.frozen(kw_only=True)
class ReplicaConfig:
    """Sizes and policies of a replica. The defaults are the reference engine's, with the pool of one accelerator.

    Attributes:
        page_size: tokens per KV page.
        kv_tokens: capacity of the KV pool; 34 GB at 131 KB per token.
        max_running_requests, max_prefill_tokens, chunk_tokens, counts_decodes, batch_mode: as in ``BatchLimits``.
        new_token_ratio, min_new_token_ratio: as in ``NewTokenRatioTracker``.
        schedule_policy: a name that ``make_policy`` takes.
        preemption_policy: a name that ``make_preemption_policy`` takes.
        cost: the duration of a batch.
        speed: divides the duration.
        model: the generated tokens.
        tiers: what keeps pages that the device evicts; None for nothing.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    page_size: int = attrs.field(default=16, validator=integer_validator(at_most=MAX_TOKENS))
    kv_tokens: int = attrs.field(default=262_144, validator=integer_validator(at_most=MAX_TOKENS))
    max_running_requests: int = attrs.field(default=64, validator=integer_validator())
    max_prefill_tokens: int = attrs.field(default=4096, validator=integer_validator(at_most=MAX_TOKENS))
    chunk_tokens: int = attrs.field(default=2048, validator=integer_validator(at_most=MAX_TOKENS))
    counts_decodes: bool = False
    batch_mode: BatchMode = attrs.field(default="mixed", validator=choice_validator(*BATCH_MODES))
    new_token_ratio: float = 0.7
    min_new_token_ratio: float = 0.1
    schedule_policy: str = attrs.field(default="fcfs", validator=_check_policy)
    preemption_policy: str = attrs.field(default="latest-arrival", validator=choice_validator(*PREEMPTION_POLICY_NAMES))
    cost: CostModel = attrs.field(factory=CostModel)
    speed: float = attrs.field(default=1.0, validator=number_validator("is not a speed", at_least=1e-6, at_most=1e6))
    model: SimulatedModel = attrs.field(factory=SimulatedModel)
    tiers: TierConfig | None = None

    def __attrs_post_init__(self) -> None:
        if self.kv_tokens < self.page_size:
            hint = f"give at least page_size={self.page_size}"
            raise ConfigError("kv_tokens", self.kv_tokens, "does not hold one page", hint)
        check_num_pages("kv_tokens", self.kv_tokens, self.page_size)
        if self.tiers is not None:
            self.tiers.check_page_size(self.page_size)
        self.make_ratio()

    @property
    def limits(self) -> BatchLimits:
        """The sizes that the batcher reads."""
        return BatchLimits(
            max_running_requests=min(self.max_running_requests, self.kv_tokens // self.page_size),
            max_prefill_tokens=self.max_prefill_tokens,
            chunk_tokens=self.chunk_tokens,
            counts_decodes=self.counts_decodes,
            mode=self.batch_mode,
            head_of_line_blocking=self.schedule_policy == "fcfs",
        )

    def make_ratio(self) -> NewTokenRatioTracker:
        """Return a new tracker of the new-token ratio."""
        return NewTokenRatioTracker(initial=self.new_token_ratio, minimum=self.min_new_token_ratio)

    def can_hold(self, request: SimulatedRequest) -> bool:
        """Return True if the pool can hold a request while no other runs. Its last token needs no KV."""
        num_positions = request.num_prompt_tokens + request.limits.max_new_tokens - 1
        return num_positions <= self.kv_tokens // self.page_size * self.page_size


@dataclass(slots=True, kw_only=True)
class EncodedEventSink:
    """A ``KvEventSink`` that encodes each batch immediately, as a publisher does, and passes on the payload.

    Attributes:
        deliver: receives each payload.
        encoder: writes the payloads.
        num_batches, num_bytes: so far.
    """

    deliver: Callable[[bytes], None]
    encoder: BatchEncoder = field(default_factory=BatchEncoder)
    num_batches: int = 0
    num_bytes: int = 0

    def publish(self, events: EventBatch) -> None:
        payload = self.encoder.encode(events, 0)
        self.num_batches += 1
        self.num_bytes += len(payload)
        self.deliver(payload)

    def idle(self) -> None:
        pass

    def stats(self) -> PublisherStats:
        return PublisherStats(batches_sent=self.num_batches, bytes_sent=self.num_bytes)

    def shutdown(self) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class ReplicaCounts:
    """What a replica has done since its start.

    Attributes:
        num_steps: steps, of which ``num_skipped_steps`` were fast-forwarded.
        busy_ns: duration of all steps.
        busy_until_ns: end of the last step that took time.
        prefill_tokens, decode_tokens: computed positions.
        recomputed_tokens: of the prefilled positions, those that were computed before, here or on another replica.
        migrated_tokens: of these, those that were computed again because a replica failed, and not after a preemption.
        num_retractions: requests that lost their pages to others.
        peak_running: most requests that ran together.
        tiers: counters of the tiers; None without.
    """

    num_steps: int = 0
    num_skipped_steps: int = 0
    busy_ns: int = 0
    busy_until_ns: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    migrated_tokens: int = 0
    num_retractions: int = 0
    peak_running: int = 0
    tiers: TierStats | None = None


@dataclass(slots=True, kw_only=True)
class _RequestClock:
    """The ``BatchObserver`` and ``ResultObserver`` of a replica: writes times into requests, collects ended ones."""

    clock: VirtualClock
    counts: ReplicaCounts
    rates: RateMeter
    finished: list[SimulatedRequest] = field(default_factory=list)

    def on_admitted(self, request: SimulatedRequest) -> None:
        if request.admitted_ns < 0:
            request.admitted_ns = self.clock.now_ns
            request.num_cached_prompt_tokens = request.num_cached_tokens
        if not request.num_retractions:
            self.rates.observe_prefill(request.num_prompt_tokens, request.num_cached_tokens)

    def on_retracted(self, request: SimulatedRequest) -> None:
        request.has_lost_replica = False
        self.counts.num_retractions += 1

    def on_tokens(self, requests: Sequence[SimulatedRequest], num_tokens: Sequence[int]) -> None:
        self.rates.observe_decode(sum(num_tokens))
        for request in requests:
            if request.first_token_ns < 0:
                request.first_token_ns = self.clock.now_ns

    def on_finished(self, request: SimulatedRequest, reason: FinishReason) -> None:
        request.finished_ns = self.clock.now_ns
        self.finished.append(request)


def _open_kv_cache(
    cache: RadixCache | HiRadixCache, decisions: DecisionLog | NullDecisionLog
) -> RequestKvCache[RadixNode]:
    return RequestKvCache[RadixNode](
        cache=cache,
        tiers=None if isinstance(cache, RadixCache) else cache,
        decisions=decisions,
        on_cached_prompt=SimulatedRequest.record_cached_prompt,
    )


def _conditions(config: ReplicaConfig) -> BatchConditions:
    chunk_sizer = DynamicChunkSizer(page_size=config.page_size)
    return BatchConditions(new_token_ratio=config.make_ratio(), chunk_sizer=chunk_sizer)


@dataclass(slots=True, kw_only=True)
class SimulatedReplica:  # noqa: SCH003 - the composition of a scheduler
    """A scheduler composed of the kit's parts, in virtual time. ``compose`` wires it.

    Attributes:
        config: sizes and policies.
        clock: the time of this replica: the end of its last step.
        queues, tiers, cache, kv_cache, batcher, results, kv_events, load: the parts.
        work: tickets of received requests and the work done, for load reports.
        decisions: the log that all parts note in.
        counts: what it has done.
        inbox: requests that the next step receives.
        observer: collects the requests that ended; ``pop_finished`` returns them.
    """

    config: ReplicaConfig
    clock: VirtualClock
    queues: RequestQueues[SimulatedRequest]
    tiers: SimulatedTiers | DeviceOnly
    cache: RadixCache | HiRadixCache
    kv_cache: RequestKvCache[RadixNode]
    batcher: Batcher[SimulatedRequest]
    results: BatchResultProcessor[SimulatedRequest]
    kv_events: SchedulerKvEventsPublisher
    load: LoadInquirer
    work: WorkCounters
    decisions: DecisionLog | NullDecisionLog
    counts: ReplicaCounts
    observer: _RequestClock
    inbox: list[SimulatedRequest] = field(default_factory=list)
    _waits_for_tiers: bool = field(default=False, init=False)

    @classmethod
    def compose(
        cls,
        config: ReplicaConfig,
        *,
        start_ns: int = 0,
        deliver_events: Callable[[bytes], None] | None = None,
        decisions: DecisionLog | NullDecisionLog | None = None,
        storage: SimulatedStorage | None = None,
    ) -> SimulatedReplica:
        """Wire a replica.

        Args:
            config: sizes and policies.
            start_ns: virtual time of its start.
            deliver_events: receives encoded KV events. Without it the cache records none.
            decisions: the log of its decisions. The default notes none.
            storage: what ``make_storage`` returned, for several replicas. The default makes its own.
        """
        parallel, clock, counts = ParallelState.trivial(), VirtualClock(now_ns=start_ns), ReplicaCounts()
        decisions = decisions or NullDecisionLog()
        tiers = _open_tiers(config, clock, storage, record=deliver_events is not None)
        cache = tiers.cache
        cache.record_decisions(decisions)
        kv_cache = _open_kv_cache(cache, decisions)
        work, observer = WorkCounters(), _RequestClock(clock=clock, counts=counts, rates=RateMeter(clock=clock))
        batcher = compose_batcher(
            kv_cache,
            config.limits,
            schedule_policy=config.schedule_policy,
            preemption_policy=config.preemption_policy,
            conditions=_conditions(config),
            observer=observer,
            decisions=decisions,
        )
        results = BatchResultProcessor[SimulatedRequest](
            kv=kv_cache, requests=batcher, output=OutputStreamer(sink=NullOutputSink()), observer=observer
        )
        load = LoadInquirer(
            parallel=parallel, queues=batcher.queues, pool=cache, rates=observer.rates, work=work, clock=clock
        )
        events = EncodedEventSink(deliver=deliver_events or _drop)
        kv_events, _ = compose_reports(load, cache, SchedulerSinks(events=events))
        return cls(
            config=config,
            clock=clock,
            queues=batcher.queues,
            tiers=tiers,
            cache=cache,
            kv_cache=kv_cache,
            batcher=batcher,
            results=results,
            kv_events=kv_events,
            load=load,
            work=work,
            decisions=decisions,
            counts=counts,
            observer=observer,
        )

    @property
    def has_work(self) -> bool:
        """True if a step would do something, now or after a transfer between tiers."""
        return self.is_serving or self.tiers.num_operations > 0

    @property
    def is_serving(self) -> bool:
        """True if it has a request."""
        return bool(self.inbox) or self.batcher.has_work

    @property
    def ready_ns(self) -> int:
        """When the next step can do something: immediately, or when the next transfer ends if it waits for that."""
        if self.inbox or not self._waits_for_tiers:
            return self.clock.now_ns
        return max(self.clock.now_ns, self.tiers.next_end_ns)

    def submit(self, request: SimulatedRequest) -> None:
        """Queue a request, which the next step receives."""
        self.inbox.append(request)

    def step(self) -> float:
        """Take one step and advance the clock by its duration. Return the duration in seconds."""
        tiers, num_calls = self.tiers, self.tiers.num_calls
        self._receive()
        tiers.begin_step()
        self.queues.recount_prefetched(self.kv_cache.prefetched_spans())
        batch = self.batcher.next_batch()
        tiers.submit()
        duration_ns = self._duration_ns(batch) if batch.has_work else 0
        self.clock.now_ns += duration_ns
        if batch.num_prefill_tokens:
            self._count_recomputed(batch)
        next_token = self.config.model.next_token
        updated = self.results.process(
            RequestResult(
                chunk.request,
                chunk.start,
                chunk.end,
                (next_token(chunk.request.text_hash, chunk.end),),
                chunk.is_prefill,
            )
            for chunk in batch.chunks
        )
        self.batcher.on_results(batch)
        if self.decisions.wants_decisions:
            self._note_step(len(updated), [chunk.request for chunk in batch.chunks])
        self.kv_events.publish_kv_events()
        tiers.submit()
        self._waits_for_tiers = not batch.has_work and tiers.num_calls == num_calls
        self._count(batch, duration_ns)
        return duration_ns / 1e9

    def fast_forward(self, until_ns: int = NEVER_NS) -> int:
        """Take the decode steps that begin before ``until_ns``, up to the first one that is not like the one before it.

        Return their number. A request that ends, a request that may be admitted, and a pool without a free page each
        need a real step.
        """
        running, clock, tiers = self.queues.running, self.clock, self.tiers
        until_ns = min(until_ns, tiers.next_end_ns)
        if self.inbox or clock.now_ns >= until_ns or tiers.must_write_ahead or not self.batcher.repeats_decodes:
            return 0
        most = min(request.num_output_tokens_left for request in running) - 1
        if most <= 0:
            return 0
        page_size, grow, notes = self.config.page_size, self.kv_cache.grow, self.decisions.wants_decisions
        growing: dict[int, list[SimulatedRequest]] = {}
        for request in running:
            num_left = len(request.pages) * page_size - request.num_computed_tokens
            growing.setdefault(num_left % page_size, []).append(request)
        shape_s, speed, num_requests = self.config.cost.shape_s, self.config.speed, len(running)
        num_context_tokens = sum(request.num_computed_tokens for request in running)
        started_ns, now_ns, num_steps, num_timed, time_us = clock.now_ns, clock.now_ns, 0, 0, 0
        rates = self.observer.rates
        while num_steps < most and now_ns < until_ns:
            due = growing.get(num_steps % page_size, ())
            num_ahead = 1 if notes else num_steps + 1
            if due and not all(grow(request, num_ahead) for request in due):
                break
            num_steps += 1
            num_context_tokens += num_requests
            shape = BatchShape(0, num_requests, num_context_tokens)
            step_ns = nanoseconds(shape_s(shape) / speed)
            now_ns += step_ns
            clock.now_ns = now_ns
            step_us = round(step_ns / 1e9 * 1e6)
            num_timed += step_us > 0
            time_us += step_us
            rates.observe_decode(num_requests)
            if notes:
                self._note_decodes(num_context_tokens)
            if due:
                self.kv_events.publish_kv_events()
                if self.tiers.must_write_ahead:
                    break
        if not num_steps:
            return 0
        if not notes:
            self._append_tokens(running, num_steps)
        self.batcher.skip_decodes(num_steps)
        if num_timed:
            self.work.record_decodes(num_timed, num_requests, time_us, num_timed * num_requests)
        counts = self.counts
        counts.num_steps += num_steps
        counts.num_skipped_steps += num_steps
        counts.decode_tokens += num_steps * num_requests
        counts.busy_ns += now_ns - started_ns
        counts.busy_until_ns = now_ns
        return num_steps

    def get_loads(self) -> LoadSnapshot:
        """Return the load after the last step."""
        return self.load.get_loads()

    def pop_finished(self) -> list[SimulatedRequest]:
        """Return the requests that have ended since the last call, and drop their tokens."""
        finished, self.observer.finished = self.observer.finished, []
        for request in finished:
            request.drop_tokens()
        return finished

    def _receive(self) -> None:
        if not self.inbox:
            return
        received, self.inbox = self.inbox, []
        for request in received:
            if request.ticket is not None:
                self.work.on_request_received(*request.ticket)
            self.kv_cache.start(request)
            self.batcher.add(request)

    def _duration_ns(self, batch: ScheduledBatch[SimulatedRequest]) -> int:
        duration_ns = nanoseconds(self.config.cost.batch_s(batch) / self.config.speed)
        return self.tiers.end_of_forward_ns(duration_ns) - self.clock.now_ns

    def _count(self, batch: ScheduledBatch[SimulatedRequest], duration_ns: int) -> None:
        counts = self.counts
        counts.num_steps += 1
        counts.busy_ns += duration_ns
        if duration_ns:
            counts.busy_until_ns = self.clock.now_ns
        counts.prefill_tokens += batch.num_prefill_tokens
        counts.decode_tokens += batch.num_decode_tokens
        counts.peak_running = max(counts.peak_running, len(batch.chunks))
        counts.tiers = self.tiers.stats()
        if batch.num_prefill_tokens:
            self.work.record_prefill(batch.num_prefill_tokens, duration_ns / 1e9)
        else:
            self.work.record_decode(batch.num_decode_tokens, duration_ns / 1e9, batch.num_decode_tokens)

    def _count_recomputed(self, batch: ScheduledBatch[SimulatedRequest]) -> None:
        """Count positions that were computed before. Output means that all tokens but the last one were computed."""
        for chunk in batch.chunks:
            if chunk.is_prefill:
                request = chunk.request
                num_decoded = request.num_input_tokens - 1 if request.num_output_tokens else 0
                num_before = max(request.num_prefilled_tokens, num_decoded)
                num_again = max(0, min(chunk.end, num_before) - chunk.start)
                self.counts.recomputed_tokens += num_again
                self.counts.migrated_tokens += num_again * request.has_lost_replica
                request.num_prefilled_tokens = max(request.num_prefilled_tokens, chunk.end)

    def _append_tokens(self, requests: Sequence[SimulatedRequest], num_tokens: int) -> None:
        """Append the next tokens of each request, as so many decode steps do."""
        next_token = self.config.model.next_token
        for request in requests:
            source, first = request.text_hash, request.num_computed_tokens + 1
            request.token_ids.extend([next_token(source, at) for at in range(first, first + num_tokens)])
            request.num_computed_tokens += num_tokens

    def _note_decodes(self, num_context_tokens: int) -> None:
        """Append one token to each running request, and note what a step would note."""
        running = self.queues.running
        self.decisions.note("batch", 0, num_context_tokens, *[request.arrival for request in running])
        self._append_tokens(running, 1)
        self._note_step(len(running), running)

    def _note_step(self, num_updated: int, computed: Sequence[SimulatedRequest]) -> None:
        transfers = self.tiers.num_operations, self.tiers.state_digest
        note_step(self.decisions, num_updated, computed, self.cache, transfers)


def _open_tiers(
    config: ReplicaConfig,
    clock: VirtualClock,
    storage: SimulatedStorage | None,
    *,
    record: bool,
) -> SimulatedTiers | DeviceOnly:
    page_size, kv_tokens = config.page_size, config.kv_tokens
    if config.tiers is None:
        return DeviceOnly(cache=RadixCache(page_size=page_size, capacity_tokens=kv_tokens, record=record), clock=clock)
    return SimulatedTiers.open(
        config.tiers,
        page_size=page_size,
        kv_tokens=kv_tokens,
        clock=clock,
        storage=make_storage(config.tiers, page_size) if storage is None else storage,
        record=record,
    )


def _drop(payload: bytes) -> None:
    pass
