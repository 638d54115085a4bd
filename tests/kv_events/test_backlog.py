"""The batches that publish() leaves to the thread.

Property: a call that must send is asked to, whenever batches are published and the thread runs; and none is sent early.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components.kv_events.backlog import MAX_WAIT_S, MAX_WAITING, POLL_INTERVAL_S, Backlog

GAPS_S = st.floats(0.0, 3 * MAX_WAIT_S) | st.sampled_from([0.0, 1e-6, MAX_WAIT_S, 60.0])
CALLS = st.tuples(GAPS_S, st.booleans(), st.booleans(), st.integers(0, 10))


@pytest.mark.soak
@settings(max_examples=num_examples(6))
@given(st.integers(1, 2 * MAX_WAITING), st.lists(CALLS, max_size=60))
@example(4, [(0.0, True, False, 0)] * 6)
def test_waiting_batches_are_bounded_in_number_and_age(
    max_queue_size: int, calls: list[tuple[float, bool, bool, int]]
) -> None:
    """A call: time since the last one, if the thread is prompt, if it owns the sockets, batches that it has sent."""
    backlog, now_s, last_s = Backlog(max_queue_size), 1_000.0, -60.0
    waiting: list[float] = []
    for gap_s, is_prompt, are_taken, num_sent in calls:
        now_s += gap_s
        del waiting[:num_sent]
        waiting.append(now_s)
        bounds = (
            len(waiting) < min(max_queue_size, MAX_WAITING),
            now_s - waiting[0] < MAX_WAIT_S,
            is_prompt or now_s - last_s < MAX_WAIT_S,
        )
        may_wait = backlog.may_wait(now_s, len(waiting), is_prompt=is_prompt)
        assert may_wait == all(bounds)
        if may_wait:
            assert backlog.oldest_at_s(len(waiting)) == waiting[0]
        elif not are_taken:
            waiting.clear()
        last_s = now_s


@given(st.integers(1, 20), st.integers(0, 7))
def test_an_unrecorded_batch_is_too_old_to_wait(num_noted: int, num_unknown: int) -> None:
    """Batches that wait for ``idle()`` are not recorded, so their age is unknown."""
    backlog = Backlog()
    for number in range(num_noted):
        assert backlog.may_wait(number * 1e-6, 1, is_prompt=True)
    if num_unknown > num_noted:
        assert not backlog.may_wait(1e-5, num_unknown + 1, is_prompt=True)


@given(st.lists(GAPS_S, max_size=20), st.booleans())
def test_inline_no_batch_waits(gaps_s: list[float], is_prompt: bool) -> None:
    backlog, now_s = Backlog(1), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        assert not backlog.may_wait(now_s, 1, is_prompt=is_prompt)


@given(st.floats(0.0001, 0.01), st.floats(0.0, 0.02), st.integers(0, 3), st.booleans())
def test_the_thread_polls_before_a_batch_is_too_old_and_pauses_for_the_scheduler(
    gap_s: float, since_s: float, num_waiting: int, is_heavy: bool
) -> None:
    backlog = Backlog()
    for number in range(3):
        backlog.may_wait(number * gap_s, 1, is_prompt=True)
    now_s = 2 * gap_s + since_s
    wait_s = backlog.next_poll_in_s(now_s, num_waiting, is_heavy=is_heavy)
    assert 0.0001 <= wait_s <= POLL_INTERVAL_S < MAX_WAIT_S
    if not is_heavy:
        oldest_s = (3 - num_waiting) * gap_s if num_waiting else now_s
        assert wait_s == pytest.approx(max(0.0001, oldest_s + POLL_INTERVAL_S - now_s))  # small ones are sent together
    elif since_s < gap_s - 0.0001:
        assert wait_s <= gap_s - since_s + 1e-9  # the poll is due when the next heavy one arrives
