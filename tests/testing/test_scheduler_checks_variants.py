"""Broken variants of a simple scheduler: the checks find each of them.

The variants repeat defects of real engines. Neither the simple scheduler nor the variants share code with the reference
scheduler, and the author of the checks wrote neither.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from itertools import count

import pytest
from hypothesis import given, settings
from kit import simple_scheduler
from kit.searches import num_examples
from kit.simple_scheduler import MAX_RUNNING, PAGE_SIZE, BlockCache, SimpleScheduler
from kit.variants import found, instead_of, variants
from msgspec.structs import replace

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.testing import (
    POOL_INVARIANT_CHECKS,
    POOL_STREAM_CHECKS,
    SCHEDULER_CHECKS,
    ConformanceError,
    interfaces,
)
from scheduler_components.testing import scheduler_checks as checks
from scheduler_components.testing.strategies import workloads
from scheduler_components.values import FinishReason, TokenOutput

ALL_CHECKS = (*SCHEDULER_CHECKS, *POOL_STREAM_CHECKS, *POOL_INVARIANT_CHECKS)


@pytest.mark.parametrize("check", ALL_CHECKS)
def test_the_simple_scheduler_passes(check):
    check(SimpleScheduler)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(1) // 5)
@given(workload=workloads())
def test_the_simple_scheduler_passes_on_any_workload(workload):
    for check in ALL_CHECKS:
        check(SimpleScheduler, workload)


@pytest.mark.parametrize("page_size", [*(pytest.param(size, marks=pytest.mark.soak_only) for size in (1, 8)), 32])
def test_the_simple_scheduler_passes_with_other_pages(page_size, monkeypatch):
    monkeypatch.setattr(simple_scheduler, "PAGE_SIZE", page_size)
    for check in ALL_CHECKS:
        check(SimpleScheduler)


class RemembersNothing(BlockCache):
    def match(self, tokens):
        return []


def test_a_cache_that_is_never_hit_is_no_error():
    """The documentation says so: no check requires a scheduler to find cached prefixes."""
    for check in ALL_CHECKS:
        check(with_cache(RemembersNothing))


def test_a_workload_as_large_as_the_pool_gets_no_further_turns():
    workload = ((tuple(range(250)), 6),)
    for check in ALL_CHECKS:
        check(SimpleScheduler, workload)


def with_cache(cache):
    """Return the simple scheduler over a broken cache."""
    return type("OverBrokenCache", (SimpleScheduler,), {"cache_type": cache})


def neither_of_two_requests_starves(open_scheduler):
    checks.check_no_request_starves(open_scheduler, checks.WORKLOAD[:2])


def each_stored(**changes):
    """Return how to change each stored block of some events."""
    return lambda _, events: [replace(each, **changes) if isinstance(each, BlockStored) else each for each in events]


ABORTED = checks.check_aborted_requests_end
ANSWERED = checks.check_every_request_is_answered
ENDS = checks.check_all_work_ends
EQUAL = checks.check_equal_work_gives_equal_events
EVENTS = checks.check_events_match_the_cache
LOAD = checks.check_load_is_consistent
POOL = checks.check_pool_accounting
RELEASED = checks.check_pools_are_released
STREAM = checks.check_stream_matches_the_pool
CLOCK = count()


class BrokenCache(BlockCache):
    # What a hash covers, and which pages a prefix finds.

    @instead_of("block_hash", ANSWERED, "the tokens of r12 from 0 on")
    def ignores_the_parent(self, parent, tokens):
        return super().block_hash(self.root, tokens)

    @instead_of("block_hash", ANSWERED, "the tokens of r")
    def ignores_the_grandparent(self, parent, tokens):
        """The hash covers two pages."""
        own = super().block_hash(self.root, tokens) >> 32 << 32
        return own | parent.block_hash >> 32 & 0xFFFFFFFF

    ignores_the_last_token = found(
        ANSWERED, "the tokens of r", block_hash=lambda self, parent, tokens: super().block_hash(parent, tokens[:-1])
    )
    ignores_the_first_token = found(
        ANSWERED, "the tokens of r", block_hash=lambda self, parent, tokens: super().block_hash(parent, tokens[1:])
    )
    ignores_the_order = found(
        ANSWERED, "the tokens of r", block_hash=lambda self, parent, tokens: super().block_hash(parent, sorted(tokens))
    )

    @instead_of("block_hash", ANSWERED, "the tokens of r")
    def hashes_half_tokens(self, parent, tokens):
        """It packs each token into 16 bits."""
        return super().block_hash(parent, [token & 0xFFFF for token in tokens])

    hashes_into_one_byte = found(
        ANSWERED, "the tokens of r", block_hash=lambda self, parent, tokens: super().block_hash(parent, tokens) & 0xFF
    )
    # It leaves no token to compute.
    finds_the_whole_prompt = found(
        ANSWERED, "all 32 positions are computed", match=lambda self, tokens: super().match([*tokens, 0])
    )

    @instead_of("match", ANSWERED, "the tokens of r")
    def finds_a_page_too_many(self, tokens):
        """It accepts a last page whose first tokens are equal."""
        found = super().match(tokens)
        rest = len(tokens) - 1 - len(found) * PAGE_SIZE
        last = found[-1] if found else self.root
        children = [each for each in self.blocks.values() if each.parent is last]
        return [*found, *children[:1]] if rest >= PAGE_SIZE else found

    # Who holds a page.
    locks_the_last_block_only = found(
        POOL,
        "locks: ",
        lock=lambda self, blocks: super().lock(blocks[-1:]),
        unlock=lambda self, blocks: super().unlock(blocks[-1:]),
    )

    @instead_of("lock", ANSWERED, "the tokens of r")
    def evicts_locked_blocks(self, blocks):
        for block in blocks:
            block.lock_count += 1

    @instead_of("insert", ENDS, "(used, pending) tokens")
    def leaks_duplicates(self, parent, tokens, page):
        is_known = self.block_hash(parent, tokens) in self.blocks
        block = super().insert(parent, tokens, page)
        if is_known:
            self.free.pop()
        return block

    @instead_of("insert", EVENTS, "stored-once")
    def stores_duplicates_again(self, parent, tokens, page):
        block = super().insert(parent, tokens, page)
        above = None if parent is self.root else parent.block_hash
        stored = BlockStored((block.block_hash,), above, tuple(tokens), PAGE_SIZE, None)
        if stored not in self.events[-1:]:
            self.events.append(stored)
        return block

    evicts_parents_first = found(EVENTS, "children-first", unlock=lambda self, blocks: super().unlock(blocks[::-1]))

    @instead_of("unlock", RELEASED, "protected, uncached")
    def keeps_blocks_of_ended(self, blocks):
        """It does not put the last block of a request back under the evictable ones."""
        super().unlock(blocks)
        for block in blocks[:1]:
            self.idle.pop(block.block_hash, None)

    @instead_of("evict", POOL, "StopIteration")
    def evicts_without_freeing(self, block):
        super().evict(block)
        self.free.pop()

    @instead_of("evict", POOL, "evictable differs")
    def keeps_the_hash_of_an_evicted_block(self, block):
        super().evict(block)
        self.blocks[block.block_hash] = block

    @found(POOL, "locks: ")
    class counts_a_lock_twice(BlockCache):
        def lock(self, blocks):
            super().lock(blocks)
            for block in blocks[1:]:
                block.lock_count += 1

        def unlock(self, blocks):
            for block in blocks[1:]:
                block.lock_count -= 1
            super().unlock(blocks)

    @instead_of("insert", POOL, "locks: ")
    def loses_a_lock_at_a_share(self, parent, tokens, page):
        is_known = self.block_hash(parent, tokens) in self.blocks
        block = super().insert(parent, tokens, page)
        if is_known:
            self.unlock((block,))
        return block

    @instead_of("allocate", POOL, "owned-and-free")
    def owns_a_page_of_a_neighbour(self, num_pages):
        """A freed page is given to two requests in one step."""
        pages = super().allocate(num_pages)
        if pages and len(self.free) == 3:
            self.free.append(pages[-1])
        return pages


class BrokenScheduler(SimpleScheduler):
    @instead_of("release", ANSWERED, "the tokens of r")
    def releases_shared_pages(self, request):
        self.cache.free.extend(request.pages[: len(request.blocks)])
        super().release(request)

    @instead_of("share", ANSWERED, "the tokens of r")
    def reads_its_duplicate(self, request):
        """It continues with its own page after the page is free."""
        pages = list(request.pages)
        super().share(request)
        request.pages = pages

    @instead_of("end", ENDS, "(used, pending) tokens")
    def leaks_the_last_page(self, request, reason):
        if reason is FinishReason.LENGTH and len(request.pages) > len(request.blocks):
            request.pages.pop()
        super().end(request, reason)

    @instead_of("grow", POOL, "locks: ")
    def locks_at_each_attempt(self, request, num_tokens):
        """It keeps the lock of a prefix when a request does not fit."""
        if super().grow(request, num_tokens):
            return True
        self.cache.lock(request.blocks)
        return False

    @found(ANSWERED, "the tokens of r")
    class shares_before_it_computes(SimpleScheduler):
        """A request of the same batch reads the pages before they are written."""

        def grow(self, request, num_tokens):
            if not super().grow(request, num_tokens):
                return False
            start, request.num_computed = request.num_computed, num_tokens
            self.share(request)
            request.num_computed = start
            return True

        def compute(self, batch):
            super().compute(batch[::-1])

    @instead_of("end", ANSWERED, "the tokens of r18 from 0 on")
    def caches_the_last_token(self, request, reason):
        """It caches the page that the last output token fills, whose KV was never computed."""
        if reason is FinishReason.LENGTH and self.grow(request, len(request.tokens)):
            request.num_computed = len(request.tokens)
            self.share(request)
        super().end(request, reason)

    @instead_of("share", EVENTS, "with which no request begins")
    def caches_outputs_under_other_tokens(self, request):
        """A page of outputs is cached one token late, as after a wrong start of its slice."""
        tokens, at = request.tokens, request.num_prompt_tokens
        request.tokens = [*tokens[:at], *[each ^ 1 for each in tokens[at:]]]
        super().share(request)
        request.tokens = tokens

    @instead_of("end", ABORTED, "the tokens of r4")
    def caches_uncomputed_pages_of_aborted(self, request, reason):
        """It caches every page of an aborted request that has all its tokens, also the newest without KV."""
        if reason is FinishReason.ABORT:
            request.num_computed = min(len(request.pages) * PAGE_SIZE, len(request.tokens))
            self.share(request)
        super().end(request, reason)

    # Chunks, retractions, ends.

    @instead_of("forward", ANSWERED, "the tokens of r")
    def skips_a_position_per_chunk(self, request, end):
        start = request.num_computed + (0 < request.num_computed < end - 1)
        return self.model.forward(request.tokens[:end], request.pages, start)

    @instead_of("compute", ANSWERED, "the tokens of r")
    def answers_every_chunk(self, batch):
        for request, end in batch:
            if end < len(request.tokens):
                request.tokens.append(0)
        super().compute(batch)

    allocates_a_page_too_late = found(
        ANSWERED, "IndexError", grow=lambda self, request, num_tokens: super().grow(request, num_tokens - 1)
    )

    @instead_of("match", ANSWERED, "the tokens of r")
    def keeps_computed_at_retraction(self, request):
        """It continues after a retraction as if the new pages had the KV of the old ones."""
        super().match(request)
        if request.output:
            request.num_computed = len(request.tokens) - 1

    @instead_of("retract", LOAD, "pending tokens of the waiting")
    def loses_output_at_retraction(self, request):
        super().retract(request)
        del request.tokens[request.num_prompt_tokens :]

    @instead_of("retract", ANSWERED, "the position of the first new token of r5")
    def loses_the_newest_token_at_retraction(self, request):
        super().retract(request)
        if request.output:
            request.tokens.pop()
            request.num_sent -= 1

    @instead_of("retract", ANSWERED, "the position of the first new token of r5")
    def counts_output_from_retraction(self, request):
        """It takes outputs for a part of the prompt after a retraction."""
        super().retract(request)
        request.num_prompt_tokens = len(request.tokens)
        request.num_sent = 0

    # Its victim can be in the batch already.
    retracts_the_oldest = found(ANSWERED, "IndexError", pick_victim=lambda self: self.running[0])

    @instead_of("retract", ANSWERED, "the end of r7 after")
    def ends_at_capacity(self, request):
        """A request that finds no page ends as if it were complete."""
        self.running.remove(request)
        self.end(request, FinishReason.LENGTH)

    @instead_of("append", ANSWERED, "the end of r1 after")
    def takes_an_eos_from_the_prompt(self, request, token):
        super().append(request, token)
        if 2 in request.tokens and request.finish_reason is None:
            self.running.remove(request)
            self.end(request, FinishReason.STOP)

    @instead_of("delta", ANSWERED, "the number of tokens of r1")
    def drops_the_last_token(self, request):
        delta = super().delta(request)
        if request.finish_reason is FinishReason.LENGTH:
            output = replace(delta.output, token_ids=delta.output.token_ids[:-1])
            return replace(delta, output=output)
        return delta

    @instead_of("delta", ANSWERED, "the number of prompt tokens of r1")
    def reports_the_rest_as_prompt(self, request):
        """The usage that a client pays counts a request's outputs as prompt."""
        delta = super().delta(request)
        return replace(delta, output=TokenOutput(delta.output.token_ids, len(request.tokens)))

    # Aborts.

    @instead_of("abort", ABORTED, "2 steps after its abort")
    def aborts_only_what_runs(self, rid):
        if all(request.rid != rid for request in self.waiting):
            super().abort(rid)

    @instead_of("end", ABORTED, "(used, pending) tokens")
    def leaks_an_aborted_prefill(self, request, reason):
        if reason is FinishReason.ABORT and request.num_computed < request.num_prefill_tokens:
            request.blocks, request.pages = [], []
        super().end(request, reason)

    @instead_of("end", ABORTED, "2 steps after its abort")
    def aborts_silently_before_the_first_token(self, request, reason):
        super().end(request, reason)
        if not request.output:
            self.ended.remove(request)

    @instead_of("abort", ABORTED, "no output of r17 after its end")
    def aborts_twice(self, rid):
        """It aborts a request again whose end waits for the next step."""
        again = [request for request in self.ended if request.rid == rid]
        super().abort(rid)
        self.ended += again

    @found(ABORTED, "no work left after")
    class loses_a_slot_per_abort(SimpleScheduler):
        num_lost = 0

        def abort(self, rid):
            self.num_lost += sum(request.rid == rid for request in self.running)
            super().abort(rid)

        def has_slot(self):
            return len(self.running) + self.num_lost < MAX_RUNNING

    @found(ABORTED, "(used, pending) tokens")
    class counts_the_aborted_as_waiting(SimpleScheduler):
        """Its counter of pending tokens forgets aborts."""

        num_stale = 0

        def abort(self, rid):
            self.num_stale += sum(len(request.tokens) for request in self.waiting if request.rid == rid)
            super().abort(rid)

        def num_pending_tokens(self):
            return super().num_pending_tokens() + self.num_stale

    @instead_of("publish", EVENTS, "in a reader's view")
    def publishes_every_second_step(self):
        if self.num_steps % 2 or not self.has_work:
            super().publish()

    @instead_of("retract", STREAM, "stored it and the pool does not hold it")
    def evicts_in_silence_at_retraction(self, request):
        """A retraction evicts the blocks of its victim from the cache, without an event."""
        blocks, num_events = request.blocks, len(self.cache.events)
        super().retract(request)
        for block in reversed(blocks):
            if not block.lock_count:
                self.cache.evict(block)
        del self.cache.events[num_events:]

    @instead_of("num_used_tokens", ENDS, "(used, pending) tokens")
    def counts_cached_as_used(self):
        return (self.cache.num_pages - len(self.cache.free)) * PAGE_SIZE

    @instead_of("num_used_tokens", LOAD, "pending or held for one request")
    def counts_own_pages_only(self):
        """Pages that requests share are not in its used tokens."""
        return sum(len(each.pages) - len(each.blocks) for each in self.running) * PAGE_SIZE

    @instead_of("num_used_tokens", LOAD, "used tokens within capacity")
    def counts_shared_pages_twice(self):
        return sum(len(each.pages) for each in self.running) * PAGE_SIZE

    @instead_of("num_pending_tokens", LOAD, "pending tokens of the waiting")
    def counts_negative_pending(self):
        waiting = sum(len(request.tokens) for request in self.waiting)
        return waiting + sum(each.num_prefill_tokens - each.num_computed for each in self.running)

    @instead_of("num_pending_tokens", LOAD, "pending tokens of the waiting")
    def counts_only_the_prompt_of_retracted(self):
        return super().num_pending_tokens() - sum(len(request.output) for request in self.waiting)

    # Order.

    @instead_of("schedule", EQUAL, "of the other scheduler")
    def starts_in_the_order_of_a_set(self):
        """The order depends on the hashes of ids, which differ in each process."""
        self.waiting = deque(sorted(self.waiting, key=lambda request: sha256(request.rid.encode()).digest()))
        return super().schedule()

    @found(EQUAL, "of the other scheduler")
    class decides_by_the_clock(SimpleScheduler):
        """Its chunks are shorter at odd times."""

        def __init__(self, events, outputs):
            super().__init__(events, outputs)
            self.opened_at = next(CLOCK)

        def chunk_end(self, request, budget):
            return super().chunk_end(request, budget if (self.opened_at + self.num_steps) % 2 else (budget + 1) // 2)

    # A module-level table, as after a fork: the next scheduler finds the hashes of the last one.
    table = BlockCache(interfaces.MIN_POOL_TOKENS // PAGE_SIZE)
    shares_its_cache_with_all = found(ABORTED, "the tokens of r1", cache_type=lambda *_: BrokenScheduler.table)

    @instead_of("schedule", neither_of_two_requests_starves, "steps with newcomers")
    def serves_the_cached_first(self):
        self.waiting = deque(sorted(self.waiting, key=lambda request: -len(self.cache.match(request.tokens))))
        return super().schedule()

    @instead_of("get_loads", LOAD, "no more running than there are slots")
    def runs_without_slots(self):
        return replace(super().get_loads(), max_running_requests=MAX_RUNNING - 1)

    # Pages of the pools. The outputs of most of these schedulers are right.

    @instead_of("release", POOL, "free-twice")
    def frees_twice(self, request):
        self.cache.free.extend(request.pages[-1:] if len(request.pages) > len(request.blocks) else ())
        super().release(request)

    @found(POOL, "lost: ")
    class loses_the_page_ahead(SimpleScheduler):
        """It reserves the page of the next token early, and loses it at a retraction."""

        def grow(self, request, num_tokens):
            return super().grow(request, num_tokens + 1)

        def retract(self, request):
            del request.pages[-(-request.num_computed // PAGE_SIZE) :]
            super().retract(request)

    @instead_of("__init__", POOL, "no-such-page")
    def numbers_pages_from_one(self, events, outputs):
        """It uses a page behind the end of the pool."""
        super().__init__(events, outputs)
        self.cache.free = deque(range(1, self.cache.num_pages + 1))

    reports_no_usage = found(
        LOAD, "a token_usage of 0.06", get_loads=lambda self: replace(super().get_loads(), token_usage=0.0)
    )

    @instead_of("get_loads", LOAD, "a token_usage of 0.25")
    def reports_the_capacity_in_pages(self):
        load = super().get_loads()
        return replace(load, max_total_num_tokens=load.num_pages)


class BrokenEvents(SimpleScheduler):
    """Its events are changed before they are published."""

    def publish(self):
        self.cache.events = list(self.change(self.cache.events))
        super().publish()

    publishes_children_first = found(EVENTS, "parents-first", change=lambda self, events: reversed(events))

    @instead_of("change", EVENTS, "stored-once")
    def publishes_stores_first(self, events):
        return sorted(events, key=lambda event: isinstance(event, BlockRemoved))

    @instead_of("change", STREAM, "stored it and the pool does not hold it")
    def publishes_no_removals(self, events):
        return [event for event in events if not isinstance(event, BlockRemoved)]

    @instead_of("change", EVENTS, "in a reader's view")
    def clears_instead_of_removing(self, events):
        return [AllBlocksCleared() if isinstance(event, BlockRemoved) else event for event in events]

    names_no_parent = found(EVENTS, "with which no request begins", change=each_stored(parent_block_hash=None))
    names_the_host_tier = found(EVENTS, "in a reader's view", change=each_stored(medium="CPU"))

    @instead_of("change", EVENTS, "with which no request begins")
    def names_other_tokens(self, events):
        """The tokens of a block begin one position late."""
        for event in events:
            is_stored = isinstance(event, BlockStored)
            yield replace(event, token_ids=(*event.token_ids[1:], 0)) if is_stored else event

    @instead_of("change", STREAM, "stored it and the pool does not hold it")
    def publishes_without_caching(self, events):
        """It announces each block a second time after its removal."""
        for event in events:
            yield event
            if isinstance(event, BlockRemoved):
                yield BlockStored(event.block_hashes, None, (0,) * PAGE_SIZE, PAGE_SIZE, None)


FOUND = {
    **{name: (with_cache(broken), *expected) for name, (broken, *expected) in variants(BrokenCache).items()},
    **variants(BrokenScheduler, BrokenEvents),
}


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", FOUND)
def test_a_check_finds_the_broken_variant(name):
    broken, check, expected_text = FOUND[name]
    with pytest.raises(ConformanceError) as failed:
        check(broken)
    assert expected_text in str(failed.value), str(failed.value)


NARROW_HASHES = ("ignores_the_parent", "ignores_the_first_token", "ignores_the_last_token", "ignores_the_order",
                 "hashes_half_tokens")  # fmt: skip


@pytest.mark.broken_variants
@pytest.mark.parametrize("page_size", [2, 16, 32])
@pytest.mark.parametrize("name", NARROW_HASHES)
def test_a_hash_that_covers_too_little_is_found_with_other_pages(name, page_size, monkeypatch):
    monkeypatch.setattr(simple_scheduler, "PAGE_SIZE", page_size)
    with pytest.raises(ConformanceError, match="the tokens of r"):
        ANSWERED(FOUND[name][0])
