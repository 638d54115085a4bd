"""Every scheduler check passes on the reference scheduler, and fails with its trace on one that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

import msgspec
import pytest
from hypothesis import given, settings

from scheduler_components import BlockStored, KVEventBatch, KvEventSink, LoadSnapshot, ParallelState
from scheduler_components.reference.device import SimulatedDevice
from scheduler_components.reference.engine import Request, SamplingLimits, Scheduler, SchedulerConfig, SchedulerSinks
from scheduler_components.testing import ConformanceError, parts
from scheduler_components.testing import scheduler_checks as checks
from scheduler_components.testing.strategies import workloads


class Reference:
    """The reference scheduler on a device that takes no time, with a pool that is sometimes full."""

    def __init__(self, sink: KvEventSink) -> None:
        device = SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None)
        config = SchedulerConfig(page_size=4, kv_tokens=parts.MIN_POOL_TOKENS, max_running_requests=3)
        self.sink, self.numbers = sink, count()
        self.scheduler = Scheduler.compose(config, ParallelState.trivial(), device, sinks=SchedulerSinks(events=sink))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        limits = SamplingLimits(max_new_tokens=max_new_tokens, ignore_eos=True)
        self.scheduler.submit(Request(f"r{next(self.numbers)}", list(prompt), limits))

    def step(self) -> object:
        return self.scheduler.step()

    def get_loads(self) -> LoadSnapshot:
        return self.scheduler.load.get_loads()

    def block_hashes(self) -> Iterable[int]:
        return self.scheduler.cache.block_hashes()


@pytest.mark.parametrize("check", checks.SCHEDULER_CHECKS)
def test_the_reference_scheduler_passes(check: Callable[[checks.OpenScheduler, parts.Workload], None]) -> None:
    check(Reference, checks.WORKLOAD)


@settings(deadline=None, max_examples=25)
@given(workload=workloads())
def test_the_reference_scheduler_passes_on_any_workload(workload: parts.Workload) -> None:
    for check in checks.SCHEDULER_CHECKS:
        check(Reference, workload)


class NeverDone(Reference):
    @property
    def has_work(self) -> bool:
        return True


class KeepsUsed(Reference):
    def get_loads(self) -> LoadSnapshot:
        return msgspec.structs.replace(super().get_loads(), num_used_tokens=4)


class ForgetsAStep(Reference):
    def step(self) -> object:
        answer = super().step()
        self.scheduler.cache.evict(1)
        return answer


class TellsTwice(Reference):
    def step(self) -> object:
        answer = super().step()
        self.sink.publish(KVEventBatch(1.0, (BlockStored((5,), None, (1, 2, 3, 4), 4, None),)))
        return answer


class OneNumber(Reference):
    def get_loads(self) -> LoadSnapshot:
        return msgspec.structs.replace(super().get_loads(), sequence=1)


class AddsUp(Reference):
    def get_loads(self) -> LoadSnapshot:
        load = super().get_loads()
        return msgspec.structs.replace(load, token_usage=load.token_usage * 2)


OPENED = count()


class SaltsItsTokens(Reference):
    def __init__(self, sink: KvEventSink) -> None:
        super().__init__(sink)
        self.salt = next(OPENED)

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        super().submit([self.salt, *prompt], max_new_tokens)


@pytest.mark.parametrize(
    ("check", "broken", "told"),
    [
        (checks.check_all_work_ends, NeverDone, "no work left after"),
        (checks.check_all_work_ends, KeepsUsed, "(0, 0, 4, 0)"),
        (checks.check_events_are_the_cache, ForgetsAStep, "in a reader's view"),
        (checks.check_events_are_the_cache, TellsTwice, "in a reader's view"),
        (checks.check_load_is_sound, OneNumber, "a sequence above 1"),
        (checks.check_load_is_sound, AddsUp, "token_usage from 0 to 1"),
        (checks.check_equal_work_gives_equal_events, SaltsItsTokens, "the other's events"),
    ],
)
def test_a_broken_scheduler_fails_with_its_trace(
    check: Callable[[checks.OpenScheduler], None], broken: type[Reference], told: str
) -> None:
    with pytest.raises(ConformanceError) as failed:
        check(broken)
    assert told in str(failed.value), str(failed.value)
    assert "submitted 32 tokens" in str(failed.value)
