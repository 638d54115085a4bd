"""Every scheduler check passes on the reference scheduler, and fails with its trace on one that breaks its promise."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from kit.reference_scheduler import PAGE_SIZE, ReferenceScheduler, with_part
from kit.sorted_policy import Sorted
from kit.variants import found, instead_of, variants
from msgspec.structs import replace

from scheduler_components import BatchResultProcessor, BlockStored, KVEventBatch
from scheduler_components.batcher import Batcher
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.testing import ConformanceError, ListEventSink, ListOutputSink, interfaces
from scheduler_components.testing import scheduler_checks as checks
from scheduler_components.testing.strategies import workloads
from scheduler_components.values import FinishReason, OutputBatch, OutputDelta, TokenOutput
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.scheduler.request import EngineRequest


@pytest.mark.parametrize("check", checks.SCHEDULER_CHECKS)
def test_the_reference_scheduler_passes(check):
    check(ReferenceScheduler, checks.WORKLOAD)


@pytest.mark.soak
@settings(deadline=None, max_examples=settings().max_examples // 20)
@given(workload=workloads())
def test_the_reference_scheduler_passes_on_any_workload(workload):
    for check in checks.SCHEDULER_CHECKS:
        check(ReferenceScheduler, workload)


def test_the_fixed_workload_causes_retractions_and_evictions():
    """The checks find no error in retractions, evictions and chunked prefills unless the workload causes them."""
    scheduler = ReferenceScheduler(ListEventSink(), ListOutputSink())
    for number, (prompt, max_new_tokens) in enumerate(checks.WORKLOAD):
        scheduler.submit(f"r{number}", prompt, max_new_tokens)
    num_retracted = sum(result.num_retracted for result in scheduler.scheduler.drain())
    totals = scheduler.scheduler.request_metrics.stats()
    assert num_retracted >= 3
    assert totals.evicted_tokens_total > interfaces.MIN_POOL_TOKENS


def neither_of_two_requests_starves(open_scheduler):
    """The steps until the check gives up are a multiple of the workload's tokens."""
    checks.check_no_request_starves(open_scheduler, checks.WORKLOAD[:2])


ABORTED = checks.check_aborted_requests_end
ANSWERED = checks.check_every_request_is_answered
ENDS = checks.check_all_work_ends
EQUAL = checks.check_equal_work_gives_equal_events
EVENTS = checks.check_events_match_the_cache
LOAD = checks.check_load_is_consistent
OPENED = count()


# Broken schedulers: the reference scheduler with one wrong part.


class BrokenQueues(RequestQueues):
    __slots__ = ()

    @instead_of("requeue", ANSWERED, "requests without an end", LOAD, "requests that run or wait")
    def loses_the_retracted(self, request):
        self.running.remove(request)
        del self._by_rid[request.rid]

    @instead_of("admit", ANSWERED, "the tokens of r")
    def keeps_no_kv(self, request):
        """It continues after a retraction as if the KV were still there."""
        super().admit(request)
        if request.num_retractions:
            request.num_computed_tokens = request.num_input_tokens - 1

    forgets_its_chunks = found(LOAD, "that have no output token yet", num_chunked_tokens_left=0)


class BrokenBatcher(Batcher):
    __slots__ = ()

    @instead_of("_try_admit", ANSWERED, "requests without an end")
    def loses_requests_that_do_not_fit(self, request, budget, chunks):
        refusal = super()._try_admit(request, budget, chunks)
        if refusal == "pages":
            self.policy.discard(request)
            self.queues.waiting.remove(request)
            del self.queues._by_rid[request.rid]
        return refusal

    @instead_of("_retract", ENDS, "(used, pending) tokens: (0, 0, 0, 0)")
    def leaks_at_retraction(self, request):
        del request.pages[request.num_computed_tokens // PAGE_SIZE :]
        super()._retract(request)


class BrokenKvCache(RequestKvCache):
    __slots__ = ()

    @found(ANSWERED, "the tokens of r", LOAD, "pending or held for one request")
    class locks_nothing(RequestKvCache):
        __slots__ = ()

        def match(self, request):
            match = self.cache.match_prefix(request.token_ids[:-1])
            request.pages = list(match.pages)
            request.num_cached_pages = len(match.pages)
            request.num_computed_tokens = request.num_cached_tokens = match.num_tokens

        def cache_unfinished(self, request):
            num_pages = request.num_computed_tokens // PAGE_SIZE
            if num_pages <= request.num_cached_pages:
                return
            match = self.cache.insert(request.token_ids[: num_pages * PAGE_SIZE], request.pages[:num_pages])
            request.pages[:num_pages] = match.pages
            request.num_cached_pages = num_pages

    @instead_of("match", ANSWERED, "the tokens of r")
    def computes_too_little(self, request):
        """It counts one uncached position as cached."""
        super().match(request)
        if not request.num_retractions:
            request.num_computed_tokens = min(request.num_computed_tokens + 1, request.num_prompt_tokens)


class SharesEarly(RequestKvCache):
    __slots__ = ()

    def grow(self, request, num_tokens):
        if not super().grow(request, num_tokens):
            return False
        computed, request.num_computed_tokens = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        self.cache_unfinished(request)
        request.num_computed_tokens = computed
        return True


class BrokenResults(BatchResultProcessor):
    __slots__ = ()

    @instead_of("abort", ABORTED, "(used, pending) tokens: (0, 0, 0, 0)")
    def leaks_at_abort(self, request, reason=FinishReason.ABORT):
        del request.pages[request.num_cached_pages :]
        return super().abort(request, reason)


class SwappingRequest(EngineRequest):
    __slots__ = ()

    def output_since(self, start):
        output = super().output_since(start)
        return replace(output, token_ids=tuple(reversed(output.token_ids)))


class LateEvents(ListEventSink):
    def __init__(self, events):
        super().__init__()
        self.to = events

    def publish(self, events):
        if self.batches:
            self.to.publish(self.batches[-1])
        super().publish(events)


class BrokenScheduler(ReferenceScheduler):
    @found(ANSWERED, "the tokens of r")
    class shares_before_it_computes(with_part("batcher.kv_cache", SharesEarly)):
        """After an error or an abort the cache holds pages that were never computed."""

        def compute(self, batch):
            # Latest first: a request reads a page before an earlier request of this batch writes it.
            return super().compute(replace(batch, chunks=batch.chunks[::-1]))[::-1]

    @instead_of("submit", ANSWERED, "the tokens of r")
    def swaps_tokens(self, rid, prompt, max_new_tokens):
        limits = SamplingLimits(max_new_tokens=max_new_tokens)
        self.scheduler.submit(SwappingRequest(rid, prompt, limits, stream_interval=3))

    @instead_of("submit", ANSWERED, "the tokens of r")
    def gives_one_more(self, rid, prompt, max_new_tokens):
        super().submit(rid, prompt, max_new_tokens + 1)

    never_done = found(
        ENDS,
        "no work left after",
        has_work=True,
        step=lambda self: super().step() if super().has_work else None,
    )
    sleeps_on_an_abort = found(
        ABORTED, "requests without an end", has_work=property(lambda self: bool(self.scheduler.queues))
    )
    ignores_aborts = found(ABORTED, "2 steps after its abort", abort=lambda self, rid: False)

    @instead_of("abort", ABORTED, "the end of r10 after")
    def aborts_by_prefix(self, rid):
        return [self.scheduler.abort(each.rid) for each in list(self.scheduler.queues) if each.rid.startswith(rid)]

    @instead_of("abort", ABORTED, "KeyError")
    def refuses_late_aborts(self, rid):
        if not self.scheduler.abort(rid):
            raise KeyError(rid)
        return True

    @instead_of("step", EVENTS, "in a reader's view")
    def forgets_a_step(self):
        answer = super().step()
        self.scheduler.cache.evict(1)
        return answer

    @instead_of("__init__", EVENTS, "in a reader's view")
    def publishes_events_late(self, events, outputs):
        super().__init__(LateEvents(events), outputs)

    @instead_of("step", EVENTS, "in a reader's view")
    def publishes_an_unknown_block(self):
        answer = super().step()
        self.events.publish(KVEventBatch(1.0, (BlockStored((5,), None, (1, 2, 3, 4), 4, None),)))
        return answer

    # What it reports.

    @instead_of("get_loads", ENDS, "(0, 0, 4, 0)")
    def keeps_used(self):
        load = super().get_loads()
        return replace(load, num_used_tokens=4, num_total_tokens=4 + load.num_pending_tokens)

    runs_one_too_many = found(
        LOAD,
        "no more running than there are slots",
        get_loads=lambda self: replace(super().get_loads(), max_running_requests=2),
    )
    one_number = found(LOAD, "a sequence above 1", get_loads=lambda self: replace(super().get_loads(), sequence=1))
    counts_only_what_runs = found(
        LOAD, "adds to the waiting ones", get_loads=lambda self: replace(super().get_loads(), num_waiting_reqs=0)
    )

    @instead_of("get_loads", LOAD, "a token_usage of ")
    def adds_up(self):
        load = super().get_loads()
        return replace(load, token_usage=load.token_usage * 2)

    @instead_of("get_loads", LOAD, "adds to the waiting ones")
    def counts_each_token_twice(self):
        load = super().get_loads()
        total = load.num_used_tokens + 2 * load.num_pending_tokens
        return replace(load, num_pending_tokens=2 * load.num_pending_tokens, num_total_tokens=total)

    # Two schedulers that differ.

    salt = property(lambda self: self.__dict__.setdefault("_salt", next(OPENED)))

    @instead_of("submit", EQUAL, "events of the other scheduler")
    def salts_its_tokens(self, rid, prompt, max_new_tokens):
        super().submit(rid, [self.salt, *prompt], max_new_tokens)

    @instead_of("compute", EQUAL, "of the other scheduler")
    def ties_by_chance(self, batch):
        return tuple((token + self.salt) % 1000 for token in super().compute(batch))


class ChangedOutputs(ListOutputSink):
    """A sink in front of the check's sink, which changes each output."""

    def __init__(self, outputs, change):
        super().__init__()
        self.outputs, self.change = outputs, change

    def send(self, batch):
        return self.outputs.send(
            OutputBatch(batch.sequence, tuple(new for old in batch.deltas for new in self.change(old)))
        )


def with_outputs(change):
    """Return how to open a scheduler whose outputs are changed on their way to the sink."""
    return lambda events, outputs: ReferenceScheduler(events, ChangedOutputs(outputs, change))


def is_end(delta):
    return delta.finish_reason is not None


def output_after(delta):
    num_tokens = delta.num_output_tokens
    return OutputDelta(delta.rid, num_tokens, num_tokens + 1, None, TokenOutput((1,)))


OUTPUTS = {
    "dropped_abort": (
        lambda old: [old] * (old.finish_reason != FinishReason.ABORT),
        ABORTED,
        "2 steps after its abort",
    ),
    "repeated_end": (lambda old: [old] * (1 + is_end(old)), ANSWERED, "no output of r"),
    "output_after_the_end": (lambda old: [old, output_after(old)][: 1 + is_end(old)], ANSWERED, "no output of r"),
    "one_name_for_all": (lambda old: [replace(old, rid="r1")], ANSWERED, "of r1"),
    "no_reason": (
        lambda old: [replace(old, finish_reason=FinishReason.STOP) if is_end(old) else old],
        ANSWERED,
        "found:    stop",
    ),
    "lost_token": (
        lambda old: [old] * (is_end(old) or old.start != 1),
        ANSWERED,
        "position of the first new token of r",
    ),
    "repeated_token": (lambda old: [old] * (2 - is_end(old)), ANSWERED, "position of the first new token of r"),
    "early_end": (
        lambda old: [replace(old, finish_reason=FinishReason.LENGTH) if old.start == 2 else old],
        ANSWERED,
        "after 3 of ",
    ),
}
"""What becomes of each output, and what must find it."""

ORDERS = {
    "serves_the_latest_first": lambda request: -request.arrival,
    "serves_the_shortest_first": lambda request: request.num_input_tokens,
    "serves_the_cached_first": lambda request: -request.num_cached_tokens,
}


def with_order(key):
    """Return how to open a scheduler that serves the requests by this key, so that some starve."""

    def open_scheduler(events, outputs):
        scheduler = ReferenceScheduler(events, outputs)
        policy = scheduler.scheduler.batcher.policy = Sorted(len)
        policy.key = lambda request, step: (key(request),)
        return scheduler

    return open_scheduler


PARTS = {
    "queues": BrokenQueues,
    "batcher": BrokenBatcher,
    "batcher.kv_cache": BrokenKvCache,
    "results": BrokenResults,
}


def each_finding(table, opening=lambda broken: broken):
    """Return a row per pair of check and text of each variant."""
    for name, (broken, *expected) in variants(table).items():
        for check, text in zip(expected[::2], expected[1::2], strict=True):
            yield pytest.param(opening(broken), check, text, id=name)


FOUND = [
    *each_finding(BrokenScheduler),
    *(
        row
        for path, table in PARTS.items()
        for row in each_finding(table, lambda broken, path=path: with_part(path, broken))
    ),
    *(pytest.param(with_outputs(change), *expected, id=name) for name, (change, *expected) in OUTPUTS.items()),
    *(
        pytest.param(with_order(key), neither_of_two_requests_starves, "steps with newcomers", id=name)
        for name, key in ORDERS.items()
    ),
]


@pytest.mark.broken_variants
@pytest.mark.parametrize(("broken", "check", "expected_text"), FOUND)
def test_a_broken_scheduler_raises_a_conformance_error_with_the_trace(broken, check, expected_text):
    with pytest.raises(ConformanceError) as failed:
        check(broken)
    assert expected_text in str(failed.value), str(failed.value)
    assert "\n  1. opened a scheduler\n" in str(failed.value)
