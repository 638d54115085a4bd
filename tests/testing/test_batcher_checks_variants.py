"""Broken batchers, budgets, KV caches and preemption policies: the checks of batchers find each of them.

The variants repeat defects of real engines. Their author did not write the checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count
from typing import Any, ClassVar

import pytest

from scheduler_components.batcher import BatchConditions, Batcher
from scheduler_components.scheduling.admission_budget import AdmissionBudget, AdmissionDemand
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.scheduling.request_kv_cache import RequestKvCache, pages_for
from scheduler_components.testing import BATCHER_CHECKS, ConformanceError
from scheduler_components.testing import batcher_checks as checks
from scheduler_components.testing.batcher_session import OpenBatcher
from scheduler_components.values import FinishReason, RequestState

pytestmark = pytest.mark.broken_variants


def opening(
    batcher: type[Batcher[Any]] = Batcher,
    *,
    kv_cache_type: type[RequestKvCache[Any]] = RequestKvCache,
    budget_type: type[AdmissionBudget] = AdmissionBudget,
    **parts: Any,
) -> OpenBatcher:
    """Return how to open a batcher with broken parts."""

    class WithBudget(batcher):  # type: ignore[misc, valid-type]
        def _make_budget(self, chunks: Any) -> AdmissionBudget:
            made = super()._make_budget(chunks)
            return budget_type(**{each.name: getattr(made, each.name) for each in fields(AdmissionBudget)})

    def open_batcher(limits: Any, queues: Any, kv_cache: Any) -> Any:
        return WithBudget(
            limits=limits,
            queues=queues,
            kv_cache=kv_cache_type(cache=kv_cache.cache),
            conditions=BatchConditions(new_token_ratio=NewTokenRatioTracker(initial=0.2, minimum=0.0)),
            **{name: part() for name, part in parts.items()},
        )

    return open_batcher


# Batchers.


class DecodesSeveralPositions(Batcher[Any]):
    """Takes the output of a preempted request for one decode: many positions that no budget counts."""

    def _try_admit(self, request: Any, budget: Any, chunks: Any) -> Any:
        refusal = super()._try_admit(request, budget, chunks)
        if refusal is None and request.num_retractions and request.num_computed_tokens < request.num_prompt_tokens:
            request.prefill_end = request.num_prompt_tokens
        return refusal


class PreemptsTheEarliest(Batcher[Any]):
    def _select_victim(self) -> Any:
        return self.queues.running[0]


class AdmitsWhilePreempting(Batcher[Any]):
    """Admits the requests that it has just preempted, before their pages are free of others."""

    def _fill(self, chunks: Any) -> tuple[int, int]:
        num_retracted = self._continue_running(chunks, self.queues.running)
        return 0, num_retracted + self._admit_waiting(chunks)


class PreemptsNeedlessly(Batcher[Any]):
    """Preempts all in each tenth step, although pages are free: vLLM's reset of a prefix cache, without an end."""

    def _fill(self, chunks: Any) -> tuple[int, int]:
        if self.num_steps % 2:
            self.retract_all()
        return super()._fill(chunks)


class ForgetsTheLast(Batcher[Any]):
    """Never continues the latest running request."""

    def _continue_running(self, chunks: Any, requests: Any) -> int:
        return super()._continue_running(chunks, requests[:-1] if len(requests) > 1 else requests)


class SchedulesTwice(Batcher[Any]):
    def _continue_running(self, chunks: Any, requests: Any) -> int:
        found = super()._continue_running(chunks, requests)
        chunks.extend(chunk for chunk in chunks[:1] if not chunk.is_prefill)
        return found


class IdlesWithWaiting(Batcher[Any]):
    @property
    def has_work(self) -> bool:
        return bool(self.queues.running)


class WakesForNothing(Batcher[Any]):
    @property
    def has_work(self) -> bool:
        return True


class KeepsTheMatchOfRefused(Batcher[Any]):
    """A refused request keeps its locked prefix."""

    def _try_admit(self, request: Any, budget: Any, chunks: Any) -> Any:
        refusal = super()._try_admit(request, budget, chunks)
        if refusal == "pages":
            self.kv_cache.cache.lock(self.kv_cache.cache.match_prefix(request.token_ids[:-1]).node)
        return refusal


class CachesBeforeItComputes(Batcher[Any]):
    """Requests of the same batch match pages whose KV is not computed yet."""

    def _try_admit(self, request: Any, budget: Any, chunks: Any) -> Any:
        refusal = super()._try_admit(request, budget, chunks)
        if refusal is None:
            before, request.num_computed_tokens = request.num_computed_tokens, chunks[-1].end
            self.kv_cache.cache_unfinished(request)  # type: ignore[attr-defined]
            request.num_computed_tokens = before
        return refusal


class DropsTheLastToken(Batcher[Any]):
    """A preemption loses the token whose KV was not computed yet."""

    def _retract(self, request: Any) -> None:
        if request.num_output_tokens:
            request.token_ids.pop()
        super()._retract(request)


class KeepsStateRunning(Batcher[Any]):
    def _retract(self, request: Any) -> None:
        super()._retract(request)
        request.state = RequestState.RUNNING


class LeavesTheQueueLate(Batcher[Any]):
    """The finished request stays in the running queue."""

    def finish(self, request: Any, reason: FinishReason) -> None:
        was_running = request in self.queues.running
        super().finish(request, reason)
        if was_running and reason is FinishReason.ABORT:
            self.queues.running.append(request)


class IgnoresChunks(Batcher[Any]):
    """The first chunk of an admission takes all that is left of the step."""

    def _next_chunk_tokens(self, request: Any, num_tokens_left: int, budget_tokens: int) -> int:
        return min(num_tokens_left, budget_tokens)


class ComputesByClock(Batcher[Any]):
    """A substitute for a batcher that reads a clock: it depends on how many batches this process has made."""

    def _fill(self, chunks: Any) -> tuple[int, int]:
        if next(CALLS) % 7 == 3:
            return self._continue_running(chunks, self.queues.running[:1]), 0
        return super()._fill(chunks)


class IteratesASet(Batcher[Any]):
    def _continue_running(self, chunks: Any, requests: Any) -> int:
        return super()._continue_running(chunks, list(set(requests)))


class CountsContextTwice(Batcher[Any]):
    def next_batch(self) -> Any:
        batch = super().next_batch()
        return type(batch)(
            chunks=batch.chunks,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            num_context_tokens=2 * batch.num_context_tokens,
            num_admitted=batch.num_admitted,
            num_retracted=batch.num_retracted,
        )


class CountsNoAdmission(Batcher[Any]):
    """Reports 0 admissions and preemptions, from which metrics and the first-token predictor are made."""

    def next_batch(self) -> Any:
        batch = super().next_batch()
        return type(batch)(
            chunks=batch.chunks,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            num_context_tokens=batch.num_context_tokens,
        )


class ForgetsRetractions(Batcher[Any]):
    """Does not count how often a request was preempted."""

    def _retract(self, request: Any) -> None:
        super()._retract(request)
        request.num_retractions = 0


class RecountsNothing(Batcher[Any]):
    """The waiting queue reports cached tokens of a match that is gone."""

    def _retract(self, request: Any) -> None:
        super()._retract(request)
        request.num_cached_tokens += 1


class PrefillsForEver(Batcher[Any]):
    """In the mode ``prefill_first`` arrivals hold up decodes without a limit."""

    def _fill(self, chunks: Any) -> tuple[int, int]:
        self._num_prefill_steps = 0
        return super()._fill(chunks)


class StallsDecodes(Batcher[Any]):
    """In the mode ``mixed`` prefills stall the decodes of other requests."""

    def _continue_running(self, chunks: Any, requests: Any) -> int:
        prefills = [each for each in requests if each.num_prefill_tokens_left]
        return super()._continue_running(chunks, prefills or requests)


# Budgets.


class SpendsNoSlot(AdmissionBudget):
    __slots__ = ()

    def spend(self, demand: AdmissionDemand, *, reserved_pages: int = 0) -> None:
        super().spend(demand, reserved_pages=reserved_pages)
        self.slots += 1


class SpendsNoTokens(AdmissionBudget):
    __slots__ = ()

    def spend(self, demand: AdmissionDemand, *, reserved_pages: int = 0) -> None:
        super().spend(demand, reserved_pages=reserved_pages)
        self.tokens += demand.num_tokens


class CountsTenantsOnce(AdmissionBudget):
    """Admissions of this step do not count for the cap of their tenant."""

    __slots__ = ()

    def spend(self, demand: AdmissionDemand, *, reserved_pages: int = 0) -> None:
        super().spend(demand, reserved_pages=reserved_pages)
        if demand.tenant in self.running_by_tenant:
            self.running_by_tenant[demand.tenant] -= 1


class NeverRefusesPages(AdmissionBudget):
    __slots__ = ()

    def refusal_of(self, demand: AdmissionDemand) -> Any:
        refusal = super().refusal_of(demand)
        return None if refusal in ("pages", "watermark") else refusal


class RefusesTheLastPage(AdmissionBudget):
    """A request that needs the whole pool waits for ever."""

    __slots__ = ()

    def refusal_of(self, demand: AdmissionDemand) -> Any:
        if demand.num_pages is not None and self.available_pages - demand.num_pages <= 9:
            return "pages"
        return super().refusal_of(demand)


class AllowsTheWatermark(AdmissionBudget):
    """Off by one: the watermark keeps one page less."""

    __slots__ = ()

    def refusal_of(self, demand: AdmissionDemand) -> Any:
        self.watermark_pages -= self.watermark_pages > 0
        refusal = super().refusal_of(demand)
        self.watermark_pages += self.watermark_pages > 0
        return refusal


# KV caches.


class MatchesWithoutLock(RequestKvCache[Any]):
    """Another request's allocation evicts the prefix of a running one."""

    def match(self, request: Any) -> None:
        super().match(request)
        self.cache.unlock(request.node)

    def cache_unfinished(self, request: Any) -> None:
        if request.node is not None:
            self.cache.lock(request.node)
        super().cache_unfinished(request)


class GrowsTooLittle(RequestKvCache[Any]):
    """Rounds down where a position begins a page."""

    def grow(self, request: Any, num_tokens: int) -> bool:
        return super().grow(request, max(0, num_tokens - 1))


class GrowsHalf(RequestKvCache[Any]):
    """Returns False after it has allocated a part."""

    def grow(self, request: Any, num_tokens: int) -> bool:
        if super().grow(request, num_tokens):
            return True
        if self.available_pages:
            self.cache.allocate(1)
        return False


class SharesPages(RequestKvCache[Any]):
    """A page of another request, as after a free list with a page in it twice."""

    last: ClassVar[list[int]] = []

    def grow(self, request: Any, num_tokens: int) -> bool:
        had = len(request.pages)
        if not super().grow(request, num_tokens):
            return False
        if len(request.pages) > had:
            if SharesPages.last and SharesPages.last[0] not in request.pages:
                request.pages[-1] = SharesPages.last[0]
            SharesPages.last = request.pages[-1:]
        return True


class FreesWithoutUnlock(RequestKvCache[Any]):
    def free(self, request: Any) -> None:
        self.cache_unfinished(request)
        request.node = None
        super().free(request)


class KeepsComputedAfterFree(RequestKvCache[Any]):
    """A preempted request believes that its KV is still there."""

    def match(self, request: Any) -> None:
        super().match(request)
        page_size = self.cache.page_size
        if request.num_retractions and len(request.token_ids) > request.num_computed_tokens + page_size:
            if not super().grow(request, page_size):
                return
            request.num_computed_tokens += page_size


class MatchesOtherTokens(RequestKvCache[Any]):
    """Takes the pages of a prefix with one other token: a hash without its last token."""

    def match(self, request: Any) -> None:
        super().match(request)
        missing = pages_for(len(request.token_ids) - 1, self.cache.page_size) - len(request.pages)
        if missing > 0 and request.arrival % 3 == 2 and super().grow(request, self.cache.page_size):
            request.num_computed_tokens += self.cache.page_size


# Preemption policies.

CALLS = count()


class TakesTheFirst:
    """Two long requests take turns: each preempts the other before it has got further."""

    def select_victim(self, candidates: Sequence[Any]) -> Any:
        return candidates[0]


class ByHash:
    def select_victim(self, candidates: Sequence[Any]) -> Any:
        return min(candidates, key=hash)


class ByChance:
    def select_victim(self, candidates: Sequence[Any]) -> Any:
        return random.choice(candidates)


class Raises:
    def select_victim(self, candidates: Sequence[Any]) -> Any:
        raise RuntimeError("no victim")


FOUND: dict[str, tuple[OpenBatcher, Callable[[OpenBatcher], None]]] = {
    "decodes several positions": (opening(DecodesSeveralPositions), checks.check_no_limit_is_exceeded),
    "admits while preempting": (opening(AdmitsWhilePreempting), checks.check_no_limit_is_exceeded),
    "keeps the match of refused": (opening(KeepsTheMatchOfRefused), checks.check_no_limit_is_exceeded),
    "caches before it computes": (opening(CachesBeforeItComputes), checks.check_no_limit_is_exceeded),
    "drops the last token": (opening(DropsTheLastToken), checks.check_no_limit_is_exceeded),
    "keeps state running": (opening(KeepsStateRunning), checks.check_no_limit_is_exceeded),
    "ignores chunks": (opening(IgnoresChunks), checks.check_no_limit_is_exceeded),
    "spends no slot": (opening(budget_type=SpendsNoSlot), checks.check_no_limit_is_exceeded),
    "spends no tokens": (opening(budget_type=SpendsNoTokens), checks.check_no_limit_is_exceeded),
    "counts tenants once": (opening(budget_type=CountsTenantsOnce), checks.check_no_limit_is_exceeded),
    "never refuses pages": (opening(budget_type=NeverRefusesPages), checks.check_no_limit_is_exceeded),
    "refuses the last page": (opening(budget_type=RefusesTheLastPage), checks.check_no_limit_is_exceeded),
    "matches without lock": (opening(kv_cache_type=MatchesWithoutLock), checks.check_no_limit_is_exceeded),
    "grows too little": (opening(kv_cache_type=GrowsTooLittle), checks.check_no_limit_is_exceeded),
    "frees without unlock": (opening(kv_cache_type=FreesWithoutUnlock), checks.check_no_limit_is_exceeded),
    "keeps computed after free": (opening(kv_cache_type=KeepsComputedAfterFree), checks.check_no_limit_is_exceeded),
    "matches other tokens": (opening(kv_cache_type=MatchesOtherTokens), checks.check_no_limit_is_exceeded),
    "preempts needlessly": (opening(PreemptsNeedlessly), checks.check_an_empty_batcher_is_idle),
    "schedules twice": (opening(SchedulesTwice), checks.check_an_empty_batcher_is_idle),
    "idles with waiting": (opening(IdlesWithWaiting), checks.check_an_empty_batcher_is_idle),
    "wakes for nothing": (opening(WakesForNothing), checks.check_an_empty_batcher_is_idle),
    "counts context twice": (opening(CountsContextTwice), checks.check_an_empty_batcher_is_idle),
    "counts no admission": (opening(CountsNoAdmission), checks.check_an_empty_batcher_is_idle),
    "shares pages": (opening(kv_cache_type=SharesPages), checks.check_an_empty_batcher_is_idle),
    "leaves the queue late": (opening(LeavesTheQueueLate), checks.check_no_page_is_lost),
    "prefills for ever": (opening(PrefillsForEver), checks.check_arrivals_do_not_hold_up_decodes),
    "stalls decodes": (opening(StallsDecodes), checks.check_arrivals_do_not_hold_up_decodes),
    "computes by clock": (opening(ComputesByClock), checks.check_ranks_decide_equally),
    "iterates a set": (opening(IteratesASet), checks.check_ranks_decide_equally),
    "by hash": (opening(preemption=ByHash), checks.check_ranks_decide_equally),
    "by chance": (opening(preemption=ByChance), checks.check_ranks_decide_equally),
}


SURVIVORS: dict[str, tuple[OpenBatcher, str]] = {
    "forgets the last": (opening(ForgetsTheLast), "no check asks that a batch is as large as it could be"),
    "forgets retractions": (opening(ForgetsRetractions), "a count for reports; no decision depends on it"),
    "recounts nothing": (opening(RecountsNothing), "a count for reports; SCHEDULER_CHECKS compares it"),
    "preempts the earliest": (opening(PreemptsTheEarliest), "the others end first, and then it runs alone"),
    "takes the first": (opening(preemption=TakesTheFirst), "the batcher keeps the earliest arrival from it"),
    "raises": (opening(preemption=Raises), "the batcher replaces a policy that fails"),
    "allows the watermark": (
        opening(budget_type=AllowsTheWatermark),
        "one page; tests/scheduling/test_admission_budget.py",
    ),
    "grows half": (opening(kv_cache_type=GrowsHalf), "no workload has some pages left, but too few"),
}
"""Variants that pass, and why. Some are no errors."""


@pytest.mark.parametrize("name", FOUND)
def test_a_broken_part_is_found(name: str) -> None:
    open_batcher, check = FOUND[name]
    with pytest.raises(ConformanceError):
        check(open_batcher)


@pytest.mark.soak_only
@pytest.mark.parametrize("name", SURVIVORS)
@pytest.mark.parametrize("check", BATCHER_CHECKS)
def test_what_the_checks_do_not_find_is_listed(check: Callable[[OpenBatcher], None], name: str) -> None:
    open_batcher, _ = SURVIVORS[name]
    check(open_batcher)
