"""Every scheduler check passes on the reference scheduler, and fails with its trace on one that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from kit.reference_scheduler import PAGE_SIZE, ReferenceScheduler

from scheduler_components import BatchResultProcessor, BlockStored, EventBatch, KVEventBatch
from scheduler_components.batcher import Batcher
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.testing import ConformanceError, ListEventSink, ListOutputSink, interfaces
from scheduler_components.testing import scheduler_checks as checks
from scheduler_components.testing.strategies import workloads
from scheduler_components.values import FinishReason, LoadSnapshot, OutputBatch, OutputDelta, TokenOutput
from scheduler_engine.device.device import DeviceRequest, ScheduledBatch
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.scheduler.request import Request


@pytest.mark.parametrize("check", checks.SCHEDULER_CHECKS)
def test_the_reference_scheduler_passes(check: Callable[[checks.OpenScheduler, interfaces.Workload], None]) -> None:
    check(ReferenceScheduler, checks.WORKLOAD)


@pytest.mark.soak
@settings(deadline=None, max_examples=settings().max_examples // 20)
@given(workload=workloads())
def test_the_reference_scheduler_passes_on_any_workload(workload: interfaces.Workload) -> None:
    for check in checks.SCHEDULER_CHECKS:
        check(ReferenceScheduler, workload)


def test_the_fixed_workload_causes_retractions_and_evictions() -> None:
    """The checks find no error in retractions, evictions and chunked prefills unless the workload causes them."""
    scheduler = ReferenceScheduler(ListEventSink(), ListOutputSink())
    for number, (prompt, max_new_tokens) in enumerate(checks.WORKLOAD):
        scheduler.submit(f"r{number}", prompt, max_new_tokens)
    num_retracted = sum(result.num_retracted for result in scheduler.scheduler.drain())
    totals = scheduler.scheduler.request_metrics.stats()
    assert num_retracted >= 3
    assert totals.evicted_tokens_total > interfaces.MIN_POOL_TOKENS


def check_neither_of_two_requests_starves(open_scheduler: checks.OpenScheduler) -> None:
    """The steps until the check gives up are a multiple of the workload's tokens."""
    checks.check_no_request_starves(open_scheduler, checks.WORKLOAD[:2])


# Broken schedulers: the reference scheduler with one wrong part.


def become(part: Any, broken: type) -> None:
    part.__class__ = broken


class _Forgetful(RequestQueues):
    __slots__ = ()

    def requeue(self, request: Request) -> None:
        self.running.remove(request)
        del self._by_rid[request.rid]


class LosesTheRetracted(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.queues, _Forgetful)


class _TiredOfWaiting(Batcher):
    __slots__ = ()

    def _try_admit(self, request: Request, budget: Any, chunks: Any) -> Any:
        refusal = super()._try_admit(request, budget, chunks)
        if refusal == "pages":
            self.policy.discard(request)
            self.queues.waiting.remove(request)
            del self.queues._by_rid[request.rid]
        return refusal


class LosesRequestsThatDoNotFit(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.batcher, _TiredOfWaiting)


class _Outputs:
    """A sink in front of the check's sink, which changes each output."""

    def __init__(self, outputs: OutputSink, change: Callable[[OutputDelta], Iterable[OutputDelta]]) -> None:
        self.outputs, self.change = outputs, change

    def is_ready(self) -> bool:
        return True

    def send(self, batch: OutputBatch) -> bool:
        return self.outputs.send(
            OutputBatch(batch.sequence, tuple(new for old in batch.deltas for new in self.change(old)))
        )

    def close(self) -> None:
        pass


def with_outputs(change: Callable[[OutputDelta], Iterable[OutputDelta]]) -> type[ReferenceScheduler]:
    """Return a scheduler whose outputs are changed on their way to the sink."""

    class Changed(ReferenceScheduler):
        def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
            super().__init__(events, _Outputs(outputs, change))

    return Changed


def is_end(delta: OutputDelta) -> bool:
    return delta.finish_reason is not None


def repeated_end(delta: OutputDelta) -> Iterable[OutputDelta]:
    return [delta, delta] if is_end(delta) else [delta]


def dropped_abort(delta: OutputDelta) -> Iterable[OutputDelta]:
    return [] if delta.finish_reason == FinishReason.ABORT else [delta]


def one_name_for_all(delta: OutputDelta) -> Iterable[OutputDelta]:
    return [msgspec.structs.replace(delta, rid="r1")]


def no_reason(delta: OutputDelta) -> Iterable[OutputDelta]:
    return [msgspec.structs.replace(delta, finish_reason=FinishReason.STOP) if is_end(delta) else delta]


def lost_token(delta: OutputDelta) -> Iterable[OutputDelta]:
    return [delta] if is_end(delta) or delta.start != 1 else []


def repeated_token(delta: OutputDelta) -> Iterable[OutputDelta]:
    return [delta] if is_end(delta) else [delta, delta]


def early_end(delta: OutputDelta) -> Iterable[OutputDelta]:
    return [msgspec.structs.replace(delta, finish_reason=FinishReason.LENGTH) if delta.start == 2 else delta]


def output_after_the_end(delta: OutputDelta) -> Iterable[OutputDelta]:
    num_tokens = delta.num_output_tokens
    more = OutputDelta(delta.rid, num_tokens, num_tokens + 1, None, TokenOutput((1,)))
    return [delta, more] if is_end(delta) else [delta]


class _Swapping(Request):
    __slots__ = ()

    def output_since(self, start: int) -> TokenOutput:
        output = super().output_since(start)
        return msgspec.structs.replace(output, token_ids=tuple(reversed(output.token_ids)))


class SwapsTokens(ReferenceScheduler):
    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        limits = SamplingLimits(max_new_tokens=max_new_tokens)
        self.scheduler.submit(_Swapping(rid, prompt, limits, stream_interval=3))


class GivesOneMore(ReferenceScheduler):
    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        super().submit(rid, prompt, max_new_tokens + 1)


class _Uncomputed(RequestQueues):
    __slots__ = ()

    def admit(self, request: Request) -> None:
        super().admit(request)
        if request.num_retractions:
            request.num_computed_tokens = request.num_input_tokens - 1


class KeepsNoKv(ReferenceScheduler):
    """It continues after a retraction as if the KV were still there."""

    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.queues, _Uncomputed)


class _Unlocked(RequestKvCache):
    __slots__ = ()

    def match(self, request: Request) -> None:
        match = self.cache.match_prefix(request.token_ids[:-1])
        request.pages = list(match.pages)
        request.num_cached_pages = len(match.pages)
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens

    def cache_unfinished(self, request: Request) -> None:
        num_pages = request.num_computed_tokens // PAGE_SIZE
        if num_pages <= request.num_cached_pages:
            return
        match = self.cache.insert(request.token_ids[: num_pages * PAGE_SIZE], request.pages[:num_pages])
        request.pages[:num_pages] = match.pages
        request.num_cached_pages = num_pages


class LocksNothing(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.batcher.kv_cache, _Unlocked)


class _SharesEarly(RequestKvCache):
    __slots__ = ()

    def grow(self, request: Request, num_tokens: int) -> bool:
        if not super().grow(request, num_tokens):
            return False
        computed, request.num_computed_tokens = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        self.cache_unfinished(request)
        request.num_computed_tokens = computed
        return True


class SharesBeforeItComputes(ReferenceScheduler):
    """After an error or an abort the cache holds pages that were never computed."""

    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.batcher.kv_cache, _SharesEarly)

    def compute(self, batch: ScheduledBatch[DeviceRequest]) -> tuple[int, ...]:
        # Latest first: a request reads a page before an earlier request of this batch writes it.
        results = [
            self.model.forward(chunk.request.token_ids[: chunk.end], chunk.request.pages, chunk.start)
            for chunk in reversed(batch.chunks)
        ]
        return tuple(reversed(results))


class NeverDone(ReferenceScheduler):
    @property
    def has_work(self) -> bool:
        return True

    def step(self) -> object:
        return super().step() if super().has_work else None


class KeepsUsed(ReferenceScheduler):
    def get_loads(self) -> LoadSnapshot:
        load = super().get_loads()
        return msgspec.structs.replace(load, num_used_tokens=4, num_total_tokens=4 + load.num_pending_tokens)


class _LeakyAtRetraction(Batcher):
    __slots__ = ()

    def _retract(self, request: Request) -> None:
        del request.pages[request.num_computed_tokens // PAGE_SIZE :]
        super()._retract(request)


class LeaksAtRetraction(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.batcher, _LeakyAtRetraction)


class _LeakyAtAbort(BatchResultProcessor[Request]):
    __slots__ = ()

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> bool:
        del request.pages[request.num_cached_pages :]
        return super().abort(request, reason)


class LeaksAtAbort(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.results, _LeakyAtAbort)


class IgnoresAborts(ReferenceScheduler):
    def abort(self, rid: str) -> object:
        return False


class AbortsByPrefix(ReferenceScheduler):
    def abort(self, rid: str) -> object:
        return [
            self.scheduler.abort(request.rid) for request in list(self.scheduler.queues) if request.rid.startswith(rid)
        ]


class SleepsOnAnAbort(ReferenceScheduler):
    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.queues)


class RunsOneTooMany(ReferenceScheduler):
    def get_loads(self) -> LoadSnapshot:
        return msgspec.structs.replace(super().get_loads(), max_running_requests=2)


class _WholePrompts(RequestKvCache):
    __slots__ = ()

    def match(self, request: Request) -> None:
        super().match(request)
        if not request.num_retractions:
            request.num_computed_tokens = min(request.num_computed_tokens + 1, request.num_prompt_tokens)


class ComputesTooLittle(ReferenceScheduler):
    """It counts one uncached position as cached."""

    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.batcher.kv_cache, _WholePrompts)


class RefusesLateAborts(ReferenceScheduler):
    def abort(self, rid: str) -> object:
        if not self.scheduler.abort(rid):
            raise KeyError(rid)
        return True


class _LeastKeyFirst:
    """A scheduling policy that orders by one key, so that some requests starve."""

    def __init__(self, key: Callable[[Request], int]) -> None:
        self.key, self.waiting = key, dict[int, Request]()

    def add(self, request: Request, step: int) -> None:
        self.waiting[request.arrival] = request

    def discard(self, request: Request) -> None:
        self.waiting.pop(request.arrival, None)

    def order(self, step: int) -> Iterator[Request]:
        return iter(sorted(self.waiting.values(), key=self.key))

    def on_scheduled(self, chunks: object) -> None:
        pass


def with_order(key: Callable[[Request], int]) -> type[ReferenceScheduler]:
    """Return a scheduler that serves the requests in this order."""

    class Ordered(ReferenceScheduler):
        def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
            super().__init__(events, outputs)
            self.scheduler.batcher.policy = _LeastKeyFirst(key)

    return Ordered


ServesTheLatestFirst = with_order(lambda request: -request.arrival)
ServesTheShortestFirst = with_order(lambda request: request.num_input_tokens)
ServesTheCachedFirst = with_order(lambda request: -request.num_cached_tokens)


class ForgetsAStep(ReferenceScheduler):
    def step(self) -> object:
        answer = super().step()
        self.scheduler.cache.evict(1)
        return answer


class _LateEvents(ListEventSink):
    def __init__(self, events: KvEventSink) -> None:
        super().__init__()
        self.to = events

    def publish(self, events: EventBatch) -> None:
        if self.batches:
            self.to.publish(self.batches[-1])
        super().publish(events)


class PublishesEventsLate(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(_LateEvents(events), outputs)


class PublishesAnUnknownBlock(ReferenceScheduler):
    def step(self) -> object:
        answer = super().step()
        self.events.publish(KVEventBatch(1.0, (BlockStored((5,), None, (1, 2, 3, 4), 4, None),)))
        return answer


class OneNumber(ReferenceScheduler):
    def get_loads(self) -> LoadSnapshot:
        return msgspec.structs.replace(super().get_loads(), sequence=1)


class AddsUp(ReferenceScheduler):
    def get_loads(self) -> LoadSnapshot:
        load = super().get_loads()
        return msgspec.structs.replace(load, token_usage=load.token_usage * 2)


class _NoChunks(RequestQueues):
    __slots__ = ()
    num_chunked_tokens_left = 0


class ForgetsItsChunks(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        become(self.scheduler.queues, _NoChunks)


class CountsOnlyWhatRuns(ReferenceScheduler):
    def get_loads(self) -> LoadSnapshot:
        return msgspec.structs.replace(super().get_loads(), num_waiting_reqs=0)


class CountsEachTokenTwice(ReferenceScheduler):
    def get_loads(self) -> LoadSnapshot:
        load = super().get_loads()
        total = load.num_used_tokens + 2 * load.num_pending_tokens
        return msgspec.structs.replace(load, num_pending_tokens=2 * load.num_pending_tokens, num_total_tokens=total)


OPENED = count()


class SaltsItsTokens(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        self.salt = next(OPENED)

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        super().submit(rid, [self.salt, *prompt], max_new_tokens)


class TiesByChance(ReferenceScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        super().__init__(events, outputs)
        self.salt = next(OPENED)

    def compute(self, batch: ScheduledBatch[DeviceRequest]) -> tuple[int, ...]:
        return tuple((token + self.salt) % 1000 for token in super().compute(batch))


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    ("broken", "check", "expected_text"),
    [
        (LosesTheRetracted, checks.check_every_request_is_answered, "requests without an end"),
        (LosesRequestsThatDoNotFit, checks.check_every_request_is_answered, "requests without an end"),
        (with_outputs(dropped_abort), checks.check_aborted_requests_end, "2 steps after its abort"),
        (with_outputs(repeated_end), checks.check_every_request_is_answered, "no output of r"),
        (with_outputs(output_after_the_end), checks.check_every_request_is_answered, "no output of r"),
        (with_outputs(one_name_for_all), checks.check_every_request_is_answered, "of r1"),
        (with_outputs(no_reason), checks.check_every_request_is_answered, "found:    stop"),
        (with_outputs(lost_token), checks.check_every_request_is_answered, "position of the first new token of r"),
        (
            with_outputs(repeated_token),
            checks.check_every_request_is_answered,
            "position of the first new token of r",
        ),
        (with_outputs(early_end), checks.check_every_request_is_answered, "after 3 of "),
        (SwapsTokens, checks.check_every_request_is_answered, "the tokens of r"),
        (GivesOneMore, checks.check_every_request_is_answered, "the tokens of r"),
        (KeepsNoKv, checks.check_every_request_is_answered, "the tokens of r"),
        (LocksNothing, checks.check_every_request_is_answered, "the tokens of r"),
        (SharesBeforeItComputes, checks.check_every_request_is_answered, "the tokens of r"),
        (NeverDone, checks.check_all_work_ends, "no work left after"),
        (KeepsUsed, checks.check_all_work_ends, "(0, 0, 4, 0)"),
        (LeaksAtRetraction, checks.check_all_work_ends, "(used, pending) tokens: (0, 0, 0, 0)"),
        (LeaksAtAbort, checks.check_aborted_requests_end, "(used, pending) tokens: (0, 0, 0, 0)"),
        (IgnoresAborts, checks.check_aborted_requests_end, "2 steps after its abort"),
        (AbortsByPrefix, checks.check_aborted_requests_end, "the end of r10 after"),
        (SleepsOnAnAbort, checks.check_aborted_requests_end, "requests without an end"),
        (ComputesTooLittle, checks.check_every_request_is_answered, "the tokens of r"),
        (RunsOneTooMany, checks.check_load_is_consistent, "no more running than there are slots"),
        (RefusesLateAborts, checks.check_aborted_requests_end, "KeyError"),
        (ServesTheLatestFirst, check_neither_of_two_requests_starves, "steps with newcomers"),
        (ServesTheShortestFirst, check_neither_of_two_requests_starves, "steps with newcomers"),
        (ServesTheCachedFirst, check_neither_of_two_requests_starves, "steps with newcomers"),
        (ForgetsAStep, checks.check_events_match_the_cache, "in a reader's view"),
        (PublishesEventsLate, checks.check_events_match_the_cache, "in a reader's view"),
        (PublishesAnUnknownBlock, checks.check_events_match_the_cache, "in a reader's view"),
        (OneNumber, checks.check_load_is_consistent, "a sequence above 1"),
        (AddsUp, checks.check_load_is_consistent, "a token_usage of "),
        (ForgetsItsChunks, checks.check_load_is_consistent, "that have no output token yet"),
        (CountsOnlyWhatRuns, checks.check_load_is_consistent, "adds to the waiting ones"),
        (CountsEachTokenTwice, checks.check_load_is_consistent, "adds to the waiting ones"),
        (LosesTheRetracted, checks.check_load_is_consistent, "requests that run or wait"),
        (LocksNothing, checks.check_load_is_consistent, "pending or held for one request"),
        (SaltsItsTokens, checks.check_equal_work_gives_equal_events, "events of the other scheduler"),
        (TiesByChance, checks.check_equal_work_gives_equal_events, "of the other scheduler"),
    ],
)
def test_a_broken_scheduler_raises_a_conformance_error_with_the_trace(
    broken: type[ReferenceScheduler], check: Callable[[checks.OpenScheduler], None], expected_text: str
) -> None:
    with pytest.raises(ConformanceError) as failed:
        check(broken)
    assert expected_text in str(failed.value), str(failed.value)
    assert "\n  1. opened a scheduler\n" in str(failed.value)
