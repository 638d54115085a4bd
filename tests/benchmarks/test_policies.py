"""The scheduler of the benchmark of policies takes steps under every policy."""

from __future__ import annotations

import pytest

from benchmarks.bench_policies import SteadyScheduler
from scheduler_components.scheduling_policy import POLICY_NAMES


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_is_timed(policy: str) -> None:
    scheduler = SteadyScheduler(policy, 2)
    try:
        batch_us, _ = scheduler.costs_us(2)
    finally:
        scheduler.close()
    assert batch_us > 0
