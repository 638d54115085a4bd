"""A session with one batcher under check: add requests, make batches, compute them, and verify every batch.

``batcher_checks`` and ``BatcherComparisonMachine`` drive batchers with it. A step takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from scheduler_components.cache import RadixCache, RadixNode
from scheduler_components.checks.pool_stats_observer import RadixCachePool
from scheduler_components.invariant_checker import find_pool_violations
from scheduler_components.scheduling.admission_budget import BatchLimits
from scheduler_components.scheduling.request import OutputLength, Request
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.testing.check_trace import CheckTrace
from scheduler_components.testing.fake_device import PagedModel, next_token
from scheduler_components.values import (
    FinishReason,
    RequestHints,
    RequestState,
    ScheduledBatch,
)

__all__ = [
    "BatcherSession",
    "BatcherUnderCheck",
    "CheckedRequest",
    "OpenBatcher",
    "PlannedRequest",
    "max_batcher_steps",
]


class _Name(str):
    """A request id whose hash depends on the session, so that the order of a set of ids differs between two."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


def _hash_of(number: int, salt: int) -> int:
    """Return a hash by which sets iterate in ascending (salt 0), descending (1) or another order."""
    return (number, 1005 - number, 29 * number % 101)[salt % 3]


class CheckedRequest(Request[RadixNode]):
    """A request of the kit that can be compared with a plan.

    ``number`` is its hash, which depends on the session, so that the order of a set differs between two of them.
    """

    __slots__ = ("number",)

    def __init__(
        self,
        rid: str,
        token_ids: Sequence[int],
        max_new_tokens: int,
        hints: RequestHints | None = None,
        *,
        number: int = 0,
    ) -> None:
        super().__init__(rid, list(token_ids), OutputLength(max_new_tokens), hints=hints or RequestHints())
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        num_most = self.limits.max_new_tokens
        return f"<{self.rid}: {self.num_prompt_tokens}+{self.num_output_tokens} of {num_most} tokens>"


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request of a workload.

    Attributes:
        prompt, max_new_tokens, hints: of the request.
        step: number of the step before which it is added.
        abort_step: number of the step before which it is aborted; None for never.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    hints: RequestHints = RequestHints()
    step: int = 0
    abort_step: int | None = None


class BatcherUnderCheck(Protocol):
    """A batcher: the kit's ``Batcher`` with policies of yours, or one of your own."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: CheckedRequest) -> None:
        """Queue a new request."""
        ...

    def next_batch(self) -> ScheduledBatch[CheckedRequest]:
        """Make the next batch and allocate its pages."""
        ...

    def finish(self, request: CheckedRequest, reason: FinishReason) -> None:
        """Remove a waiting or running request. Its pages are freed afterwards."""
        ...


OpenBatcher: TypeAlias = Callable[
    [BatchLimits, RequestQueues[CheckedRequest], RequestKvCache[RadixNode]], BatcherUnderCheck
]
"""Opens a batcher over empty queues and a KV cache. It admits and preempts through both."""


@dataclass(slots=True, kw_only=True)
class BatcherSession:  # noqa: SCH003 - a batcher with everything that it needs
    """One batcher over a pool of pages, with a model that reads its KV from them.

    Attributes:
        trace: records each step.
        limits: sizes of a batch.
        batcher: under check.
        queues, kv_cache: given to it.
        requests: all requests so far, in order of arrival.
        batches: one text per step, for comparisons.
    """

    trace: CheckTrace
    limits: BatchLimits
    batcher: BatcherUnderCheck
    queues: RequestQueues[CheckedRequest]
    kv_cache: RequestKvCache[RadixNode]
    pool: RadixCachePool
    model: PagedModel
    salt: int = 0
    requests: list[CheckedRequest] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        title: str,
        open_batcher: OpenBatcher,
        *,
        limits: BatchLimits,
        page_size: int = 4,
        num_pages: int = 64,
        salt: int = 0,
    ) -> BatcherSession:
        """Open a batcher over an empty pool.

        Args:
            title: the promise that the check verifies.
            open_batcher: opens it.
            limits: sizes of a batch.
            page_size, num_pages: of the pool.
            salt: 0 to 2; sessions with different salts hash their requests differently.
        """
        cache = RadixCache(page_size=page_size, capacity_tokens=page_size * num_pages)
        queues = RequestQueues[CheckedRequest](max_running_requests=limits.max_running_requests)
        kv_cache = RequestKvCache(cache=cache)
        trace = CheckTrace(title)
        return cls(
            trace=trace,
            limits=limits,
            batcher=trace.call("opened a batcher", lambda: open_batcher(limits, queues, kv_cache)),
            queues=queues,
            kv_cache=kv_cache,
            pool=RadixCachePool(cache=cache, requests=queues),
            model=PagedModel(page_size),
            salt=salt,
        )

    def serve(self, workload: Sequence[PlannedRequest]) -> None:
        """Add and abort requests, in order of ``step``, and step until all have ended."""
        known = [PlannedRequest(tuple(each.token_ids), each.num_output_tokens_left) for each in self.requests]
        limit = max_batcher_steps([*known, *workload])
        for step in range(limit):
            self.begin_step(workload, step)
            if all(planned.step <= step for planned in workload) and not self.unfinished:
                return
            self.step()
        self.trace.expect([], self.unfinished, f"requests without an end after {limit} steps")

    def begin_step(self, workload: Sequence[PlannedRequest], step: int) -> None:
        """Add and abort the requests of this step. The workload is in order of ``step``."""
        for planned in workload:
            if planned.step == step:
                self.add(planned)
        for planned, request in zip(workload, self.requests, strict=False):
            if planned.abort_step == step:
                self.abort(request)

    @property
    def unfinished(self) -> list[str]:
        """The ids of the requests that have not ended."""
        return [str(each.rid) for each in self.requests if each.finish_reason is None]

    def add(self, planned: PlannedRequest) -> CheckedRequest:
        """Add a request."""
        rid = _Name(f"r{len(self.requests)}")
        rid.number = _hash_of(len(self.requests), self.salt)
        request = CheckedRequest(rid, planned.prompt, planned.max_new_tokens, planned.hints, number=rid.number)
        self.kv_cache.start(request)
        self.requests.append(request)
        self.trace.call(f"added {request!r}", lambda: self.batcher.add(request))
        return request

    def abort(self, request: CheckedRequest) -> None:
        """Abort a request, unless it has ended."""
        if request.finish_reason is None:
            self.trace.note(f"aborted {request!r}")
            self._finish(request, FinishReason.ABORT)

    def step(self) -> ScheduledBatch[CheckedRequest]:
        """Make a batch, verify it, compute it and verify the pool."""
        trace = self.trace
        had_work = bool(self.unfinished)
        trace.expect(had_work, self.batcher.has_work, "has_work")
        running_before = {str(each.rid) for each in self.queues.running}
        tokens_before = [len(each.token_ids) for each in self.requests]
        batch = trace.call("next_batch()", self.batcher.next_batch)
        self.batches.append(_shown(batch, self.queues))
        trace.note(f"got {self.batches[-1]}")
        trace.expect(tokens_before, [len(each.token_ids) for each in self.requests], "tokens of each request")
        self._verify(batch, running_before)
        for chunk in reversed(batch.chunks):  # No chunk may read KV that another one of its batch writes.
            self._compute(chunk.request, chunk.end, is_prefill=chunk.is_prefill)
        trace.expect([], [str(each) for each in find_pool_violations(self.pool)], "violations of the pool")
        return batch

    def expect_outputs(self) -> None:
        """Verify the tokens of every request that was not aborted."""
        for request in self.requests:
            if request.finish_reason is FinishReason.LENGTH:
                tokens = request.token_ids[: request.num_prompt_tokens]
                for _ in range(request.limits.max_new_tokens):
                    tokens.append(next_token(tokens))
                self.trace.expect(tokens, request.token_ids, f"the tokens of {request!r}")

    def expect_nothing_held(self) -> None:
        """Verify that no request is left and that every page is free or cached."""
        held = self.kv_cache.cache.capacity_tokens // self.kv_cache.page_size - self.kv_cache.available_pages
        self.trace.expect(
            (0, 0, 0, 0, 0),
            (
                len(self.queues),
                len(self.queues.running),
                len(self.queues.waiting),
                self.queues.num_chunked_tokens_left,
                held,
            ),
            "(requests, running, waiting, prefill tokens, pages) left",
        )

    def _verify(self, batch: ScheduledBatch[CheckedRequest], running_before: set[str]) -> None:
        trace, limits, page_size = self.trace, self.limits, self.kv_cache.page_size
        running = self.queues.running
        rids = [str(chunk.request.rid) for chunk in batch.chunks]
        trace.expect(len(set(rids)), len(rids), "requests of the batch, each once")
        num_prefill = num_spent = 0
        for chunk in batch.chunks:
            request = chunk.request
            trace.require(request.state is RequestState.RUNNING, f"{request!r} of the batch runs", request.state)
            trace.expect(request.num_computed_tokens, chunk.start, f"the first position of {request!r}")
            trace.require(chunk.start < chunk.end <= len(request.token_ids), f"positions of {request!r}", chunk.end)
            num_pages = -(-chunk.end // page_size)
            trace.require(len(request.pages) >= num_pages, f"{num_pages} pages of {request!r}", len(request.pages))
            trace.expect(request.num_prefill_tokens_left > 0, chunk.is_prefill, f"whether {request!r} is in prefill")
            trace.require(chunk.is_prefill or chunk.num_tokens == 1, "one position per decode", chunk)
            if chunk.is_prefill:
                num_prefill += chunk.num_tokens
                trace.require(
                    chunk.num_tokens <= limits.chunk_tokens, f"at most {limits.chunk_tokens} tokens per chunk", chunk
                )
            if chunk.is_prefill or limits.counts_decodes:
                num_spent += chunk.num_tokens
        trace.require(num_spent <= limits.max_prefill_tokens, f"at most {limits.max_prefill_tokens} tokens", num_spent)
        trace.expect(num_prefill, batch.num_prefill_tokens, "num_prefill_tokens")
        num_decode = sum(not chunk.is_prefill for chunk in batch.chunks)
        trace.expect(num_decode, batch.num_decode_tokens, "num_decode_tokens")
        trace.expect(sum(chunk.end for chunk in batch.chunks), batch.num_context_tokens, "num_context_tokens")
        now_running = {str(each.rid) for each in running}
        trace.expect(len(now_running - running_before), batch.num_admitted, "num_admitted")
        trace.expect(len(running_before - now_running), batch.num_retracted, "num_retracted")
        if limits.mode == "prefill_first":
            trace.require(not (num_prefill and num_decode), "prefills or decodes", (num_prefill, num_decode))
        trace.require(
            len(running) <= limits.max_running_requests, f"at most {limits.max_running_requests} requests", len(running)
        )
        self._verify_admissions([each for each in running if str(each.rid) not in running_before])

    def _verify_admissions(self, admitted: Sequence[CheckedRequest]) -> None:
        limits, running = self.limits, self.queues.running
        if admitted and len(running) > 1:
            free = self.kv_cache.available_pages
            self.trace.require(free >= limits.watermark_pages, f"{limits.watermark_pages} pages stay free", free)
        if limits.max_running_per_tenant is not None:
            for tenant in sorted({each.hints.tenant for each in admitted}):
                num_running = sum(each.hints.tenant == tenant for each in running)
                self.trace.require(
                    num_running <= limits.max_running_per_tenant,
                    f"at most {limits.max_running_per_tenant} running requests of tenant {tenant!r}",
                    num_running,
                )

    def _compute(self, request: CheckedRequest, end: int, *, is_prefill: bool) -> None:
        token = self.model.forward(request.token_ids[:end], request.pages, request.num_computed_tokens)
        request.num_computed_tokens = end
        if end == len(request.token_ids):
            request.token_ids.append(token)
        if is_prefill:
            self.kv_cache.cache_unfinished(request)
        self.queues.update_prefill_tokens(request)
        if not request.num_output_tokens_left:
            self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: CheckedRequest, reason: FinishReason) -> None:
        self.trace.call(f"finish({request!r})", lambda: self.batcher.finish(request, reason))
        self.kv_cache.free(request)
        self.trace.expect(reason, request.finish_reason, f"the end of {request!r}")
        self.queues.on_aborts_streamed()


def max_batcher_steps(workload: Sequence[PlannedRequest]) -> int:
    """Return the steps that suffice for any batcher that advances one request by one token per step.

    A preempted request computes its positions again, so each token of one request may cost all positions of another.
    """
    last = max((planned.step for planned in workload), default=0)
    num_positions = sum(len(planned.prompt) + planned.max_new_tokens for planned in workload)
    return 20 + last + 8 * num_positions


def _shown(batch: ScheduledBatch[CheckedRequest], queues: RequestQueues[CheckedRequest]) -> str:
    chunks = " ".join(
        f"{chunk.request.rid}[{chunk.start}:{chunk.end}]{'p' if chunk.is_prefill else 'd'}" for chunk in batch.chunks
    )
    counts = f"{batch.num_admitted} admitted, {batch.num_retracted} preempted, {len(queues.waiting)} waiting"
    return f"({chunks or 'nothing'}; {counts})"
