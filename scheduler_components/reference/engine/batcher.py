"""Batcher: which positions of which requests the device computes next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from scheduler_components import FinishReason
from scheduler_components.load import TokenCountedQueue
from scheduler_components.reference.device import Request, RequestState, ScheduledBatch, ScheduledWork
from scheduler_components.reference.engine.bookkeeping import RequestBook, RunningTotals
from scheduler_components.reference.engine.cache_tiers import NO_TIERS, CacheTiers, PrefixCache
from scheduler_components.reference.engine.policy import (
    NewTokenRatio,
    SchedulerConfig,
    expected_pages,
    pages_for,
    pages_to_come,
    prefill_chunk,
    retraction_victim,
)

__all__ = [
    "RequestQueues",
    "RequestPages",
    "Batcher",
]

# The requests of one scheduler: waiting, running, and by id.


@dataclass(slots=True, kw_only=True)
class RequestQueues:
    """Every request in flight stands in exactly one of ``waiting`` and ``running``; a ``QueueSource`` for load reports.

    Both are kept in order of arrival, and all that run arrived before all that wait: requests are admitted from
    the front, and the latest of the running ones is the first to be retracted.

    Attributes:
        max_running_requests: slots of ``running``.
        waiting: requests without pages.
        running: requests with pages, in prefill or decode.
    """

    max_running_requests: int
    waiting: TokenCountedQueue[Request] = field(default_factory=TokenCountedQueue)
    running: list[Request] = field(default_factory=list)
    _by_rid: dict[str, Request] = field(default_factory=dict, repr=False)
    _num_arrivals: int = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    @property
    def num_chunked_tokens_left(self) -> int:
        """Tokens that admitted prefills have still to compute."""
        return sum(request.num_prefill_tokens_left for request in self.running)

    def find(self, rid: str) -> Request | None:
        """Return the request in flight with this id, or None."""
        return self._by_rid.get(rid)

    def enter(self, request: Request) -> None:
        """Put a new request at the end of the waiting ones and number its arrival."""
        self._by_rid[request.rid] = request
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self.waiting.remove(request)
        self.running.append(request)
        request.state = RequestState.RUNNING

    def put_back(self, request: Request) -> None:
        """Move a request from running to the front of the waiting ones."""
        self.running.remove(request)
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it stands."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        del self._by_rid[request.rid]
        request.state = RequestState.FINISHED
        request.finish_reason = reason


# KV pages between the cache and the requests: who holds which page, and until when.


@dataclass(slots=True, kw_only=True)
class RequestPages:
    """Gives pages to requests and takes them back.

    A page that a request holds is either its own (allocated, being filled) or shared (it stands in the cache's tree,
    locked through ``request.node``). ``share`` turns own pages into shared ones once they are full, so that others
    find them, and events say "stored", from the step in which their KV is usable.

    Attributes:
        cache: the KV pool and its radix tree.
        totals: evictions are counted here.
    """

    cache: PrefixCache
    totals: RunningTotals

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free ones, and cached ones that nobody holds."""
        cache = self.cache
        return (cache.free_tokens + cache.evictable_tokens) // cache.page_size

    def look_up(self, request: Request) -> int:
        """Return how many of the request's tokens the cache covers, without holding them."""
        return self.cache.match_prefix(request.token_ids[:-1]).num_tokens

    def attach(self, request: Request) -> None:
        """Hold the longest cached prefix of a request that is about to run.

        The last token is left out: it must go through the device to give the next one.
        """
        match = self.cache.match_prefix(request.token_ids[:-1])
        self.cache.lock(match.node)
        request.node = match.node
        request.pages = list(match.pages)
        request.num_shared_pages = len(match.pages)
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more positions, evicting what nobody holds; False if the pool is too full."""
        page_size = self.cache.page_size
        num_missing = pages_for(request.num_computed_tokens + num_tokens, page_size) - len(request.pages)
        if num_missing <= 0:
            return True
        if num_missing > self.available_pages:
            return False
        self.totals.evicted_tokens += max(0, num_missing * page_size - self.cache.free_tokens)
        request.pages += self.cache.allocate(num_missing)
        return True

    def share(self, request: Request) -> None:
        """Put the request's full pages into the tree and hold them there.

        Where another request was quicker with the same prefix, its pages take the place of ours, which are freed.
        """
        page_size = self.cache.page_size
        num_pages = request.num_computed_tokens // page_size
        if num_pages <= request.num_shared_pages:
            return
        match = self.cache.insert(request.token_ids[: num_pages * page_size], request.pages[:num_pages])
        self.cache.lock(match.node)
        if request.node is not None:
            self.cache.unlock(request.node)
        request.node = match.node
        request.pages[:num_pages] = match.pages
        request.num_shared_pages = num_pages

    def release(self, request: Request) -> None:
        """Let go of all pages: full ones stay in the cache for whoever comes next, the unfinished one is freed."""
        self.share(request)
        self.cache.free(request.pages[request.num_shared_pages :])
        if request.node is not None:
            self.cache.unlock(request.node)
        request.num_cached_tokens = request.num_shared_pages * self.cache.page_size
        request.node = None
        request.pages = []
        request.num_shared_pages = request.num_computed_tokens = request.prefill_end = 0


_LOOK_AHEAD = 3  # requests behind the next one whose pages are brought closer already


@dataclass(slots=True, kw_only=True)
class Batcher:
    """Continuous batching: a new batch every step, from whatever is running and waiting at that moment.

    Applies the rules at the top of ``policy.py``. Its decisions depend on the sequence of calls alone, never on a
    clock or a rank, so that all ranks of a replica make the same batch.

    Attributes:
        config: budgets.
        queues: requests move between waiting and running here.
        pages: where their pages come from.
        book: admissions and retractions are counted and timed here; nothing is decided by it.
        tiers: what of a waiting request's prefix is brought closer there.
        new_token_ratio: share of possible output that an admission reserves now.
    """

    config: SchedulerConfig
    queues: RequestQueues
    pages: RequestPages
    book: RequestBook
    tiers: CacheTiers = NO_TIERS
    new_token_ratio: NewTokenRatio = field(init=False)

    def __post_init__(self) -> None:
        self.new_token_ratio = NewTokenRatio.of(self.config)

    def next_batch(self) -> ScheduledBatch:
        """Make the next batch and take the pages for it; empty when there is nothing to compute."""
        works: list[ScheduledWork] = []
        num_retracted = self._continue_running(works)
        # Nobody comes in where somebody had to go: the first in the queue is now the one that gave way.
        num_admitted = 0 if num_retracted else self._admit_waiting(works)
        self.new_token_ratio.after_step(retracted=num_retracted > 0)
        num_prefill_tokens = _num_prefill_tokens(works)
        return ScheduledBatch(
            works=tuple(works),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=sum(not work.is_prefill for work in works),
            num_context_tokens=sum(work.end for work in works),
            num_admitted=num_admitted,
            num_retracted=num_retracted,
        )

    def _continue_running(self, works: list[ScheduledWork]) -> int:
        """Move every running request on, earliest first; return how many later ones were retracted for that.

        The earliest always finds room: alone, it fits (``check_request_fits``), and all others can be retracted.
        """
        running = self.queues.running
        budget_tokens = self.config.max_prefill_tokens
        num_retracted = place = 0
        while place < len(running):
            request = running[place]
            num_tokens = self._num_tokens_now(request, budget_tokens)
            if num_tokens and not self.pages.grow(request, num_tokens):
                self._retract(retraction_victim(running))
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
        return prefill_chunk(num_tokens_left, chunk_tokens=self.config.chunk_tokens, budget_tokens=budget_tokens)

    def _retract(self, request: Request) -> None:
        """Take a request's pages and let it wait at the front; its output so far is kept and prefilled again."""
        self.pages.release(request)
        request.num_retractions += 1
        self.queues.put_back(request)
        self.book.retracted(request)

    def _admit_waiting(self, works: list[ScheduledWork]) -> int:
        """Let waiting requests in, first come first served, until one does not fit; return how many came in."""
        config, queues = self.config, self.queues
        if not queues.waiting:
            return 0
        budget_tokens = config.max_prefill_tokens - _num_prefill_tokens(works)
        ratio = self.new_token_ratio.value
        reserved_pages = pages_to_come(queues.running, page_size=config.page_size, new_token_ratio=ratio)
        num_admitted = 0
        while budget_tokens > 0 and queues.waiting and len(queues.running) < config.max_running_requests:
            request = queues.waiting[0]
            if not self._is_ready(request, is_next=True) or not self._try_admit(request, reserved_pages):
                break
            num_admitted += 1
            work = _work(request, self._num_tokens_now(request, budget_tokens))
            has_room = self.pages.grow(request, work.num_tokens)
            assert has_room, f"{request!r} was admitted without room for its first chunk"
            works.append(work)
            budget_tokens -= work.num_tokens
            reserved_pages += pages_to_come([request], page_size=config.page_size, new_token_ratio=ratio)
        for request in islice(queues.waiting, 1, 1 + _LOOK_AHEAD):
            self._is_ready(request, is_next=False)
        return num_admitted

    def _is_ready(self, request: Request, *, is_next: bool) -> bool:
        """Say whether no pages are on their way that a request should wait for; it begins to bring them closer."""
        return self.tiers.is_ready(request.rid, request.token_ids[:-1], is_next=is_next)

    def _try_admit(self, request: Request, reserved_pages: int) -> bool:
        """Hold the cached prefix of a request and start it, unless the pool cannot promise the pages it lacks."""
        num_cached_before = request.num_cached_tokens
        self.pages.attach(request)
        num_expected = expected_pages(
            request, page_size=self.config.page_size, new_token_ratio=self.new_token_ratio.value
        )
        if num_expected - len(request.pages) > self.pages.available_pages - reserved_pages:
            self.pages.release(request)
            if request.num_cached_tokens != num_cached_before:
                self.queues.waiting.recount(request)
            return False
        request.prefill_end = request.num_input_tokens
        self.queues.admit(request)
        if request.num_retractions:
            self.tiers.forget(request.rid)
        else:
            self.tiers.admitted(
                request.rid, prompt_tokens=request.num_prompt_tokens, cached_tokens=request.num_cached_tokens
            )
            request.num_cached_prompt_tokens = request.num_cached_tokens
        self.book.admitted(request)
        return True


def _work(request: Request, num_tokens: int) -> ScheduledWork:
    start = request.num_computed_tokens
    return ScheduledWork(request, start, start + num_tokens, request.num_prefill_tokens_left > 0)


def _num_prefill_tokens(works: list[ScheduledWork]) -> int:
    return sum(work.num_tokens for work in works if work.is_prefill)
