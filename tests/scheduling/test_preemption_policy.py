"""Which request each policy selects, and that ties go to the latest arrival."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.scheduling.preemption_policy import (
    PREEMPTION_POLICY_NAMES,
    LatestArrival,
    LeastRecomputation,
    LongestRemaining,
    LowestPriority,
    make_preemption_policy,
)
from scheduler_components.testing.batcher_session import CheckedRequest
from scheduler_components.values import RequestHints


def running(arrival: int, *, computed: int = 0, priority: int = 0, left: int = 1) -> CheckedRequest:
    request = CheckedRequest(f"r{arrival}", [1], left, RequestHints(priority=priority))
    request.arrival, request.num_computed_tokens = arrival, computed
    return request


CANDIDATES = [
    running(1, computed=40, priority=-1, left=9),
    running(2, computed=8, priority=3, left=5),
    running(5, computed=90, priority=0, left=20),
    running(7, computed=30, priority=2, left=1),
]


@pytest.mark.parametrize(
    ("policy", "arrival"),
    [(LatestArrival(), 7), (LeastRecomputation(), 2), (LowestPriority(), 1), (LongestRemaining(), 5)],
)
def test_each_policy_selects_its_victim(policy: LatestArrival, arrival: int) -> None:
    assert policy.select_victim(CANDIDATES).arrival == arrival


@pytest.mark.parametrize("name", PREEMPTION_POLICY_NAMES)
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 2)), min_size=1, max_size=5))
def test_of_equal_requests_the_latest_arrival_is_preempted(name: str, rows: list[tuple[int, int, int]]) -> None:
    requests = [running(at, computed=row[0], priority=row[1], left=row[2]) for at, row in enumerate(rows)]
    victim = make_preemption_policy(name).select_victim(requests)
    assert victim in requests
    same = (victim.num_computed_tokens, victim.hints.priority, victim.num_output_tokens_left)
    later = [each for each in requests if each.arrival > victim.arrival]
    assert same not in [(each.num_computed_tokens, each.hints.priority, each.num_output_tokens_left) for each in later]


def test_an_unknown_name_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"preemption_policy='oldest': .* give one of latest-arrival, least-"):
        make_preemption_policy("oldest")
