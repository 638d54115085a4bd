"""Batcher: which positions of which requests the device computes next, and on which pages.

Continuous batching: every step makes a new batch from whatever is running and waiting at that moment.
The rules, in the order in which a step applies them:

1. First come, first served. A request that cannot be admitted blocks those behind it: nothing overtakes, so
   nothing starves.
2. Every running request moves on by one decode token or one chunk of its prefill.
3. Where the pool is full, the latest arrival is retracted until the earlier ones fit. The oldest request is
   therefore never retracted, so each step makes progress, whatever the pool's size.
4. A request is admitted while the step has prefill budget, a slot is free, and the pool can hold its whole input
   and a share (the new-token ratio) of the output that it may still produce, beside what the running ones may
   still take.

The decisions depend on the sequence of calls alone, never on a clock or a rank, so that all ranks of a replica make the
same batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from scheduler_components import ConfigError
from scheduler_components.cache import PrefixNamespace
from scheduler_components.dp_attn import BatchShape, PrefillIntent
from scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.reference.device.device import ScheduledBatch, ScheduledChunk
from scheduler_components.reference.device.sampling import MAX_TOKEN_ID
from scheduler_components.reference.engine.config import SchedulerConfig
from scheduler_components.reference.engine.scheduler.admission_budget import AdmissionBudget
from scheduler_components.reference.engine.scheduler.cache_tiers import CacheTiers
from scheduler_components.reference.engine.scheduler.queues import RequestQueues
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.reference.engine.scheduler.request_kv_cache import RequestKvCache, pages_for
from scheduler_components.reference.engine.scheduler.request_metrics import RequestMetrics

__all__ = [
    "Batcher",
    "check_request_fits",
    "check_tokens_known",
    "estimate_pages",
    "estimate_pages_to_allocate",
    "prefill_chunk",
    "select_preemption_victim",
]


_LOOK_AHEAD = 3  # requests behind the next one whose pages are brought closer already


def check_request_fits(config: SchedulerConfig, num_input_tokens: int, max_new_tokens: int) -> None:
    """Refuse a request that the whole pool or the model's context could not hold; any other fits once it is alone.

    Pure, so that a front process can refuse before it dispatches.

    Raises:
        ConfigError: with the arithmetic, and the most that may be asked for.
    """
    num_positions = num_input_tokens + max_new_tokens - 1  # the last token needs no KV of its own
    context_tokens = config.tokens.context_tokens
    most, holder = config.kv_tokens, "the pool"
    if context_tokens is not None and context_tokens < most:
        most, holder = context_tokens, "the model's context"
    if num_positions <= most:
        return
    room = most - num_input_tokens + 1
    hint = f"ask for at most {room} new tokens with this prompt" if room >= 1 else f"send at most {most} tokens"
    raise ConfigError(
        "input_ids",
        f"{num_input_tokens} tokens",
        f"with max_new_tokens={max_new_tokens} may take {num_positions} KV tokens and {holder} has {most}",
        hint,
    )


def check_tokens_known(config: SchedulerConfig, token_ids: Sequence[int]) -> None:
    """Refuse tokens that the model does not have: looking one up would fail every request of its batch.

    Raises:
        ConfigError: naming the largest.
    """
    vocab_size = config.tokens.vocab_size
    if vocab_size <= MAX_TOKEN_ID and (largest := max(token_ids)) >= vocab_size:
        raise ConfigError("input_ids", largest, "is not a token of the model", f"give ids from 0 to {vocab_size - 1}")


def prefill_chunk(num_tokens_left: int, *, chunk_tokens: int, budget_tokens: int) -> int:
    """Tokens of one prefill that go into this step."""
    return min(num_tokens_left, chunk_tokens, budget_tokens)


def estimate_pages(request: Request, *, page_size: int, new_token_ratio: float) -> int:
    """Pages that a request is expected to hold in the end, at ``new_token_ratio`` of its possible output.

    Never more than ``check_request_fits`` has allowed, so a request that is alone is always admitted.
    """
    num_output_positions = int(new_token_ratio * (request.num_output_tokens_left - 1))
    return pages_for(request.num_input_tokens + num_output_positions, page_size)


def estimate_pages_to_allocate(requests: Iterable[Request], *, page_size: int, new_token_ratio: float) -> int:
    """Pages that running requests are expected to take beyond those that they hold."""
    return sum(
        max(0, estimate_pages(request, page_size=page_size, new_token_ratio=new_token_ratio) - len(request.pages))
        for request in requests
    )


def select_preemption_victim(running: Sequence[Request]) -> Request:
    """The running request that gives its pages to the others: the latest arrival.

    It goes back to the front of the queue, and as all that wait there arrived even later, order of arrival is kept.
    """
    return max(running, key=lambda request: request.arrival)


@dataclass(slots=True, kw_only=True)
class Batcher:
    """Makes the batches by the rules at the top of this file.

    Attributes:
        config: budgets.
        queues: requests move between waiting and running here.
        pages: where their pages come from.
        request_metrics: admissions and retractions are counted and timed here; nothing is decided by it.
        tiers: bring the prefixes of waiting requests closer.
        terms: what else decides: orders, other replicas, the new-token ratio, the length of chunks.
    """

    config: SchedulerConfig
    queues: RequestQueues
    kv_cache: RequestKvCache
    request_metrics: RequestMetrics
    tiers: CacheTiers
    budget: AdmissionBudget = field(default_factory=AdmissionBudget)

    def __post_init__(self) -> None:
        self.budget.new_token_ratio = _tracker_of(self.config)

    @property
    def new_token_ratio(self) -> NewTokenRatioTracker:
        """Which share of possible output an admission reserves."""
        return self.budget.new_token_ratio

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use other budgets from the next batch on; ``page_size`` and ``kv_tokens`` are the same."""
        if (config.new_token_ratio, config.min_new_token_ratio) != (
            self.config.new_token_ratio,
            self.config.min_new_token_ratio,
        ):
            self.budget.new_token_ratio = _tracker_of(config)
        self.config = config
        self.queues.max_running_requests = config.max_running_requests

    @property
    def has_work(self) -> bool:
        """A batch would not be empty, now or after pages have come closer."""
        return bool(self.queues if self.budget.gate.can_admit else self.budget.gate.can_compute and self.queues.running)

    def start_prefetch(self, request: Request) -> None:
        """A request has come: begin to bring its prefix closer."""
        self.tiers.prefetch_queue.start(request.rid, request.token_ids[:-1], self.kv_cache.namespace)

    def predict_first_token(self, request: Request) -> None:
        """A request is about to be queued: say when its first token will come. Nothing is decided by it."""
        forecast, queues = self.budget.forecast, self.queues
        predicted_s = forecast.predict_s(
            request.num_input_tokens - request.num_cached_tokens,
            tokens_ahead=queues.waiting.uncached_tokens + queues.num_chunked_tokens_left,
            step_tokens=self.config.max_prefill_tokens,
            history_tokens=request.num_cached_tokens,
        )
        forecast.start(request.rid, predicted_s)

    def update_prefetched_spans(self) -> None:
        """What storage has of requests that wait is read and not computed: load reports leave it out."""
        for rid, span in self.tiers.prefetch_queue.prefetched_spans():
            request = self.queues.find(rid)
            if request is not None and request in self.queues.waiting:
                self.queues.waiting.recount(request, span)

    def reset_cached_tokens(self, namespace: PrefixNamespace) -> None:
        """The cache was emptied: prefixes of requests that wait are looked for in ``namespace`` from now on."""
        self.kv_cache.namespace = namespace
        for request in self.queues.waiting:
            self.tiers.prefetch_queue.cancel(request.rid)
            request.num_cached_tokens = 0
            self.queues.waiting.recount(request)
            self.start_prefetch(request)

    def retract_all(self) -> int:
        """Let every running request wait again, its output kept; returns how many there were."""
        num_running = len(self.queues.running)
        while self.queues.running:
            self._retract(select_preemption_victim(self.queues.running))
        return num_running

    def next_batch(self) -> ScheduledBatch[Request]:
        """Make the next batch and take the pages for it; empty when there is nothing to compute, or nothing may be."""
        batch = self._own_batch() if self.budget.gate.can_compute else ScheduledBatch()
        return batch if self.budget.dp.num_replicas == 1 else self._beside_others(batch)

    def _own_batch(self) -> ScheduledBatch[Request]:
        works: list[ScheduledChunk[Request]] = []
        if not self.queues.running:
            self.new_token_ratio.reset()
        num_retracted = self._continue_running(works)
        # After a retraction nobody is admitted: the first in the queue is the request that was just retracted.
        num_admitted = 0 if num_retracted or not self.budget.can_admit else self._admit_waiting(works)
        if num_retracted:
            self.new_token_ratio.on_retract(self.queues.running)
        else:
            self.new_token_ratio.decay_step()
        num_prefill_tokens = _num_prefill_tokens(works)
        return ScheduledBatch(
            works=tuple(works),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=sum(not work.is_prefill for work in works),
            num_context_tokens=sum(work.end for work in works),
            num_admitted=num_admitted,
            num_retracted=num_retracted,
        )

    def _beside_others(self, batch: ScheduledBatch[Request]) -> ScheduledBatch[Request]:
        """Tell the other replicas what this one computes, and note what they do."""
        queues, cache = self.queues, self.kv_cache.cache
        shape = BatchShape(
            batch.num_prefill_tokens, batch.num_decode_tokens, batch.num_context_tokens, not batch.num_prefill_tokens
        )
        intent = PrefillIntent(
            has_work=self.has_work,
            is_running=bool(queues.running),
            is_prefilling=queues.num_chunked_tokens_left > batch.num_prefill_tokens,
            is_prefillable=bool(queues.waiting) and len(queues.running) < queues.max_running_requests,
            token_usage=cache.used_tokens / cache.capacity_tokens,
        )
        return msgspec.structs.replace(batch, replicas=self.budget.dp.exchange(shape, intent).shapes)

    def _continue_running(self, works: list[ScheduledChunk[Request]]) -> int:
        """Move every running request on, earliest first; return how many later ones were retracted for that.

        The earliest always finds room: alone, it fits (``check_request_fits``), and all others can be retracted.
        """
        running = self.queues.running
        budget_tokens = self.config.max_prefill_tokens
        num_retracted = place = 0
        while place < len(running):
            request = running[place]
            num_tokens = self._num_tokens_now(request, budget_tokens)
            if num_tokens and not self.kv_cache.grow(request, num_tokens):
                self._retract(select_preemption_victim(running))
                num_retracted += 1
                continue  # the same place again: with room now, or past the end if the request itself had to go
            place += 1
            if num_tokens:
                works.append(_work(request, num_tokens))
                if works[-1].is_prefill:
                    budget_tokens -= num_tokens
        return num_retracted

    def _num_tokens_now(self, request: Request, budget_tokens: int) -> int:
        """Return 1 in decode, the next chunk in prefill, 0 for a prefill when the budget is spent."""
        num_tokens_left = request.num_prefill_tokens_left
        if not num_tokens_left:
            return request.num_uncomputed_tokens
        chunk_tokens = self.budget.chunk_sizer.chunk_tokens(request.num_computed_tokens, self.config.chunk_tokens)
        return prefill_chunk(num_tokens_left, chunk_tokens=chunk_tokens, budget_tokens=budget_tokens)

    def _retract(self, request: Request) -> None:
        """Take a request's pages and let it wait at the front; its output so far is kept and prefilled again."""
        self.kv_cache.free(request)
        request.num_retractions += 1
        self.queues.requeue(request)
        self.request_metrics.on_retracted(request)

    def _admit_waiting(self, works: list[ScheduledChunk[Request]]) -> int:
        """Let waiting requests in, first come first served, until one does not fit; return how many came in."""
        config, queues = self.config, self.queues
        if not queues.waiting:
            return 0
        budget_tokens = config.max_prefill_tokens - _num_prefill_tokens(works)
        ratio = self.new_token_ratio.current
        reserved_pages = estimate_pages_to_allocate(queues.running, page_size=config.page_size, new_token_ratio=ratio)
        num_admitted = 0
        while budget_tokens > 0 and queues.waiting and len(queues.running) < config.max_running_requests:
            request = queues.waiting[0]
            if not self._is_ready(request, is_next=True) or not self._try_admit(request, reserved_pages):
                break
            num_admitted += 1
            work = _work(request, self._num_tokens_now(request, budget_tokens))
            has_room = self.kv_cache.grow(request, work.num_tokens)
            assert has_room, f"{request!r} was admitted without room for its first chunk"
            works.append(work)
            budget_tokens -= work.num_tokens
            reserved_pages += estimate_pages_to_allocate([request], page_size=config.page_size, new_token_ratio=ratio)
        for request in islice(queues.waiting, 1, 1 + _LOOK_AHEAD):
            self._is_ready(request, is_next=False)
        return num_admitted

    def _is_ready(self, request: Request, *, is_next: bool) -> bool:
        """Say whether a request need not wait for pages, and begin to bring them closer."""
        prefetch_queue, namespace = self.tiers.prefetch_queue, self.kv_cache.namespace
        return prefetch_queue.is_done(request.rid, request.token_ids[:-1], namespace, is_next=is_next)

    def _try_admit(self, request: Request, reserved_pages: int) -> bool:
        """Hold the cached prefix of a request and start it, unless the pool cannot promise the pages it lacks."""
        num_cached_before = request.num_cached_tokens
        self.kv_cache.match(request)
        num_expected = estimate_pages(
            request, page_size=self.config.page_size, new_token_ratio=self.new_token_ratio.current
        )
        if num_expected - len(request.pages) > self.kv_cache.available_pages - reserved_pages:
            self.kv_cache.free(request)
            if request.num_cached_tokens != num_cached_before:
                self.queues.waiting.recount(request)
            return False
        request.prefill_end = request.num_input_tokens
        self.queues.admit(request)
        if request.num_retractions:
            self.tiers.prefetch_queue.cancel(request.rid)
        else:
            request.cached_prompt = self.tiers.prefetch_queue.record_admission(
                request.rid, prompt_tokens=request.num_prompt_tokens, cached_tokens=request.num_cached_tokens
            )
            request.num_cached_prompt_tokens = request.num_cached_tokens
        self.request_metrics.on_admitted(request)
        return True


def _tracker_of(config: SchedulerConfig) -> NewTokenRatioTracker:
    return NewTokenRatioTracker(initial=config.new_token_ratio, minimum=config.min_new_token_ratio)


def _work(request: Request, num_tokens: int) -> ScheduledChunk[Request]:
    start = request.num_computed_tokens
    return ScheduledChunk(request, start, start + num_tokens, request.num_prefill_tokens_left > 0)


def _num_prefill_tokens(works: list[ScheduledChunk[Request]]) -> int:
    return sum(work.num_tokens for work in works if work.is_prefill)
