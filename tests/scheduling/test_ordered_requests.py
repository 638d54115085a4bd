"""Orders of waiting requests: keys, lazy reading, removal while reading, first steps and turns of matches."""

from __future__ import annotations

import tracemalloc
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.scheduling.ordered_requests import (
    CachedLengths,
    FirstSteps,
    KeyedHeap,
    OrderedRequests,
    RequestGroups,
    WaitLimit,
)
from scheduler_components.testing.policy_checks import PolicyRequest


def request(arrival: int, cached: int = 0) -> PolicyRequest:
    return PolicyRequest(rid=f"r{arrival}", arrival=arrival, num_cached_tokens=cached)


CHANGES = st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(-2, 2)), max_size=60)
"""Puts of a number with a key, and discards (None)."""


@settings(max_examples=60)
@given(changes=CHANGES, count=st.integers(0, 10))
def test_a_heap_reads_like_a_sorted_list(changes: list[tuple[int, int | None]], count: int) -> None:
    heap, model = KeyedHeap[str](), dict[int, int]()
    for number, key in changes:
        if key is None:
            assert heap.discard(number) == (model.pop(number, None) is not None)
        else:
            heap.put(number, f"item {number}", (key,))
            model[number] = key
        expected = [f"item {number}" for number in sorted(model, key=lambda number: (model[number], number))]
        assert list(islice(heap, count)) == expected[:count]
        assert heap.first() == next(iter(expected), None)
        assert len(heap) == len(model)
    assert list(heap) == expected if changes else not list(heap)


def test_items_may_be_discarded_while_they_are_read() -> None:
    heap = KeyedHeap[int]()
    for number in range(200):
        heap.put(number, number, (number * 7 % 11,))
    read = []
    for number in heap:
        read.append(number)
        heap.discard(number)
        heap.discard((number + 100) % 200)
    assert sorted(read) == sorted({*read})
    assert {number % 100 for number in read} == set(range(100))
    assert len(heap) == 0
    assert list(heap) == []


def test_entries_of_discarded_items_do_not_pile_up() -> None:
    """A request that is preempted often, or whose cached length changes in each step, leaves no trail."""
    heap = KeyedHeap[int]()
    heap.put(0, 0, (-1,))
    tracemalloc.start()
    for turn in range(20_000):
        heap.put(1, 1, (turn % 100,))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 50_000


@pytest.mark.parametrize("part", [float("nan"), "a", None, (1,), [1]])
def test_a_key_that_is_not_a_number_is_refused_and_changes_nothing(part: float) -> None:
    ordered = OrderedRequests[PolicyRequest]()
    ordered.put(request(1), 5)
    with pytest.raises(ConfigError, match=r"cannot order request 'r0'; give a number other than NaN"):
        ordered.put(request(0), 1, part)
    ordered.put(request(2), 4)
    assert [each.arrival for each in ordered] == [2, 1]


def test_infinite_keys_are_ordered() -> None:
    ordered = OrderedRequests[PolicyRequest]()
    for arrival, key in enumerate((float("inf"), 3, float("-inf"), True, float("inf"))):
        ordered.put(request(arrival), key)
    assert [each.arrival for each in ordered] == [2, 3, 1, 0, 4]


def test_two_requests_with_one_arrival_are_refused() -> None:
    ordered = OrderedRequests[PolicyRequest]()
    first = request(3)
    ordered.put(first)
    ordered.put(first)
    with pytest.raises(ConfigError, match=r"arrival=3: is the arrival of two waiting requests, 'r3' and 'r3'"):
        ordered.put(request(3))
    assert list(ordered) == [first]


def test_a_request_keeps_the_step_in_which_it_first_began_to_wait() -> None:
    steps = FirstSteps()
    for arrival, step in ((0, 4), (3, 9), (1, 9), (2, 9), (4, 9), (7, 12), (0, 20), (5, 20)):
        steps.add(arrival, step)
    assert [steps.step_of(arrival) for arrival in (0, 1, 2, 3, 4, 7)] == [4, 9, 9, 9, 9, 12]


def test_first_steps_are_kept_for_a_bounded_time() -> None:
    steps = FirstSteps()
    for number in range(40_000):
        steps.add(number, number)
    assert steps.step_of(39_999) == 39_999
    assert steps.step_of(32_000) == 32_000
    assert 20_000 < steps.step_of(0) < 32_000, "as of the earliest step kept"


def test_overdue_requests_are_in_order_of_arrival() -> None:
    limit = WaitLimit[PolicyRequest]()
    requests = [request(arrival) for arrival in range(5)]
    for each, step in zip(requests, (0, 0, 3, 4, 9), strict=True):
        limit.add(each, step)
    limit.discard(requests[1])
    assert [each.arrival for each in limit.overdue(9, 5)] == [0, 2, 3]
    limit.discard(requests[2])
    limit.add(requests[1], 9)
    assert [each.arrival for each in limit.overdue(9, 5)] == [0, 1, 3]


def test_each_request_has_its_turn() -> None:
    matched: list[int] = []

    def match_length(each: PolicyRequest) -> int:
        matched.append(each.arrival)
        return 10 * each.arrival

    lengths = CachedLengths(match_length, 3)
    requests = [request(arrival, cached=1) for arrival in range(5)]
    for each in requests:
        lengths.add(each)
    assert [(each.arrival, length) for each, length in lengths.match_next(1)] == [(4, 40), (3, 30), (2, 20)]
    assert list(lengths.match_next(1)) == []
    assert [lengths.length_of(each) for each in requests] == [1, 1, 20, 30, 40]
    lengths.discard(requests[1])
    lengths.discard(request(99))
    with pytest.raises(KeyError):
        lengths.length_of(requests[1])
    assert [each.arrival for each, _ in lengths.match_next(2)] == [0], "what has not changed is not reported"
    assert matched == [4, 3, 2, 0, 4, 3]
    lengths.discard(requests[4])
    lengths.add(requests[4])
    assert list(lengths.match_next(2)) == []
    assert lengths.length_of(requests[4]) == 1


def test_matches_left_in_a_step_go_to_requests_that_arrive_in_it() -> None:
    lengths = CachedLengths(lambda each: 10 * each.arrival, 3)
    lengths.add(request(1))
    assert [length for _, length in lengths.match_next(1)] == [10]
    lengths.add(request(2))
    assert [length for _, length in lengths.match_next(1)] == [20]


def test_groups_are_ordered_by_key_and_then_by_their_earliest_request() -> None:
    groups = RequestGroups[str, PolicyRequest]()
    requests = [request(arrival) for arrival in range(6)]
    for each, name in zip(requests, "cabcab", strict=True):
        groups.add(each, name)
    assert [group.name for group in groups.by_key()] == ["c", "a", "b"]
    groups.set_key("a", -1)
    groups.set_key("unknown", -5)
    assert [group.name for group in groups.by_key()] == ["a", "c", "b"]
    groups.discard(requests[0])
    groups.discard(requests[2])
    assert [(group.name, group.first_arrival) for group in groups.by_key()] == [("a", 1), ("c", 3), ("b", 5)]
    groups.add(requests[3], "b")
    assert [group.name for group in groups.by_key()] == ["a", "b"]
    assert not groups.has_requests("c")
    assert groups.get("c") is None
    assert len(groups) == 4
