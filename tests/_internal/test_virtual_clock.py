"""VirtualClock and EventHeap: time in integers, and an order that depends on the pushes alone."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components._internal.virtual_clock import EventHeap, VirtualClock, nanoseconds


def test_the_clock_is_in_seconds() -> None:
    clock = VirtualClock()
    assert clock() == 0.0
    clock.now_ns = 1_500_000_000
    assert clock() == 1.5
    clock.advance(0.25)
    assert (clock.now_s, clock.now_ns) == (1.75, 1_750_000_000)
    clock.now_s = 0.1 + 0.2  # rounded to nanoseconds
    assert clock() == 0.3 == VirtualClock(0.3)() == VirtualClock(now_ns=300_000_000)()
    assert (nanoseconds(1.5), nanoseconds(1.4e-9), nanoseconds(1.6e-9)) == (1_500_000_000, 1, 2)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30))
def test_events_come_by_time_then_order_then_number(pushes: list[tuple[int, int]]) -> None:
    heap, seen = EventHeap(), list[int]()
    for number, (time_ns, order) in enumerate(pushes):
        heap.push(time_ns, partial(seen.append, number), order=order)
    times = []
    while len(heap):
        heap.pop()()
        times.append(heap.now_ns)
    assert seen == sorted(range(len(pushes)), key=lambda number: (*pushes[number], number))
    assert times == sorted(time_ns for time_ns, _ in pushes)


def test_an_event_in_the_past_happens_now() -> None:
    heap, seen = EventHeap(), list[str]()
    heap.push(nanoseconds(1.0), lambda: heap.push(0, lambda: seen.append("late")))
    while len(heap):
        heap.pop()()
    assert (seen, heap.now_ns) == (["late"], 1_000_000_000)


def test_an_empty_heap_has_no_next_event() -> None:
    with pytest.raises(IndexError):
        EventHeap().pop()
