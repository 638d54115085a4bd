"""Test that the strategies keep their bounds."""

from __future__ import annotations

from hypothesis import given, settings

from scheduler_components.testing.interfaces import Workload
from scheduler_components.testing.strategies import workloads


@settings(deadline=None)
@given(workload=workloads(max_requests=4, max_prompt_tokens=10, max_new_tokens=3, vocabulary=2))
def test_workloads_keep_their_bounds(workload: Workload) -> None:
    assert 1 <= len(workload) <= 4
    for prompt, new_tokens in workload:
        assert 1 <= len(prompt) <= 10
        assert set(prompt) <= {0, 1}
        assert 1 <= new_tokens <= 3
