"""The checks of rest pass on the reference scheduler, and name what is wrong with one that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace

import pytest
from kit.reference_scheduler import ReferenceScheduler, with_part
from kit.variants import found, instead_of, variants

from scheduler_components.agreement import ParallelGroups
from scheduler_components.batcher import Batcher
from scheduler_components.events import MediumGroup
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.quiesce import QuiesceState
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.testing import QUIESCE_CHECKS, ConformanceError, interfaces, next_token
from scheduler_components.testing import quiesce_checks as checks
from scheduler_components.testing.scheduler_checks import WORKLOAD
from scheduler_components.values import ControlReply, ControlRequest
from scheduler_engine.device.device import DeviceRequest, ScheduledBatch, SimulatedDevice
from scheduler_engine.device.weights import SimulatedWeights
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.scheduler import Scheduler


class RestingReference(ReferenceScheduler):
    """The reference scheduler that takes orders; its weights change nothing in what the model answers."""

    def __init__(self, events: KvEventSink, outputs: OutputSink, tiers: CacheTiers | None = None) -> None:
        super().__init__(events, outputs, tiers)
        state = self.scheduler.batcher.conditions.gate
        assert isinstance(state, QuiesceState)
        weights = SimulatedWeights(device=SimulatedDevice())
        self.stepper = make_quiesce_stepper(self.scheduler, state, groups=ParallelGroups(), weights=weights)

    def execute(self, request: ControlRequest) -> ControlReply:
        self.stepper.enqueue(1, request)
        while (reply := self.stepper.step()) is None:
            if not self.stepper.quiesce.state.is_confirming:  # a step would publish what a clear has not published
                self.scheduler.step()
        if self.scheduler.results.has_pending_outputs:
            self.scheduler.step()
        return reply

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        return self.scheduler.cache.held_blocks()


@pytest.mark.parametrize("check", QUIESCE_CHECKS)
def test_the_reference_scheduler_passes(
    check: Callable[[checks.OpenQuiescableScheduler, interfaces.Workload], None],
) -> None:
    check(RestingReference, WORKLOAD)


@pytest.mark.parametrize("check", QUIESCE_CHECKS)
def test_it_passes_with_a_host_tier(
    check: Callable[[checks.OpenQuiescableScheduler, interfaces.Workload], None],
    open_host_tier: Callable[[], CacheTiers],
) -> None:
    class Tiered(RestingReference):  # the model that reads KV by page cannot stand behind a tier that moves pages
        def compute(self, batch: ScheduledBatch[DeviceRequest]) -> tuple[int, ...]:
            return tuple(next_token(chunk.request.token_ids[: chunk.end]) for chunk in batch.chunks)

    check(lambda events, outputs: Tiered(events, outputs, open_host_tier()), WORKLOAD[:4])


PAUSED = checks.check_paused_scheduler_computes_nothing
FLUSHED = checks.check_flush_of_an_idle_scheduler_is_published
RELEASED = checks.check_released_memory_holds_nothing
NEW_WEIGHTS = checks.check_new_weights_share_no_block_with_old_ones


class BrokenBatcher(Batcher):
    __slots__ = ()

    @instead_of("next_batch", PAUSED, "scheduler is quiesced", RELEASED, "scheduler is quiesced")
    def keeps_computing(self):
        gate, self.conditions.gate = self.conditions.gate, QuiesceState()
        try:
            return super().next_batch()
        finally:
            self.conditions.gate = gate

    @instead_of("_retract", PAUSED, "requests without an end")
    def loses_the_retracted(self, request):
        super()._retract(request)
        self.queues.waiting.remove(request)
        del self.queues._by_rid[request.rid]


class BrokenKvCache(RequestKvCache):
    __slots__ = ()

    keeps_its_namespace = found(
        NEW_WEIGHTS,
        "of old weights",
        restart=lambda self, requests, namespace: RequestKvCache.restart(self, requests, self.namespace),
    )


class BrokenScheduler(Scheduler):
    __slots__ = ()

    clears_nothing = found(
        FLUSHED, "after the flush", RELEASED, "after the release", clear_cache=lambda self, weight_version="": None
    )

    @instead_of("clear_cache", FLUSHED, "in a reader's view")
    def tells_later(self, weight_version="default"):
        kv_events, self.kv_events = self.kv_events, SimpleNamespace(flush=lambda: None)
        super().clear_cache(weight_version)
        self.kv_events = kv_events


FOUND = [
    pytest.param(with_part(path, broken, RestingReference), check, words, id=f"{name}-{words}")
    for path, table in {"batcher": BrokenBatcher, "kv_cache": BrokenKvCache, "": BrokenScheduler}.items()
    for name, (broken, *expected) in variants(table).items()
    for check, words in zip(expected[::2], expected[1::2], strict=True)
]


@pytest.mark.broken_variants
@pytest.mark.parametrize(("broken", "check", "words"), FOUND)
def test_a_broken_promise_is_named(broken, check, words):
    with pytest.raises(ConformanceError, match=words):
        check(broken, WORKLOAD)
