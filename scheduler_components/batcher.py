"""Batcher: choose which positions of which requests the device computes next, and allocate their pages.

Batching is continuous: every step makes a new batch of the running and waiting requests. The rules, in the order in
which a step applies them:

1. Every running request advances by one decode token or one chunk of its prefill, the earliest arrival first. In
   ``prefill_first`` mode those in prefill advance alone, and decodes only in a step without a prefill.
2. While the pool is full, the pages of idle sessions are released first, and a release never preempts a request. After
   them the preemption policy selects a victim among the running requests, but never the earliest
   arrival. So the earliest always advances whatever the size of the pool, every running request becomes the earliest
   one day, and no two requests preempt each other for ever. With a host tier the full pages of the victim are copied
   there. Requests that need them wait for the copy and preempt no one else for it.
3. The scheduling policy orders the waiting requests. They are admitted in this order until one is refused by the
   ``AdmissionBudget``, except for ``tenant`` and ``not_ready`` without ``head_of_line_blocking``. No request is
   admitted in a step that preempts one.

A held request waits for something other than pages, such as a grammar or an adapter (``waiting/``). It counts as
waiting, but the policy does not know it before it is released, and it is not admitted before.

All decisions depend on the sequence of calls only, never on a clock or on the rank, so all ranks of a replica make the
same batch. Time is the number of the step.

A policy is code of a user. If it raises an exception, names a request twice or one that does not wait, or leaves one
out, the batcher logs one sentence, counts it, and serves the requests first come, first served from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import msgspec

from scheduler_components._internal.old_names import old_names
from scheduler_components.batch_result_processor import NullResultObserver
from scheduler_components.ports import (
    BatchedRequest,
    ComputeGate,
    DecisionSink,
    IdlePages,
    NullComputeGate,
    NullDecisionLog,
    NullIdlePages,
    PreemptionPolicy,
    SchedulingPolicy,
)
from scheduler_components.scheduling.admission_budget import (
    AdmissionBudget,
    AdmissionDemand,
    BatchLimits,
    estimate_pages,
    estimate_pages_to_allocate,
    prefill_chunk,
)
from scheduler_components.scheduling.dp_attn import DpBatchSync, PrefillIntent
from scheduler_components.scheduling.dynamic_chunk_sizer import DynamicChunkSizer
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.scheduling.preemption_policy import LatestArrival
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.scheduling.scheduling_policy import FirstComeFirstServed, ignores_batches
from scheduler_components.values import (
    BatchShape,
    FinishReason,
    RefusalReason,
    RequestState,
    ScheduledBatch,
    ScheduledChunk,
)

__all__ = [
    "BatchConditions",
    "BatchObserver",
    "Batcher",
    "KvAllocator",
]

logger = logging.getLogger(__name__)

_MAX_SKIPPED = 128
"""Refused requests that a step passes over, so that 10,000 waiting requests of one tenant cost no more than 128."""

_MAX_PREFILL_STEPS = 16
"""Steps in a row in which prefills hold up decodes in ``prefill_first`` mode. Prompts that end with their first token
never take a slot for long, so without a limit they could hold up decodes for ever."""


R = TypeVar("R", bound=BatchedRequest)

_arrival = attrgetter("arrival")
Request_contra = TypeVar("Request_contra", contravariant=True)


class KvAllocator(Protocol[Request_contra]):
    """Fetches and assigns KV pages: ``RequestKvCache``, or a wrapper that also counts the pools of a hybrid model.

    Its members are those of ``RequestKvCache``. They are twelve, because the pages of a request come from its cache,
    from lower tiers and from the free list.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def available_pages(self) -> int: ...

    @property
    def token_usage(self) -> float: ...

    @property
    def num_look_ahead(self) -> int: ...

    @property
    def num_pending_pages(self) -> int: ...

    def match_length(self, request: Request_contra) -> int: ...

    def is_ready(self, request: Request_contra, *, is_next: bool) -> bool: ...

    def match(self, request: Request_contra) -> None: ...

    def grow(self, request: Request_contra, num_tokens: int) -> bool: ...

    def free(self, request: Request_contra) -> None: ...

    def on_admitted(self, request: Request_contra) -> None: ...

    def on_preempted(self, request: Request_contra) -> None: ...


class BatchObserver(Protocol[Request_contra]):
    """Counts and times what the batcher does. It changes nothing."""

    def on_admitted(self, request: Request_contra) -> None:
        """Handle that a waiting request got its first pages."""
        ...

    def on_retracted(self, request: Request_contra) -> None:
        """Handle that a running request lost its pages and waits again."""
        ...


@dataclass(slots=True, kw_only=True)
class BatchConditions:
    """What limits a batch besides sizes, queues and pages.

    Attributes:
        gate: says whether control requests allow to admit and to compute requests.
        dp: exchange with the other replicas under DP attention; by default there are none.
        new_token_ratio: share of a request's possible output that an admission reserves now.
        chunk_sizer: limits the length of the next chunk of a prompt.
        idle_pages: locked pages that are released before a request is preempted, or refused for lack of pages.
    """

    gate: ComputeGate = field(default_factory=NullComputeGate)
    dp: DpBatchSync = field(default_factory=DpBatchSync)
    new_token_ratio: NewTokenRatioTracker = field(default_factory=NewTokenRatioTracker)
    chunk_sizer: DynamicChunkSizer = field(default_factory=DynamicChunkSizer)
    idle_pages: IdlePages = field(default_factory=NullIdlePages)

    @property
    def can_admit(self) -> bool:
        """True if requests may be admitted now."""
        return self.gate.can_admit and self.dp.last.may_prefill


@dataclass(slots=True, kw_only=True)
class Batcher(Generic[R]):  # noqa: SCH003 - seven parts, and where its decisions are noted
    """Makes batches by the rules at the top of this file. It is the ``RequestFinisher`` of a scheduler.

    Attributes:
        limits: sizes of a batch.
        queues: the waiting and running requests. Add and end requests through this class, so that the policy knows.
        kv_cache: allocates and frees the pages of requests.
        policy: orders the waiting requests.
        preemption: selects the request that gives up its pages.
        conditions: control requests, other replicas, the new-token ratio, the length of chunks.
        observer: counts and times admissions and preemptions; no decision depends on it.
        decisions: where it notes what it decides.
        num_steps: batches so far.
        refusals: requests that a step did not admit, by reason. A request counts once in each step that reads it.
        preemptions: victims, by the name of the class that selected them.
        num_replaced_policies: policies that failed and were replaced.
    """

    limits: BatchLimits
    queues: RequestQueues[R]
    kv_cache: KvAllocator[R]
    policy: SchedulingPolicy[R] = field(default_factory=FirstComeFirstServed)
    preemption: PreemptionPolicy[R] = field(default_factory=LatestArrival)
    conditions: BatchConditions = field(default_factory=BatchConditions)
    observer: BatchObserver[R] = field(default_factory=NullResultObserver)
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    num_steps: int = field(default=0, init=False)
    refusals: dict[RefusalReason, int] = field(default_factory=dict, init=False)
    preemptions: dict[str, int] = field(default_factory=dict, init=False)
    num_replaced_policies: int = field(default=0, init=False)
    _num_prefill_steps: int = field(default=0, init=False, repr=False)

    @property
    def has_work(self) -> bool:
        """True if the next batch would not be empty, or would not be once a prefetch has completed."""
        gate, queues = self.conditions.gate, self.queues
        return bool((gate.can_admit and queues.num_admissible) or (gate.can_compute and queues.running))

    @property
    def repeats_decodes(self) -> bool:
        """True if each next batch decodes every running request by one token and changes nothing else.

        That ends when a request is added or ends, or when the pool has no page for one of them. A simulation then takes
        such steps without ``next_batch``, and calls ``skip_decodes``. It is False under DP attention, and for a policy
        that reads batches.
        """
        queues, conditions = self.queues, self.conditions
        if queues.num_chunked_tokens_left or not queues.running or not conditions.gate.can_compute:
            return False
        if conditions.dp.num_replicas > 1 or not ignores_batches(self.policy):
            return False
        if self.limits.counts_decodes and len(queues.running) > self.limits.max_prefill_tokens:
            return False
        if not queues.num_admissible or not conditions.can_admit:
            return True
        is_passed_over = self._num_prefill_steps >= _MAX_PREFILL_STEPS or self.kv_cache.num_look_ahead
        return self._lasting_refusal() is not None and not is_passed_over

    def skip_decodes(self, num_steps: int) -> None:
        """Count steps that were taken without ``next_batch``, because ``repeats_decodes`` is True."""
        self.num_steps += num_steps
        self._num_prefill_steps = 0
        ratio = self.conditions.new_token_ratio
        for _ in range(num_steps):
            if ratio.current <= ratio.minimum:
                break
            ratio.decay_step()
        refusal = self._lasting_refusal() if self.queues.num_admissible and self.conditions.can_admit else None
        if refusal is not None:
            self.refusals[refusal] = self.refusals.get(refusal, 0) + num_steps

    def _lasting_refusal(self) -> RefusalReason | None:
        """Return why a step with these running requests in decode admits no request; None if it may admit one."""
        num_running, limits = len(self.queues.running), self.limits
        if limits.counts_decodes and limits.mode == "mixed" and num_running >= limits.max_prefill_tokens:
            return "tokens"
        return "slots" if num_running >= self.queues.max_running_requests else None

    def add(self, request: R) -> None:
        """Queue a new request."""
        self.queues.add(request)
        self._admit_from_now_on(request)

    def hold(self, request: R) -> None:
        """Queue a new request that may not be admitted before ``release``."""
        self.queues.hold(request)

    def release(self, request: R) -> None:
        """Allow the admission of a held request."""
        self.queues.release(request)
        self._admit_from_now_on(request)

    def _admit_from_now_on(self, request: R) -> None:
        self._add_to_policy(request)
        self.decisions.note("queue", request.rid, request.arrival, request.num_input_tokens, request.num_cached_tokens)

    def finish(self, request: R, reason: FinishReason) -> None:
        """Remove a waiting or running request, free its slot, and set its ``finish_reason``. Its pages stay its own."""
        if self.queues.is_admissible(request):
            self._discard_from_policy(request)
        self.queues.finish(request, reason)
        self.decisions.note("finish", request.arrival, reason.value)

    def on_results(self, batch: ScheduledBatch[R]) -> None:
        """Handle that the results of a batch were applied and its ended requests were streamed."""
        if batch.num_prefill_tokens:
            for chunk in batch.chunks:
                if chunk.is_prefill:
                    self.queues.update_prefill_tokens(chunk.request)
        self.queues.on_aborts_streamed()

    def retract_all(self) -> int:
        """Move every running request back to the waiting queue, with its output, and return their number."""
        running = self.queues.running
        num_running = len(running)
        while running:
            self._retract(running[-1])
        return num_running

    def next_batch(self) -> ScheduledBatch[R]:
        """Make the next batch and allocate its pages. It is empty if no request can or may be computed."""
        self.num_steps += 1
        conditions = self.conditions
        batch = self._local_batch() if conditions.gate.can_compute else ScheduledBatch()
        if batch.chunks:
            if self.decisions.wants_decisions:
                # The sum of the ends shows that a chunk differs. One list of arrivals costs half of arrivals and ends.
                arrivals = [chunk.request.arrival for chunk in batch.chunks]
                self.decisions.note("batch", batch.num_prefill_tokens, batch.num_context_tokens, *arrivals)
            try:
                self.policy.on_scheduled(batch.chunks)
            except Exception as error:  # noqa: BLE001 - counted and logged; the policy is replaced
                self._replace_policy(f"on_scheduled() raised {error!r}")
        return batch if conditions.dp.num_replicas == 1 else self._exchange_shapes(batch)

    def _local_batch(self) -> ScheduledBatch[R]:
        chunks: list[ScheduledChunk[R]] = []
        ratio = self.conditions.new_token_ratio
        if not self.queues.running:
            ratio.reset()
        num_retracted, num_admitted = self._fill(chunks)
        if num_retracted:
            ratio.on_retract(self.queues.running)
        else:
            ratio.decay_step()
        num_prefill_tokens = _num_prefill_tokens(chunks)
        return ScheduledBatch(
            chunks=tuple(chunks),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=sum(not chunk.is_prefill for chunk in chunks),
            num_context_tokens=sum(chunk.end for chunk in chunks),
            num_admitted=num_admitted,
            num_retracted=num_retracted,
        )

    def _fill(self, chunks: list[ScheduledChunk[R]]) -> tuple[int, int]:
        """Add running and waiting requests to the batch. Return how many were retracted and admitted.

        After a retraction no request is admitted, because the next one may be the request just retracted.
        """
        if self.limits.mode == "mixed":
            num_retracted, has_room = self._continue_running(chunks, self.queues.running)
            return num_retracted, self._admit_waiting(chunks) if has_room and self.conditions.can_admit else 0
        num_retracted = num_admitted = 0
        decodes = [request for request in self.queues.running if not request.num_prefill_tokens_left]
        if self._num_prefill_steps < _MAX_PREFILL_STEPS or not decodes:
            prefills = [request for request in self.queues.running if request.num_prefill_tokens_left]
            num_retracted, has_room = self._continue_running(chunks, prefills)
            if has_room and self.conditions.can_admit:
                num_admitted = self._admit_waiting(chunks)
        self._num_prefill_steps = self._num_prefill_steps + 1 if chunks and decodes else 0
        if not chunks:
            num_retracted += self._continue_running(chunks, decodes)[0]
        return num_retracted, num_admitted

    def _exchange_shapes(self, batch: ScheduledBatch[R]) -> ScheduledBatch[R]:
        """Exchange the shapes of this step's batches with the other replicas, and add them to the batch."""
        queues = self.queues
        shape = BatchShape(
            batch.num_prefill_tokens, batch.num_decode_tokens, batch.num_context_tokens, not batch.num_prefill_tokens
        )
        intent = PrefillIntent(
            has_work=self.has_work,
            is_running=bool(queues.running),
            is_prefilling=queues.num_chunked_tokens_left > batch.num_prefill_tokens,
            is_prefillable=queues.num_admissible > 0 and len(queues.running) < queues.max_running_requests,
            token_usage=self.kv_cache.token_usage,
        )
        return msgspec.structs.replace(batch, replicas=self.conditions.dp.exchange(shape, intent).shapes)

    def _continue_running(self, chunks: list[ScheduledChunk[R]], requests: Sequence[R]) -> tuple[int, bool]:
        """Add running requests to the batch, earliest first.

        Return how many were retracted for that, and whether the pool had room for all. The earliest request of all
        always fits if the pool can hold it alone, because all others can be retracted.
        """
        limits, grow, running = self.limits, self.kv_cache.grow, RequestState.RUNNING
        budget_tokens, counts_decodes = limits.max_prefill_tokens, limits.counts_decodes
        num_retracted, has_room = 0, True
        for request in tuple(requests):
            if request.state is not running:
                continue  # it was a victim
            num_left = request.num_prefill_tokens_left
            if num_left:
                num_tokens = self._next_chunk_tokens(request, num_left, budget_tokens)
            else:
                num_tokens = request.num_uncomputed_tokens
                if counts_decodes:
                    num_tokens = min(num_tokens, budget_tokens)
            if not num_tokens:
                continue
            while not grow(request, num_tokens):
                if self.conditions.idle_pages.release_next():
                    continue
                has_room = False
                if self._has_pages_coming(request, num_tokens):
                    break
                victim = self._select_victim()
                budget_tokens += self._remove_chunk(chunks, victim)
                self._retract(victim)
                self.kv_cache.on_preempted(victim)
                num_retracted += 1
                if victim is request:
                    break
            else:
                start = request.num_computed_tokens
                chunks.append(ScheduledChunk(request, start, start + num_tokens, num_left > 0))
                if num_left or counts_decodes:
                    budget_tokens -= num_tokens
        return num_retracted, has_room

    def _has_pages_coming(self, request: R, num_tokens: int) -> bool:
        """Return True if the pool has room for a request once copies between tiers have ended."""
        num_pending = self.kv_cache.num_pending_pages
        if not num_pending:
            return False
        num_pages = -(-(request.num_computed_tokens + num_tokens) // self.kv_cache.page_size)
        return num_pages - len(request.pages) <= self.kv_cache.available_pages + num_pending

    def _next_chunk_tokens(self, request: R, num_tokens_left: int, budget_tokens: int) -> int:
        """Return the tokens of a prefill to compute now: 0 if no budget is left."""
        chunk_tokens = self.conditions.chunk_sizer.chunk_tokens(request.num_computed_tokens, self.limits.chunk_tokens)
        return prefill_chunk(num_tokens_left, chunk_tokens=chunk_tokens, budget_tokens=budget_tokens)

    def _remove_chunk(self, chunks: list[ScheduledChunk[R]], request: R) -> int:
        """Remove the chunk of a victim that is in the batch already. Return the budget that it had spent."""
        for index, chunk in enumerate(chunks):
            if chunk.request is request:
                del chunks[index]
                return chunk.num_tokens if chunk.is_prefill or self.limits.counts_decodes else 0
        return 0

    def _select_victim(self) -> R:
        """Return the running request to preempt: never the earliest arrival, unless it runs alone.

        A request that runs alone does not fit while a transfer between tiers holds pages. It waits for them.
        """
        running = self.queues.running
        if len(running) == 1:
            return running[0]
        candidates = running[1:]
        try:
            victim = self.preemption.select_victim(candidates)
            problem = (
                ""
                if any(victim is each for each in candidates)
                else f"select_victim() returned {victim!r}, which is no candidate"
            )
        except Exception as error:  # noqa: BLE001 - counted and logged; the policy is replaced
            problem = f"select_victim() raised {error!r}"
        if problem:
            self._report("preemption", self.preemption, problem, "the latest arrival is preempted from now on")
            self.preemption = LatestArrival()
            victim = self.preemption.select_victim(candidates)
        name = type(self.preemption).__name__
        self.preemptions[name] = self.preemptions.get(name, 0) + 1
        return victim

    def _retract(self, request: R) -> None:
        """Free the pages of a request and move it to the head of the waiting queue. Its output is prefilled again."""
        self.decisions.note("preempt", request.arrival, request.num_computed_tokens)
        self.kv_cache.free(request)
        request.num_retractions += 1
        self.queues.requeue(request)
        self._add_to_policy(request)
        self.observer.on_retracted(request)

    def _admit_waiting(self, chunks: list[ScheduledChunk[R]]) -> int:
        """Admit waiting requests in the order of the policy, by rule 3. Return how many were admitted."""
        if not self.queues.num_admissible:
            return 0
        budget, kv_cache = self._make_budget(chunks), self.kv_cache
        refusal = budget.refusal_of(AdmissionDemand())
        if refusal is not None and not kv_cache.num_look_ahead:
            self._count(refusal)  # the order is not read
            return 0
        order = self._order()
        num_admitted = num_skipped = 0
        for request in order:
            refusal = self._try_admit(request, budget, chunks)
            if refusal is None:
                num_admitted += 1
                continue
            self._count(refusal)
            may_skip = refusal in ("tenant", "not_ready") and not self.limits.head_of_line_blocking
            if not may_skip or num_skipped == _MAX_SKIPPED:
                break
            num_skipped += 1
        for request in islice(order, kv_cache.num_look_ahead):
            kv_cache.is_ready(request, is_next=False)
        return num_admitted

    def _make_budget(self, chunks: list[ScheduledChunk[R]]) -> AdmissionBudget:
        """Return what is left of this step after the running requests."""
        limits, queues = self.limits, self.queues
        spent = sum(chunk.num_tokens for chunk in chunks if chunk.is_prefill or limits.counts_decodes)
        by_tenant: dict[str, int] = {}
        if limits.max_running_per_tenant is not None:
            for request in queues.running:
                by_tenant[request.hints.tenant] = by_tenant.get(request.hints.tenant, 0) + 1
        tokens, slots = limits.max_prefill_tokens - spent, max(0, queues.max_running_requests - len(queues.running))
        return AdmissionBudget(
            tokens=tokens,
            slots=slots,
            reserved_pages=self._pages_to_allocate(queues.running) if tokens > 0 and slots else 0,
            watermark_pages=limits.watermark_pages,
            num_running=len(queues.running),
            tenant_cap=limits.max_running_per_tenant,
            running_by_tenant=by_tenant,
        )

    def _pages_to_allocate(self, requests: Sequence[R]) -> int:
        return estimate_pages_to_allocate(
            requests, page_size=self.kv_cache.page_size, new_token_ratio=self.conditions.new_token_ratio.current
        )

    def _try_admit(self, request: R, budget: AdmissionBudget, chunks: list[ScheduledChunk[R]]) -> RefusalReason | None:
        """Lock the cached prefix of a waiting request, admit it and add its first chunk, or return why not."""
        tenant, kv_cache = request.hints.tenant, self.kv_cache
        refusal = budget.refusal_of(AdmissionDemand(tenant=tenant))
        if refusal is None and not kv_cache.is_ready(request, is_next=True):
            refusal = "not_ready"
        if refusal is not None:
            return refusal
        num_cached_before = request.num_cached_tokens
        kv_cache.match(request)
        budget.available_pages = kv_cache.available_pages
        num_expected = estimate_pages(
            request, page_size=kv_cache.page_size, new_token_ratio=self.conditions.new_token_ratio.current
        )
        demand = AdmissionDemand(num_pages=num_expected - len(request.pages), tenant=tenant)
        refusal = budget.refusal_of(demand)
        idle_pages = self.conditions.idle_pages
        while refusal in ("pages", "watermark") and idle_pages.release_next(budget.num_missing_pages(demand)):
            budget.available_pages = kv_cache.available_pages
            refusal = budget.refusal_of(demand)
        if refusal is not None:
            kv_cache.free(request)
            if request.num_cached_tokens != num_cached_before:
                self.queues.waiting.recount(request)
            return refusal
        request.prefill_end = request.num_input_tokens
        self._discard_from_policy(request)
        self.queues.admit(request)
        kv_cache.on_admitted(request)
        self.observer.on_admitted(request)
        num_tokens = self._next_chunk_tokens(request, request.num_prefill_tokens_left, budget.tokens)
        self.decisions.note("admit", request.arrival, request.num_cached_tokens, num_tokens)
        has_room = kv_cache.grow(request, num_tokens)
        assert has_room, f"{request!r}: no room for its first chunk after its admission"
        start = request.num_computed_tokens
        chunks.append(ScheduledChunk(request, start, start + num_tokens, is_prefill=True))
        budget.spend(
            AdmissionDemand(num_tokens=num_tokens, tenant=tenant),
            reserved_pages=self._pages_to_allocate([request]),
        )
        return None

    # --- the policy, which may fail ---

    def _order(self) -> Iterator[R]:
        """Iterate over the waiting requests in the order of the policy, or from a failure on in order of arrival.

        Every waiting request comes once, whatever the policy does.
        """
        queues, policy = self.queues, self.policy
        num_waiting, seen, problem = queues.num_admissible, set[int](), ""
        try:
            for request in policy.order(self.num_steps):
                if id(request) in seen:
                    problem = f"order() returned {request!r} twice"
                elif not queues.is_admissible(request):
                    problem = f"order() returned {request!r}, which does not wait"
                if problem or self.policy is not policy:
                    break
                seen.add(id(request))
                yield request
            else:
                if len(seen) == num_waiting:
                    return
                problem = f"order() left out {num_waiting - len(seen)} of {num_waiting} waiting requests"
        except Exception as error:  # noqa: BLE001 - counted and logged; the policy is replaced
            problem = f"order() raised {error!r}"
        if self.policy is policy:
            self._replace_policy(problem)
        for request in self.policy.order(self.num_steps):
            if id(request) not in seen:
                yield request

    def _add_to_policy(self, request: R) -> None:
        try:
            self.policy.add(request, self.num_steps)
        except Exception as error:  # noqa: BLE001 - counted and logged; the policy is replaced
            self._replace_policy(f"add() raised {error!r}")

    def _discard_from_policy(self, request: R) -> None:
        try:
            self.policy.discard(request)
        except Exception as error:  # noqa: BLE001 - counted and logged; the policy is replaced
            self._replace_policy(f"discard() raised {error!r}")
            self.policy.discard(request)

    def _replace_policy(self, problem: str) -> None:
        """Serve the waiting requests first come, first served from now on, because the policy has failed."""
        self._report("scheduling", self.policy, problem, "requests are served first come, first served from now on")
        self.policy = FirstComeFirstServed()
        for request in sorted(filter(self.queues.is_admissible, self.queues.waiting), key=_arrival):
            self.policy.add(request, self.num_steps)

    def _report(self, kind: str, policy: object, problem: str, consequence: str) -> None:
        self.num_replaced_policies += 1
        logger.error("the %s policy %s failed: %s; %s", kind, type(policy).__name__, problem, consequence)

    def _count(self, refusal: RefusalReason) -> None:
        self.refusals[refusal] = self.refusals.get(refusal, 0) + 1


def _num_prefill_tokens(chunks: Sequence[ScheduledChunk[R]]) -> int:
    return sum(chunk.num_tokens for chunk in chunks if chunk.is_prefill)


__getattr__ = old_names(__name__)
