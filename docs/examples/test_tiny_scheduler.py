"""The property suite of the tiny scheduler: the kit's checks, on a fixed workload and on every one Hypothesis makes."""

import pytest
from hypothesis import given, settings
from tiny_scheduler import PAGE_SIZE, TinyScheduler

from scheduler_components.testing import SCHEDULER_CHECKS, PagedModel
from scheduler_components.testing.interfaces import MIN_POOL_TOKENS
from scheduler_components.testing.strategies import workloads


def open_scheduler(events, outputs):
    return TinyScheduler(events, outputs, PagedModel(PAGE_SIZE).forward, capacity_tokens=MIN_POOL_TOKENS)


@pytest.mark.parametrize("check", SCHEDULER_CHECKS)
def test_it_serves_the_kits_workload(check):
    check(open_scheduler)


@settings(deadline=None, max_examples=20)
@given(workload=workloads())
def test_it_serves_any_workload(workload):
    for check in SCHEDULER_CHECKS:
        check(open_scheduler, workload)
