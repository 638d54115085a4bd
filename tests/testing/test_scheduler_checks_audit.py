"""The kit's checks of pools pass on the reference scheduler over four pools, and fail on each that loses a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from kit.hybrid_scheduler import SMALL, HybridPages, KeepsStateOfAborted, LosesWindowPages, checker_of, hybrid_scheduler
from kit.reference_scheduler import DrivenScheduler
from kit.searches import num_examples

from scheduler_components.checks.pool_stats_observer import AuditedPool
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.testing import POOL_INVARIANT_CHECKS, ConformanceError, interfaces
from scheduler_components.testing.scheduler_checks import WORKLOAD, OpenAuditedScheduler
from scheduler_components.testing.strategies import workloads
from scheduler_engine.engine.config import IntegrityConfig

SEEN_BY_THE_CHECKS = IntegrityConfig(checks=CheckPolicy(action="count", count_every_steps=10**6))
CONFIG = attrs.evolve(
    SMALL, page_size=4, kv_tokens=interfaces.MIN_POOL_TOKENS, max_running_requests=3, integrity=SEEN_BY_THE_CHECKS
)


class AuditedReference(DrivenScheduler):
    def __init__(self, events: KvEventSink, outputs: OutputSink, pages: type[HybridPages] = HybridPages) -> None:
        scheduler, self.pages = hybrid_scheduler(pages, CONFIG, num_window_pages=256)
        scheduler.kv_events.sink = events  # type: ignore[assignment]
        scheduler.output.sink = outputs
        super().__init__(scheduler, ignore_eos=True)

    @property
    def pools(self) -> Sequence[AuditedPool]:
        return checker_of(self.scheduler).pools


@pytest.mark.parametrize("check", POOL_INVARIANT_CHECKS)
def test_the_reference_scheduler_passes(check: Callable[[OpenAuditedScheduler, interfaces.Workload], None]) -> None:
    check(AuditedReference, WORKLOAD)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(1) // 5)
@given(workload=workloads())
def test_the_reference_scheduler_passes_on_any_workload(workload: interfaces.Workload) -> None:
    for check in POOL_INVARIANT_CHECKS:
        check(AuditedReference, workload)


@pytest.mark.parametrize("check", POOL_INVARIANT_CHECKS)
@pytest.mark.parametrize("broken", [LosesWindowPages, KeepsStateOfAborted])
def test_a_scheduler_that_loses_pages_fails(
    check: Callable[[OpenAuditedScheduler, interfaces.Workload], None], broken: type[HybridPages]
) -> None:
    with pytest.raises(ConformanceError, match=r"lost|free or evictable"):
        check(lambda events, outputs: AuditedReference(events, outputs, broken), WORKLOAD)


def test_a_scheduler_that_names_no_pool_fails() -> None:
    class Poolless(AuditedReference):
        @property
        def pools(self) -> Sequence[AuditedPool]:
            return ()

    with pytest.raises(ConformanceError, match="at least one pool"):
        POOL_INVARIANT_CHECKS[0](Poolless, WORKLOAD)
