"""Batcher: choose which positions of which requests the device computes next, and allocate their pages.

Batching is continuous: every step makes a new batch of the running and waiting requests. The rules, in the order in
which a step applies them:

1. Requests are served in order of arrival. A request that cannot be admitted blocks those behind it, so no request
   starves.
2. Every running request advances by one decode token or one chunk of its prefill.
3. While the pool is full, the latest arrival is retracted until the earlier requests fit. The oldest request is never
   retracted, so each step makes progress whatever the size of the pool.
4. A request is admitted while the step has prefill budget, a request slot is free, and the pool can hold the whole
   input of the request and a share of its possible output, the new-token ratio, in addition to what the running
   requests may still allocate.

All decisions depend on the sequence of calls only, never on a clock or on the rank, so all ranks of a replica make the
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


_LOOK_AHEAD = 3  # waiting requests behind the next one that are prefetched already


def check_request_fits(config: SchedulerConfig, num_input_tokens: int, max_new_tokens: int) -> None:
    """Check that the pool and the model's context can hold a request while no other runs.

    Raises:
        ConfigError: the request is too long; the text has the sizes and the largest possible request.
    """
    num_positions = num_input_tokens + max_new_tokens - 1  # the last token needs no KV
    context_tokens = config.tokens.context_tokens
    limit, holder = config.kv_tokens, "the pool"
    if context_tokens is not None and context_tokens < limit:
        limit, holder = context_tokens, "the model's context"
    if num_positions <= limit:
        return
    room = limit - num_input_tokens + 1
    hint = f"ask for at most {room} new tokens with this prompt" if room >= 1 else f"send at most {limit} tokens"
    raise ConfigError(
        "input_ids",
        f"{num_input_tokens} tokens",
        f"with max_new_tokens={max_new_tokens} may take {num_positions} KV tokens and {holder} has {limit}",
        hint,
    )


def check_tokens_known(config: SchedulerConfig, token_ids: Sequence[int]) -> None:
    """Check that the model knows all tokens. An unknown one would fail every request of its batch.

    Raises:
        ConfigError: a token is unknown; the error names the largest.
    """
    vocab_size = config.tokens.vocab_size
    if vocab_size <= MAX_TOKEN_ID and (largest := max(token_ids)) >= vocab_size:
        raise ConfigError("input_ids", largest, "is not a token of the model", f"give ids from 0 to {vocab_size - 1}")


def prefill_chunk(num_tokens_left: int, *, chunk_tokens: int, budget_tokens: int) -> int:
    """Return the number of tokens of a prefill that this step computes."""
    return min(num_tokens_left, chunk_tokens, budget_tokens)


def estimate_pages(request: Request, *, page_size: int, new_token_ratio: float) -> int:
    """Return how many pages a request is expected to hold at its end, with ``new_token_ratio`` of its possible output.

    The number is never more than ``check_request_fits`` has allowed, so a single request is always admitted.
    """
    num_output_positions = int(new_token_ratio * (request.num_output_tokens_left - 1))
    return pages_for(request.num_input_tokens + num_output_positions, page_size)


def estimate_pages_to_allocate(requests: Iterable[Request], *, page_size: int, new_token_ratio: float) -> int:
    """Return how many pages running requests are expected to allocate in addition to those that they hold."""
    return sum(
        max(0, estimate_pages(request, page_size=page_size, new_token_ratio=new_token_ratio) - len(request.pages))
        for request in requests
    )


def select_preemption_victim(running: Sequence[Request]) -> Request:
    """Return the running request to retract: the latest arrival.

    It goes to the head of the waiting queue, whose requests all arrived later, so the order of arrival is kept.
    """
    return max(running, key=lambda request: request.arrival)


@dataclass(slots=True, kw_only=True)
class Batcher:
    """Makes batches by the rules at the top of this file.

    Attributes:
        config: sizes of a batch.
        queues: the waiting and running requests.
        kv_cache: allocates and frees the pages of requests.
        request_metrics: counts and times admissions and retractions; no decision depends on it.
        tiers: prefetch the prefixes of waiting requests.
        budget: further limits: control requests, other replicas, the new-token ratio, the length of chunks.
    """

    config: SchedulerConfig
    queues: RequestQueues
    kv_cache: RequestKvCache
    request_metrics: RequestMetrics
    tiers: CacheTiers
    budget: AdmissionBudget = field(default_factory=AdmissionBudget)

    def __post_init__(self) -> None:
        self.budget.new_token_ratio = _tracker_of(self.config)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use other sizes from the next batch on. ``page_size`` and ``kv_tokens`` must not change.

        Raises:
            ConfigError: the pool cannot hold as many requests as may run; nothing has changed.
        """
        self.check_sizes(config)
        if (config.new_token_ratio, config.min_new_token_ratio) != (
            self.config.new_token_ratio,
            self.config.min_new_token_ratio,
        ):
            self.budget.new_token_ratio = _tracker_of(config)
        self.config = config
        self.queues.max_running_requests = config.num_request_slots

    @staticmethod
    def check_sizes(config: SchedulerConfig) -> None:
        """Validate sizes for ``reconfigure``: at most as many requests may run as the pool has pages.

        Raises:
            ConfigError: naming the size.
        """
        if config.max_running_requests > config.num_request_slots:
            problem = f"is more than the {config.kv_pages} pages of the pool, and each running request needs one"
            hint = f"give at most {config.kv_pages}"
            raise ConfigError("max_running_requests", config.max_running_requests, problem, hint)

    @property
    def has_work(self) -> bool:
        """True if the next batch would not be empty, or would not be once a prefetch has completed."""
        return bool(self.queues if self.budget.gate.can_admit else self.budget.gate.can_compute and self.queues.running)

    def start_prefetch(self, request: Request) -> None:
        """Start to prefetch the prefix of a new request."""
        self.tiers.prefetch_queue.start(request.rid, request.token_ids[:-1], self.kv_cache.namespace)

    def predict_first_token(self, request: Request) -> None:
        """Predict the time to the first token of a request that is about to be queued. No decision depends on it."""
        forecast, queues = self.budget.forecast, self.queues
        slots_ahead = max(0, len(queues.running) + len(queues.waiting) + 1 - queues.max_running_requests)
        predicted_s = forecast.predict_s(
            request.num_input_tokens - request.num_cached_tokens,
            tokens_ahead=queues.waiting.uncached_tokens + queues.num_chunked_tokens_left,
            step_tokens=self.config.max_prefill_tokens,
            history_tokens=request.num_cached_tokens,
            slots_ahead=slots_ahead,
        )
        forecast.start(request.rid, predicted_s, slots_ahead=slots_ahead)

    def update_prefetched_spans(self) -> None:
        """Recount waiting requests whose tokens a prefetch has found, so that load reports do not count these."""
        for rid, span in self.tiers.prefetch_queue.prefetched_spans():
            request = self.queues.find(rid)
            if request is not None and request in self.queues.waiting:
                self.queues.waiting.recount(request, span)

    def reset_cached_tokens(self, namespace: PrefixNamespace) -> None:
        """Restart the prefetches of waiting requests in ``namespace``, because the cache was cleared."""
        self.kv_cache.namespace = namespace
        for request in self.queues.waiting:
            self.tiers.prefetch_queue.cancel(request.rid)
            request.num_cached_tokens = 0
            self.queues.waiting.recount(request)
            self.start_prefetch(request)

    def retract_all(self) -> int:
        """Move every running request back to the waiting queue, with its output, and return their number."""
        num_running = len(self.queues.running)
        while self.queues.running:
            self._retract(select_preemption_victim(self.queues.running))
        return num_running

    def next_batch(self) -> ScheduledBatch[Request]:
        """Make the next batch and allocate its pages. It is empty if no request can or may be computed."""
        batch = self._local_batch() if self.budget.gate.can_compute else ScheduledBatch()
        return batch if self.budget.dp.num_replicas == 1 else self._exchange_shapes(batch)

    def _local_batch(self) -> ScheduledBatch[Request]:
        chunks: list[ScheduledChunk[Request]] = []
        ratio = self.budget.new_token_ratio
        if not self.queues.running:
            ratio.reset()
        num_retracted = self._continue_running(chunks)
        # After a retraction no request is admitted: the head of the queue is the request just retracted.
        num_admitted = 0 if num_retracted or not self.budget.can_admit else self._admit_waiting(chunks)
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

    def _exchange_shapes(self, batch: ScheduledBatch[Request]) -> ScheduledBatch[Request]:
        """Exchange the shapes of this step's batches with the other replicas, and add them to the batch."""
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

    def _continue_running(self, chunks: list[ScheduledChunk[Request]]) -> int:
        """Add every running request to the batch, earliest first. Return how many requests were retracted for that.

        The earliest request always fits: ``check_request_fits`` holds for it, and all others can be retracted.
        """
        running = self.queues.running
        budget_tokens = self.config.max_prefill_tokens
        num_retracted = index = 0
        while index < len(running):
            request = running[index]
            num_tokens = self._num_tokens_now(request, budget_tokens)
            if num_tokens and not self.kv_cache.grow(request, num_tokens):
                self._retract(select_preemption_victim(running))
                num_retracted += 1
                continue  # retry the same index, which is past the end if the request itself was retracted
            index += 1
            if num_tokens:
                chunks.append(_chunk_of(request, num_tokens))
                if chunks[-1].is_prefill:
                    budget_tokens -= num_tokens
        return num_retracted

    def _num_tokens_now(self, request: Request, budget_tokens: int) -> int:
        """Return the tokens to compute: 1 in decode, the next chunk in prefill, 0 if no prefill budget is left."""
        num_tokens_left = request.num_prefill_tokens_left
        if not num_tokens_left:
            return request.num_uncomputed_tokens
        chunk_tokens = self.budget.chunk_sizer.chunk_tokens(request.num_computed_tokens, self.config.chunk_tokens)
        return prefill_chunk(num_tokens_left, chunk_tokens=chunk_tokens, budget_tokens=budget_tokens)

    def _retract(self, request: Request) -> None:
        """Free the pages of a request and move it to the head of the waiting queue. Its output is prefilled again."""
        self.kv_cache.free(request)
        request.num_retractions += 1
        self.queues.requeue(request)
        self.request_metrics.on_retracted(request)

    def _admit_waiting(self, chunks: list[ScheduledChunk[Request]]) -> int:
        """Admit waiting requests in order of arrival until one does not fit. Return how many were admitted."""
        config, queues = self.config, self.queues
        if not queues.waiting:
            return 0
        budget_tokens = config.max_prefill_tokens - _num_prefill_tokens(chunks)
        ratio = self.budget.new_token_ratio.current
        reserved_pages = estimate_pages_to_allocate(queues.running, page_size=config.page_size, new_token_ratio=ratio)
        num_admitted = 0
        while budget_tokens > 0 and queues.waiting and len(queues.running) < queues.max_running_requests:
            request = queues.waiting[0]
            if not self._is_ready(request, is_next=True) or not self._try_admit(request, reserved_pages):
                break
            num_admitted += 1
            chunk = _chunk_of(request, self._num_tokens_now(request, budget_tokens))
            has_room = self.kv_cache.grow(request, chunk.num_tokens)
            assert has_room, f"{request!r}: no room for its first chunk after its admission"
            chunks.append(chunk)
            budget_tokens -= chunk.num_tokens
            reserved_pages += estimate_pages_to_allocate([request], page_size=config.page_size, new_token_ratio=ratio)
        for request in islice(queues.waiting, 1, 1 + _LOOK_AHEAD):
            self._is_ready(request, is_next=False)
        return num_admitted

    def _is_ready(self, request: Request, *, is_next: bool) -> bool:
        """Return True if a waiting request has no prefetch to wait for. Start one if necessary."""
        prefetch_queue, namespace = self.tiers.prefetch_queue, self.kv_cache.namespace
        return prefetch_queue.is_done(request.rid, request.token_ids[:-1], namespace, is_next=is_next)

    def _try_admit(self, request: Request, reserved_pages: int) -> bool:
        """Lock the cached prefix of a request and admit it, unless the pool lacks the pages that it may need."""
        num_cached_before = request.num_cached_tokens
        self.kv_cache.match(request)
        num_expected = estimate_pages(
            request, page_size=self.config.page_size, new_token_ratio=self.budget.new_token_ratio.current
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


def _chunk_of(request: Request, num_tokens: int) -> ScheduledChunk[Request]:
    start = request.num_computed_tokens
    return ScheduledChunk(request, start, start + num_tokens, request.num_prefill_tokens_left > 0)


def _num_prefill_tokens(chunks: list[ScheduledChunk[Request]]) -> int:
    return sum(chunk.num_tokens for chunk in chunks if chunk.is_prefill)
