"""Broken variants of a simple scheduler: the checks find each of them.

The variants repeat defects of real engines. Neither the simple scheduler nor the variants share code with the reference
scheduler, and the author of the checks wrote neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import count
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from kit import simple_scheduler
from kit.searches import num_examples
from kit.simple_scheduler import MAX_RUNNING, PAGE_SIZE, Block, BlockCache, SimpleRequest, SimpleScheduler

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.testing import (
    POOL_INVARIANT_CHECKS,
    POOL_STREAM_CHECKS,
    SCHEDULER_CHECKS,
    ConformanceError,
    interfaces,
)
from scheduler_components.testing import scheduler_checks as checks
from scheduler_components.testing.strategies import workloads
from scheduler_components.values import FinishReason, LoadSnapshot, OutputDelta, TokenOutput

Check: TypeAlias = Callable[..., None]

ALL_CHECKS: tuple[Check, ...] = (*SCHEDULER_CHECKS, *POOL_STREAM_CHECKS, *POOL_INVARIANT_CHECKS)


@pytest.mark.parametrize("check", ALL_CHECKS)
def test_the_simple_scheduler_passes(check: Check) -> None:
    check(SimpleScheduler)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(1) // 5)
@given(workload=workloads())
def test_the_simple_scheduler_passes_on_any_workload(workload: interfaces.Workload) -> None:
    for check in ALL_CHECKS:
        check(SimpleScheduler, workload)


@pytest.mark.parametrize("page_size", [*(pytest.param(size, marks=pytest.mark.soak_only) for size in (1, 8)), 32])
def test_the_simple_scheduler_passes_with_other_pages(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simple_scheduler, "PAGE_SIZE", page_size)
    for check in ALL_CHECKS:
        check(SimpleScheduler)


class RemembersNothing(BlockCache):
    def match(self, tokens: Sequence[int]) -> list[Block]:
        return []


def test_a_cache_that_is_never_hit_is_no_error() -> None:
    """The documentation says so: no check requires a scheduler to find cached prefixes."""
    for check in ALL_CHECKS:
        check(with_cache(RemembersNothing))


def test_a_workload_as_large_as_the_pool_gets_no_further_turns() -> None:
    workload = ((tuple(range(250)), 6),)
    for check in ALL_CHECKS:
        check(SimpleScheduler, workload)


def with_cache(cache: type[BlockCache]) -> type[SimpleScheduler]:
    """Return the simple scheduler over a broken cache."""

    class OverBrokenCache(SimpleScheduler):
        cache_type = cache

    return OverBrokenCache


# What a hash covers, and which pages a prefix finds.


class IgnoresTheParent(BlockCache):
    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        return super().block_hash(self.root, tokens)


class IgnoresTheGrandparent(BlockCache):
    """The hash covers two pages."""

    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        own = super().block_hash(self.root, tokens) >> 32 << 32
        return own | (parent.block_hash >> 32) & 0xFFFFFFFF


class IgnoresTheLastToken(BlockCache):
    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        return super().block_hash(parent, tokens[:-1])


class IgnoresTheFirstToken(BlockCache):
    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        return super().block_hash(parent, tokens[1:])


class IgnoresTheOrder(BlockCache):
    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        return super().block_hash(parent, sorted(tokens))


class HashesHalfTokens(BlockCache):
    """It packs each token into 16 bits."""

    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        return super().block_hash(parent, [token & 0xFFFF for token in tokens])


class HashesIntoOneByte(BlockCache):
    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        return super().block_hash(parent, tokens) & 0xFF


class FindsTheWholePrompt(BlockCache):
    """It leaves no token to compute."""

    def match(self, tokens: Sequence[int]) -> list[Block]:
        return super().match([*tokens, 0])


class FindsAPageTooMany(BlockCache):
    """It accepts a last page whose first tokens are equal."""

    def match(self, tokens: Sequence[int]) -> list[Block]:
        found = super().match(tokens)
        rest = len(tokens) - 1 - len(found) * PAGE_SIZE
        last = found[-1] if found else self.root
        children = [each for each in self.blocks.values() if each.parent is last]
        return [*found, *children[:1]] if rest >= PAGE_SIZE else found


# Who holds a page.


class LocksTheLastBlockOnly(BlockCache):
    def lock(self, blocks: Sequence[Block]) -> None:
        super().lock(blocks[-1:])

    def unlock(self, blocks: Sequence[Block]) -> None:
        super().unlock(blocks[-1:])


class EvictsLockedBlocks(BlockCache):
    def lock(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.lock_count += 1


class LeaksDuplicates(BlockCache):
    def insert(self, parent: Block, tokens: Sequence[int], page: int) -> Block:
        is_known = self.block_hash(parent, tokens) in self.blocks
        block = super().insert(parent, tokens, page)
        if is_known:
            self.free.pop()
        return block


class ReleasesSharedPages(SimpleScheduler):
    def release(self, request: SimpleRequest) -> None:
        self.cache.free.extend(request.pages[: len(request.blocks)])
        super().release(request)


class ReadsItsDuplicate(SimpleScheduler):
    """It continues with its own page after the page is free."""

    def share(self, request: SimpleRequest) -> None:
        pages = list(request.pages)
        super().share(request)
        request.pages = pages


class LeaksTheLastPage(SimpleScheduler):
    def end(self, request: SimpleRequest, reason: FinishReason) -> None:
        if reason is FinishReason.LENGTH and len(request.pages) > len(request.blocks):
            request.pages.pop()
        super().end(request, reason)


class LocksAtEachAttempt(SimpleScheduler):
    """It keeps the lock of a prefix when a request does not fit."""

    def grow(self, request: SimpleRequest, num_tokens: int) -> bool:
        if super().grow(request, num_tokens):
            return True
        self.cache.lock(request.blocks)
        return False


class SharesBeforeItComputes(SimpleScheduler):
    """A request of the same batch reads the pages before they are written."""

    def grow(self, request: SimpleRequest, num_tokens: int) -> bool:
        if not super().grow(request, num_tokens):
            return False
        start, request.num_computed = request.num_computed, num_tokens
        self.share(request)
        request.num_computed = start
        return True

    def compute(self, batch: Sequence[tuple[SimpleRequest, int]]) -> None:
        super().compute(batch[::-1])


class CachesTheLastToken(SimpleScheduler):
    """It caches the page that the last output token fills, whose KV was never computed."""

    def end(self, request: SimpleRequest, reason: FinishReason) -> None:
        if reason is FinishReason.LENGTH and self.grow(request, len(request.tokens)):
            request.num_computed = len(request.tokens)
            self.share(request)
        super().end(request, reason)


class CachesOutputsUnderOtherTokens(SimpleScheduler):
    """A page of outputs is cached one token late, as after a wrong start of its slice."""

    def share(self, request: SimpleRequest) -> None:
        tokens, at = request.tokens, request.num_prompt_tokens
        request.tokens = [*tokens[:at], *[each ^ 1 for each in tokens[at:]]]
        super().share(request)
        request.tokens = tokens


class CachesUncomputedPagesOfAborted(SimpleScheduler):
    """It caches every page of an aborted request that has all its tokens, also the newest without KV."""

    def end(self, request: SimpleRequest, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT:
            request.num_computed = min(len(request.pages) * PAGE_SIZE, len(request.tokens))
            self.share(request)
        super().end(request, reason)


# Chunks, retractions, ends.


class SkipsAPositionPerChunk(SimpleScheduler):
    def forward(self, request: SimpleRequest, end: int) -> int:
        start = request.num_computed + (0 < request.num_computed < end - 1)
        return self.model.forward(request.tokens[:end], request.pages, start)


class AnswersEveryChunk(SimpleScheduler):
    def compute(self, batch: Sequence[tuple[SimpleRequest, int]]) -> None:
        for request, end in batch:
            if end < len(request.tokens):
                request.tokens.append(0)
        super().compute(batch)


class AllocatesAPageTooLate(SimpleScheduler):
    def grow(self, request: SimpleRequest, num_tokens: int) -> bool:
        return super().grow(request, num_tokens - 1)


class KeepsComputedAtRetraction(SimpleScheduler):
    """It continues after a retraction as if the new pages had the KV of the old ones."""

    def match(self, request: SimpleRequest) -> None:
        super().match(request)
        if request.output:
            request.num_computed = len(request.tokens) - 1


class LosesOutputAtRetraction(SimpleScheduler):
    def retract(self, request: SimpleRequest) -> None:
        super().retract(request)
        del request.tokens[request.num_prompt_tokens :]


class LosesTheNewestTokenAtRetraction(SimpleScheduler):
    def retract(self, request: SimpleRequest) -> None:
        super().retract(request)
        if request.output:
            request.tokens.pop()
            request.num_sent -= 1


class CountsOutputFromRetraction(SimpleScheduler):
    """It takes outputs for a part of the prompt after a retraction."""

    def retract(self, request: SimpleRequest) -> None:
        super().retract(request)
        request.num_prompt_tokens = len(request.tokens)
        request.num_sent = 0


class RetractsTheOldest(SimpleScheduler):
    """Its victim can be in the batch already."""

    def pick_victim(self) -> SimpleRequest:
        return self.running[0]


class EndsAtCapacity(SimpleScheduler):
    """A request that finds no page ends as if it were complete."""

    def retract(self, request: SimpleRequest) -> None:
        self.running.remove(request)
        self.end(request, FinishReason.LENGTH)


class TakesAnEosFromThePrompt(SimpleScheduler):
    def append(self, request: SimpleRequest, token: int) -> None:
        super().append(request, token)
        if 2 in request.tokens and request.finish_reason is None:
            self.running.remove(request)
            self.end(request, FinishReason.STOP)


class DropsTheLastToken(SimpleScheduler):
    def delta(self, request: SimpleRequest) -> OutputDelta:
        delta = super().delta(request)
        if request.finish_reason is FinishReason.LENGTH:
            output = msgspec.structs.replace(delta.output, token_ids=delta.output.token_ids[:-1])
            return msgspec.structs.replace(delta, output=output)
        return delta


class ReportsTheRestAsPrompt(SimpleScheduler):
    """The usage that a client pays counts a request's outputs as prompt."""

    def delta(self, request: SimpleRequest) -> OutputDelta:
        delta = super().delta(request)
        return msgspec.structs.replace(delta, output=TokenOutput(delta.output.token_ids, len(request.tokens)))


# Aborts.


class AbortsOnlyWhatRuns(SimpleScheduler):
    def abort(self, rid: str) -> None:
        if all(request.rid != rid for request in self.waiting):
            super().abort(rid)


class LeaksAnAbortedPrefill(SimpleScheduler):
    def end(self, request: SimpleRequest, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT and request.num_computed < request.num_prefill_tokens:
            request.blocks, request.pages = [], []
        super().end(request, reason)


class AbortsSilentlyBeforeTheFirstToken(SimpleScheduler):
    def end(self, request: SimpleRequest, reason: FinishReason) -> None:
        super().end(request, reason)
        if not request.output:
            self.ended.remove(request)


class AbortsTwice(SimpleScheduler):
    """It aborts a request again whose end waits for the next step."""

    def abort(self, rid: str) -> None:
        again = [request for request in self.ended if request.rid == rid]
        super().abort(rid)
        self.ended += again


class LosesASlotPerAbort(SimpleScheduler):
    num_lost = 0

    def abort(self, rid: str) -> None:
        self.num_lost += sum(request.rid == rid for request in self.running)
        super().abort(rid)

    def has_slot(self) -> bool:
        return len(self.running) + self.num_lost < MAX_RUNNING


class CountsTheAbortedAsWaiting(SimpleScheduler):
    """Its counter of pending tokens forgets aborts."""

    num_stale = 0

    def abort(self, rid: str) -> None:
        self.num_stale += sum(len(request.tokens) for request in self.waiting if request.rid == rid)
        super().abort(rid)

    def num_pending_tokens(self) -> int:
        return super().num_pending_tokens() + self.num_stale


# Events.


class ChangesEvents(SimpleScheduler):
    """Its events are changed before they are published."""

    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        raise NotImplementedError

    def publish(self) -> None:
        self.cache.events = list(self.change(self.cache.events))
        super().publish()


class PublishesChildrenFirst(ChangesEvents):
    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        return reversed(events)


class PublishesStoresFirst(ChangesEvents):
    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        return sorted(events, key=lambda event: isinstance(event, BlockRemoved))


class PublishesNoRemovals(ChangesEvents):
    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        return [event for event in events if not isinstance(event, BlockRemoved)]


class ClearsInsteadOfRemoving(ChangesEvents):
    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        return [AllBlocksCleared() if isinstance(event, BlockRemoved) else event for event in events]


class NamesNoParent(ChangesEvents):
    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        return [
            msgspec.structs.replace(event, parent_block_hash=None) if isinstance(event, BlockStored) else event
            for event in events
        ]


class NamesOtherTokens(ChangesEvents):
    """The tokens of a block begin one position late."""

    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        return [
            msgspec.structs.replace(event, token_ids=(*event.token_ids[1:], 0))
            if isinstance(event, BlockStored)
            else event
            for event in events
        ]


class NamesTheHostTier(ChangesEvents):
    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        return [
            msgspec.structs.replace(event, medium="CPU") if isinstance(event, BlockStored) else event
            for event in events
        ]


class StoresDuplicatesAgain(BlockCache):
    def insert(self, parent: Block, tokens: Sequence[int], page: int) -> Block:
        block = super().insert(parent, tokens, page)
        above = None if parent is self.root else parent.block_hash
        stored = BlockStored((block.block_hash,), above, tuple(tokens), PAGE_SIZE, None)
        if stored not in self.events[-1:]:
            self.events.append(stored)
        return block


class EvictsParentsFirst(BlockCache):
    def unlock(self, blocks: Sequence[Block]) -> None:
        super().unlock(blocks[::-1])


class PublishesEverySecondStep(SimpleScheduler):
    def publish(self) -> None:
        if self.num_steps % 2 or not self.has_work:
            super().publish()


class EvictsInSilenceAtRetraction(SimpleScheduler):
    """A retraction evicts the blocks of its victim from the cache, without an event."""

    def retract(self, request: SimpleRequest) -> None:
        blocks, num_events = request.blocks, len(self.cache.events)
        super().retract(request)
        for block in reversed(blocks):
            if not block.lock_count:
                self.cache.evict(block)
        del self.cache.events[num_events:]


# Load.


class ChangesLoad(SimpleScheduler):
    def change(self, load: LoadSnapshot) -> LoadSnapshot:
        raise NotImplementedError

    def get_loads(self) -> LoadSnapshot:
        return self.change(super().get_loads())


class CountsCachedAsUsed(SimpleScheduler):
    def num_used_tokens(self) -> int:
        return (self.cache.num_pages - len(self.cache.free)) * PAGE_SIZE


class CountsOwnPagesOnly(SimpleScheduler):
    """Pages that requests share are not in its used tokens."""

    def num_used_tokens(self) -> int:
        return sum(len(each.pages) - len(each.blocks) for each in self.running) * PAGE_SIZE


class CountsSharedPagesTwice(SimpleScheduler):
    def num_used_tokens(self) -> int:
        return sum(len(each.pages) for each in self.running) * PAGE_SIZE


class CountsNegativePending(SimpleScheduler):
    def num_pending_tokens(self) -> int:
        waiting = sum(len(request.tokens) for request in self.waiting)
        return waiting + sum(each.num_prefill_tokens - each.num_computed for each in self.running)


class CountsOnlyThePromptOfRetracted(SimpleScheduler):
    def num_pending_tokens(self) -> int:
        return super().num_pending_tokens() - sum(len(request.output) for request in self.waiting)


class ReportsNoUsage(ChangesLoad):
    def change(self, load: LoadSnapshot) -> LoadSnapshot:
        return msgspec.structs.replace(load, token_usage=0.0)


class ReportsTheCapacityInPages(ChangesLoad):
    def change(self, load: LoadSnapshot) -> LoadSnapshot:
        return msgspec.structs.replace(load, max_total_num_tokens=load.num_pages)


# Order.


class StartsInTheOrderOfASet(SimpleScheduler):
    """The order depends on the hashes of ids, which differ in each process."""

    def schedule(self) -> list[tuple[SimpleRequest, int]]:
        self.waiting = deque(sorted(self.waiting, key=lambda request: sha256(request.rid.encode()).digest()))
        return super().schedule()


CLOCK = count()


class DecidesByTheClock(SimpleScheduler):
    """Its chunks are shorter at odd times."""

    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        self.opened_at = next(CLOCK)

    def chunk_end(self, request: SimpleRequest, budget: int) -> int:
        return super().chunk_end(request, budget if (self.opened_at + self.num_steps) % 2 else (budget + 1) // 2)


class SharesItsCacheWithAll(SimpleScheduler):
    """A module-level table, as after a fork: the next scheduler finds the hashes of the last one."""

    table = BlockCache(interfaces.MIN_POOL_TOKENS // PAGE_SIZE)

    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        self.cache = self.table


class ServesTheCachedFirst(SimpleScheduler):
    def schedule(self) -> list[tuple[SimpleRequest, int]]:
        self.waiting = deque(sorted(self.waiting, key=lambda request: -len(self.cache.match(request.tokens))))
        return super().schedule()


class RunsWithoutSlots(SimpleScheduler):
    def get_loads(self) -> LoadSnapshot:
        return msgspec.structs.replace(super().get_loads(), max_running_requests=MAX_RUNNING - 1)


# Pages of the pools. The outputs of most of these schedulers are right.


class FreesTwice(SimpleScheduler):
    def release(self, request: SimpleRequest) -> None:
        self.cache.free.extend(request.pages[-1:] if len(request.pages) > len(request.blocks) else ())
        super().release(request)


class KeepsBlocksOfEnded(BlockCache):
    """It does not put the last block of a request back under the evictable ones."""

    def unlock(self, blocks: Sequence[Block]) -> None:
        super().unlock(blocks)
        for block in blocks[:1]:
            self.idle.pop(block.block_hash, None)


class EvictsWithoutFreeing(BlockCache):
    def evict(self, block: Block) -> None:
        super().evict(block)
        self.free.pop()


class KeepsTheHashOfAnEvictedBlock(BlockCache):
    def evict(self, block: Block) -> None:
        super().evict(block)
        self.blocks[block.block_hash] = block


class CountsALockTwice(BlockCache):
    def lock(self, blocks: Sequence[Block]) -> None:
        super().lock(blocks)
        for block in blocks[1:]:
            block.lock_count += 1

    def unlock(self, blocks: Sequence[Block]) -> None:
        for block in blocks[1:]:
            block.lock_count -= 1
        super().unlock(blocks)


class LosesALockAtAShare(BlockCache):
    def insert(self, parent: Block, tokens: Sequence[int], page: int) -> Block:
        is_known = self.block_hash(parent, tokens) in self.blocks
        block = super().insert(parent, tokens, page)
        if is_known:
            self.unlock((block,))
        return block


class LosesThePageAhead(SimpleScheduler):
    """It reserves the page of the next token early, and loses it at a retraction."""

    def grow(self, request: SimpleRequest, num_tokens: int) -> bool:
        return super().grow(request, num_tokens + 1)

    def retract(self, request: SimpleRequest) -> None:
        del request.pages[-(-request.num_computed // PAGE_SIZE) :]
        super().retract(request)


class OwnsAPageOfANeighbour(BlockCache):
    """A freed page is given to two requests in one step."""

    def allocate(self, num_pages: int) -> list[int] | None:
        pages = super().allocate(num_pages)
        if pages and len(self.free) == 3:
            self.free.append(pages[-1])
        return pages


class NumbersPagesFromOne(SimpleScheduler):
    """It uses a page behind the end of the pool."""

    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        self.cache.free = deque(range(1, self.cache.num_pages + 1))


class PublishesWithoutCaching(ChangesEvents):
    """It announces each block a second time after its removal."""

    def change(self, events: list[KVCacheEvent]) -> Iterable[KVCacheEvent]:
        for event in events:
            yield event
            if isinstance(event, BlockRemoved):
                yield BlockStored(event.block_hashes, None, (0,) * PAGE_SIZE, PAGE_SIZE, None)


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    ("broken", "check", "expected_text"),
    [
        pytest.param(
            with_cache(IgnoresTheParent),
            checks.check_every_request_is_answered,
            "the tokens of r12 from 0 on",
            id="IgnoresTheParent",
        ),
        pytest.param(
            with_cache(IgnoresTheGrandparent),
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="IgnoresTheGrandparent",
        ),
        pytest.param(
            with_cache(IgnoresTheLastToken),
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="IgnoresTheLastToken",
        ),
        pytest.param(
            with_cache(IgnoresTheFirstToken),
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="IgnoresTheFirstToken",
        ),
        pytest.param(
            with_cache(IgnoresTheOrder), checks.check_every_request_is_answered, "the tokens of r", id="IgnoresTheOrder"
        ),
        pytest.param(
            with_cache(HashesHalfTokens),
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="HashesHalfTokens",
        ),
        pytest.param(
            with_cache(HashesIntoOneByte),
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="HashesIntoOneByte",
        ),
        pytest.param(
            with_cache(FindsTheWholePrompt),
            checks.check_every_request_is_answered,
            "all 32 positions are computed",
            id="FindsTheWholePrompt",
        ),
        pytest.param(
            with_cache(FindsAPageTooMany),
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="FindsAPageTooMany",
        ),
        pytest.param(
            with_cache(LocksTheLastBlockOnly), checks.check_pool_accounting, "locks: ", id="LocksTheLastBlockOnly"
        ),
        pytest.param(
            with_cache(EvictsLockedBlocks),
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="EvictsLockedBlocks",
        ),
        pytest.param(
            with_cache(LeaksDuplicates), checks.check_all_work_ends, "(used, pending) tokens", id="LeaksDuplicates"
        ),
        pytest.param(
            ReleasesSharedPages, checks.check_every_request_is_answered, "the tokens of r", id="ReleasesSharedPages"
        ),
        pytest.param(
            ReadsItsDuplicate, checks.check_every_request_is_answered, "the tokens of r", id="ReadsItsDuplicate"
        ),
        pytest.param(LeaksTheLastPage, checks.check_all_work_ends, "(used, pending) tokens", id="LeaksTheLastPage"),
        pytest.param(LocksAtEachAttempt, checks.check_pool_accounting, "locks: ", id="LocksAtEachAttempt"),
        pytest.param(
            SharesBeforeItComputes,
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="SharesBeforeItComputes",
        ),
        pytest.param(
            CachesTheLastToken,
            checks.check_every_request_is_answered,
            "the tokens of r18 from 0 on",
            id="CachesTheLastToken",
        ),
        pytest.param(
            CachesOutputsUnderOtherTokens,
            checks.check_events_match_the_cache,
            "with which no request begins",
            id="CachesOutputsUnderOtherTokens",
        ),
        pytest.param(
            CachesUncomputedPagesOfAborted,
            checks.check_aborted_requests_end,
            "the tokens of r4",
            id="CachesUncomputedPagesOfAborted",
        ),
        pytest.param(
            SkipsAPositionPerChunk,
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="SkipsAPositionPerChunk",
        ),
        pytest.param(
            AnswersEveryChunk, checks.check_every_request_is_answered, "the tokens of r", id="AnswersEveryChunk"
        ),
        pytest.param(
            AllocatesAPageTooLate, checks.check_every_request_is_answered, "IndexError", id="AllocatesAPageTooLate"
        ),
        pytest.param(
            KeepsComputedAtRetraction,
            checks.check_every_request_is_answered,
            "the tokens of r",
            id="KeepsComputedAtRetraction",
        ),
        pytest.param(
            LosesOutputAtRetraction,
            checks.check_load_is_consistent,
            "pending tokens of the waiting",
            id="LosesOutputAtRetraction",
        ),
        pytest.param(
            LosesTheNewestTokenAtRetraction,
            checks.check_every_request_is_answered,
            "the position of the first new token of r5",
            id="LosesTheNewestTokenAtRetraction",
        ),
        pytest.param(
            CountsOutputFromRetraction,
            checks.check_every_request_is_answered,
            "the position of the first new token of r5",
            id="CountsOutputFromRetraction",
        ),
        pytest.param(RetractsTheOldest, checks.check_every_request_is_answered, "IndexError", id="RetractsTheOldest"),
        pytest.param(
            EndsAtCapacity, checks.check_every_request_is_answered, "the end of r7 after", id="EndsAtCapacity"
        ),
        pytest.param(
            TakesAnEosFromThePrompt,
            checks.check_every_request_is_answered,
            "the end of r1 after",
            id="TakesAnEosFromThePrompt",
        ),
        pytest.param(
            DropsTheLastToken,
            checks.check_every_request_is_answered,
            "the number of tokens of r1",
            id="DropsTheLastToken",
        ),
        pytest.param(
            ReportsTheRestAsPrompt,
            checks.check_every_request_is_answered,
            "the number of prompt tokens of r1",
            id="ReportsTheRestAsPrompt",
        ),
        pytest.param(
            AbortsOnlyWhatRuns, checks.check_aborted_requests_end, "2 steps after its abort", id="AbortsOnlyWhatRuns"
        ),
        pytest.param(
            LeaksAnAbortedPrefill,
            checks.check_aborted_requests_end,
            "(used, pending) tokens",
            id="LeaksAnAbortedPrefill",
        ),
        pytest.param(
            AbortsSilentlyBeforeTheFirstToken,
            checks.check_aborted_requests_end,
            "2 steps after its abort",
            id="AbortsSilentlyBeforeTheFirstToken",
        ),
        pytest.param(
            AbortsTwice, checks.check_aborted_requests_end, "no output of r17 after its end", id="AbortsTwice"
        ),
        pytest.param(
            LosesASlotPerAbort, checks.check_aborted_requests_end, "no work left after", id="LosesASlotPerAbort"
        ),
        pytest.param(
            CountsTheAbortedAsWaiting,
            checks.check_aborted_requests_end,
            "(used, pending) tokens",
            id="CountsTheAbortedAsWaiting",
        ),
        pytest.param(
            PublishesChildrenFirst, checks.check_events_match_the_cache, "parents-first", id="PublishesChildrenFirst"
        ),
        pytest.param(
            PublishesStoresFirst, checks.check_events_match_the_cache, "stored-once", id="PublishesStoresFirst"
        ),
        pytest.param(
            PublishesNoRemovals,
            checks.check_stream_matches_the_pool,
            "stored it and the pool does not hold it",
            id="PublishesNoRemovals",
        ),
        pytest.param(
            ClearsInsteadOfRemoving,
            checks.check_events_match_the_cache,
            "in a reader's view",
            id="ClearsInsteadOfRemoving",
        ),
        pytest.param(
            NamesNoParent, checks.check_events_match_the_cache, "with which no request begins", id="NamesNoParent"
        ),
        pytest.param(
            NamesOtherTokens, checks.check_events_match_the_cache, "with which no request begins", id="NamesOtherTokens"
        ),
        pytest.param(
            NamesTheHostTier, checks.check_events_match_the_cache, "in a reader's view", id="NamesTheHostTier"
        ),
        pytest.param(
            with_cache(StoresDuplicatesAgain),
            checks.check_events_match_the_cache,
            "stored-once",
            id="StoresDuplicatesAgain",
        ),
        pytest.param(
            with_cache(EvictsParentsFirst),
            checks.check_events_match_the_cache,
            "children-first",
            id="EvictsParentsFirst",
        ),
        pytest.param(
            PublishesEverySecondStep,
            checks.check_events_match_the_cache,
            "in a reader's view",
            id="PublishesEverySecondStep",
        ),
        pytest.param(
            EvictsInSilenceAtRetraction,
            checks.check_stream_matches_the_pool,
            "stored it and the pool does not hold it",
            id="EvictsInSilenceAtRetraction",
        ),
        pytest.param(CountsCachedAsUsed, checks.check_all_work_ends, "(used, pending) tokens", id="CountsCachedAsUsed"),
        pytest.param(
            CountsOwnPagesOnly,
            checks.check_load_is_consistent,
            "pending or held for one request",
            id="CountsOwnPagesOnly",
        ),
        pytest.param(
            CountsSharedPagesTwice,
            checks.check_load_is_consistent,
            "used tokens within capacity",
            id="CountsSharedPagesTwice",
        ),
        pytest.param(
            CountsNegativePending,
            checks.check_load_is_consistent,
            "pending tokens of the waiting",
            id="CountsNegativePending",
        ),
        pytest.param(
            CountsOnlyThePromptOfRetracted,
            checks.check_load_is_consistent,
            "pending tokens of the waiting",
            id="CountsOnlyThePromptOfRetracted",
        ),
        pytest.param(ReportsNoUsage, checks.check_load_is_consistent, "a token_usage of 0.06", id="ReportsNoUsage"),
        pytest.param(
            ReportsTheCapacityInPages,
            checks.check_load_is_consistent,
            "a token_usage of 0.25",
            id="ReportsTheCapacityInPages",
        ),
        pytest.param(
            RunsWithoutSlots,
            checks.check_load_is_consistent,
            "no more running than there are slots",
            id="RunsWithoutSlots",
        ),
        pytest.param(
            StartsInTheOrderOfASet,
            checks.check_equal_work_gives_equal_events,
            "of the other scheduler",
            id="StartsInTheOrderOfASet",
        ),
        pytest.param(
            DecidesByTheClock,
            checks.check_equal_work_gives_equal_events,
            "of the other scheduler",
            id="DecidesByTheClock",
        ),
        pytest.param(
            SharesItsCacheWithAll, checks.check_aborted_requests_end, "the tokens of r1", id="SharesItsCacheWithAll"
        ),
        pytest.param(
            ServesTheCachedFirst,
            lambda open_scheduler: checks.check_no_request_starves(open_scheduler, checks.WORKLOAD[:2]),
            "steps with newcomers",
            id="ServesTheCachedFirst",
        ),
        pytest.param(FreesTwice, checks.check_pool_accounting, "free-twice", id="FreesTwice"),
        pytest.param(
            with_cache(KeepsBlocksOfEnded),
            checks.check_pools_are_released,
            "protected, uncached",
            id="KeepsBlocksOfEnded",
        ),
        pytest.param(
            with_cache(EvictsWithoutFreeing), checks.check_pool_accounting, "StopIteration", id="EvictsWithoutFreeing"
        ),
        pytest.param(
            with_cache(KeepsTheHashOfAnEvictedBlock),
            checks.check_pool_accounting,
            "evictable differs",
            id="KeepsTheHashOfAnEvictedBlock",
        ),
        pytest.param(with_cache(CountsALockTwice), checks.check_pool_accounting, "locks: ", id="CountsALockTwice"),
        pytest.param(with_cache(LosesALockAtAShare), checks.check_pool_accounting, "locks: ", id="LosesALockAtAShare"),
        pytest.param(LosesThePageAhead, checks.check_pool_accounting, "lost: ", id="LosesThePageAhead"),
        pytest.param(
            with_cache(OwnsAPageOfANeighbour),
            checks.check_pool_accounting,
            "owned-and-free",
            id="OwnsAPageOfANeighbour",
        ),
        pytest.param(NumbersPagesFromOne, checks.check_pool_accounting, "no-such-page", id="NumbersPagesFromOne"),
        pytest.param(
            PublishesWithoutCaching,
            checks.check_stream_matches_the_pool,
            "stored it and the pool does not hold it",
            id="PublishesWithoutCaching",
        ),
    ],
)
def test_a_check_finds_the_broken_variant(broken: type[SimpleScheduler], check: Check, expected_text: str) -> None:
    with pytest.raises(ConformanceError) as failed:
        check(broken)
    assert expected_text in str(failed.value), str(failed.value)


@pytest.mark.broken_variants
@pytest.mark.parametrize("page_size", [2, 16, 32])
@pytest.mark.parametrize(
    "broken", [IgnoresTheParent, IgnoresTheFirstToken, IgnoresTheLastToken, IgnoresTheOrder, HashesHalfTokens]
)
def test_a_hash_that_covers_too_little_is_found_with_other_pages(
    broken: type[BlockCache], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simple_scheduler, "PAGE_SIZE", page_size)
    with pytest.raises(ConformanceError, match="the tokens of r"):
        checks.check_every_request_is_answered(with_cache(broken))
