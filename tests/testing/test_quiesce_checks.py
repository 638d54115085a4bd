"""The checks of rest pass on the reference scheduler, and name what is wrong with one that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
from kit.reference_scheduler import ReferenceScheduler

from scheduler_components.agreement import ParallelGroups
from scheduler_components.batcher import Batcher
from scheduler_components.events import MediumGroup
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.quiesce import QuiesceState
from scheduler_components.scheduling.tier_prefetcher import TierPrefetcher
from scheduler_components.testing import QUIESCE_CHECKS, ConformanceError, interfaces, next_token
from scheduler_components.testing import quiesce_checks as checks
from scheduler_components.testing.scheduler_checks import WORKLOAD
from scheduler_components.values import ControlReply, ControlRequest
from scheduler_engine.device.device import DeviceRequest, ScheduledBatch, SimulatedDevice
from scheduler_engine.device.weights import SimulatedWeights
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import Request
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


class _KeepsComputing(Batcher):
    __slots__ = ()

    def next_batch(self) -> Any:
        gate, self.conditions.gate = self.conditions.gate, QuiesceState()
        try:
            return super().next_batch()
        finally:
            self.conditions.gate = gate


class _KeepsItsNamespace(TierPrefetcher):
    __slots__ = ()

    def restart(self, namespace: object) -> None:
        super().restart(self.kv_cache.namespace)


class _LosesTheRetracted(Batcher):
    __slots__ = ()

    def _retract(self, request: Request) -> None:
        super()._retract(request)
        self.queues.waiting.remove(request)
        del self.queues._by_rid[request.rid]


class _TellsLater(Scheduler):
    __slots__ = ()

    def clear_cache(self, weight_version: str = "default") -> None:
        kv_events, self.kv_events = self.kv_events, _Deaf()
        super().clear_cache(weight_version)
        self.kv_events = kv_events


class _Deaf:
    def flush(self) -> None:
        pass


class _ClearsNothing(Scheduler):
    __slots__ = ()

    def clear_cache(self, weight_version: str = "default") -> None:
        pass


def with_batcher(broken: type) -> type[RestingReference]:
    class Broken(RestingReference):
        def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
            super().__init__(events, outputs)
            self.scheduler.batcher.__class__ = broken

    return Broken


def with_prefetcher(broken: type) -> type[RestingReference]:
    class Broken(RestingReference):
        def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
            super().__init__(events, outputs)
            self.scheduler.prefetcher.__class__ = broken

    return Broken


def with_scheduler(broken: type) -> type[RestingReference]:
    class Broken(RestingReference):
        def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
            super().__init__(events, outputs)
            self.scheduler.__class__ = broken

    return Broken


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    ("check", "broken", "words"),
    [
        (
            checks.check_paused_scheduler_computes_nothing,
            with_batcher(_KeepsComputing),
            "scheduler is quiesced",
        ),
        (checks.check_paused_scheduler_computes_nothing, with_batcher(_LosesTheRetracted), "requests without an end"),
        (checks.check_flush_of_an_idle_scheduler_is_published, with_scheduler(_TellsLater), "in a reader's view"),
        (checks.check_flush_of_an_idle_scheduler_is_published, with_scheduler(_ClearsNothing), "after the flush"),
        (checks.check_new_weights_share_no_block_with_old_ones, with_prefetcher(_KeepsItsNamespace), "of old weights"),
        (checks.check_released_memory_holds_nothing, with_batcher(_KeepsComputing), "scheduler is quiesced"),
        (checks.check_released_memory_holds_nothing, with_scheduler(_ClearsNothing), "after the release"),
    ],
)
def test_a_broken_promise_is_named(check: Any, broken: type[RestingReference], words: str) -> None:
    with pytest.raises(ConformanceError, match=words):
        check(broken, WORKLOAD)
