"""The scheduler of the benchmark of policies has 64 running requests under every policy."""

from __future__ import annotations

import pytest

from benchmarks.bench_policies import SteadyScheduler
from benchmarks.policy_workload import NUM_ADMITTED, NUM_RUNNING
from scheduler_components.scheduling.scheduling_policy import POLICY_NAMES


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_is_timed(policy: str) -> None:
    scheduler = SteadyScheduler(policy, 2)
    try:
        batch_us, _ = scheduler.costs_us(2)
        num_running = scheduler.num_running
    finally:
        scheduler.close()
    assert batch_us > 0
    assert NUM_RUNNING - NUM_ADMITTED <= num_running <= NUM_RUNNING
