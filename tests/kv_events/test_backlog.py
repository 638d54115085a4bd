"""The batches that publish() leaves to the thread.

Property: after each call that finds the sockets free, the waiting batches are bounded in number, cost and age, whenever
batches are published and the thread runs; and none is sent early.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import stored

from scheduler_components import AllBlocksCleared, BlockRemoved, EventBatch
from scheduler_components.kv_events.backlog import (
    MAX_WAIT_S,
    MAX_WAITING,
    MAX_WAITING_COST,
    POLL_INTERVAL_S,
    Backlog,
    InlineBacklog,
    batch_cost,
)

GAPS_S = st.floats(0.0, 3 * MAX_WAIT_S) | st.sampled_from([0.0, 1e-6, MAX_WAIT_S, 60.0])
COSTS = st.floats(0.0, 2.0 * MAX_WAITING_COST) | st.sampled_from([17.0, 90.0, float(MAX_WAITING_COST)])
CALLS = st.tuples(GAPS_S, COSTS, st.booleans(), st.booleans(), st.integers(0, 10))


@settings(max_examples=300)
@given(st.integers(1, 2 * MAX_WAITING), st.lists(CALLS, max_size=60))
def test_waiting_batches_are_bounded_in_number_cost_and_age(
    max_queue_size: int, calls: list[tuple[float, float, bool, bool, int]]
) -> None:
    """A call: time since the last one, cost, whether the thread is prompt, whether it owns the sockets, batches it has
    sent.
    """
    backlog, now_s, last_s = Backlog(max_queue_size), 1_000.0, -60.0
    waiting: list[tuple[float, float]] = []
    for gap_s, cost, is_prompt, are_taken, num_sent in calls:
        now_s += gap_s
        del waiting[:num_sent]
        backlog.is_prompt = is_prompt
        waiting.append((now_s, cost))
        bounds = (
            len(waiting) < min(max_queue_size, MAX_WAITING),
            sum(each for _, each in waiting) < MAX_WAITING_COST - 1e-6,
            now_s - waiting[0][0] < MAX_WAIT_S,
            is_prompt or now_s - last_s < MAX_WAIT_S,
        )
        is_at_the_edge = abs(sum(each for _, each in waiting) - MAX_WAITING_COST) < 1e-3
        may_wait = backlog.may_wait(cost, now_s, len(waiting))
        assert may_wait == all(bounds) or is_at_the_edge
        if may_wait:
            assert backlog.oldest_at_s(len(waiting)) == waiting[0][0]
        elif not are_taken:
            waiting.clear()
        last_s = now_s


@given(st.integers(1, 20), st.integers(0, 7))
def test_an_unrecorded_batch_is_too_old_to_wait(num_noted: int, num_unknown: int) -> None:
    """Batches that wait for ``idle()`` are not recorded, so their age is unknown."""
    backlog = Backlog()
    for number in range(num_noted):
        assert backlog.may_wait(1.0, number * 1e-6, 1)
    if num_unknown > num_noted:
        assert not backlog.may_wait(1.0, 1e-5, num_unknown + 1)


@given(st.lists(st.floats(0.0, 0.001), max_size=50))
def test_inline_only_a_burst_waits_for_its_group(gaps_s: list[float]) -> None:
    bursts, now_s, num_close, num_waiting = InlineBacklog(), 0.0, 0, 0
    for gap_s in gaps_s:
        last_s, now_s = now_s, now_s + gap_s
        num_close = num_close + 1 if num_close and now_s - last_s <= 0.0001 else 1
        num_waiting += 1
        if not bursts.may_wait(17.0, now_s, num_waiting):
            num_waiting = 0
        assert num_waiting < MAX_WAITING
        assert not num_waiting or num_close > MAX_WAITING


class EngineStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """A stored event as an engine declares it."""

    block_hashes: list[int]
    token_ids: list[int]


@pytest.mark.parametrize(
    ("dearer", "cheaper"),
    [
        ((stored(1, block_size=8_192),), (stored(1, block_size=16),)),
        ((stored(1, block_size=16),) * 64, (stored(1, block_size=16),)),
        ((BlockRemoved((1,)), stored(1, block_size=8_192)), (BlockRemoved((1,)), BlockRemoved((1,)))),
        ((AllBlocksCleared(),), ()),
        ([EngineStored([1], [1] * 8_192)], [EngineStored([1], [1] * 16)]),
        ((msgspec.Raw(b"\x90"),) * 2, (msgspec.Raw(b"\x90"),)),
    ],
    ids=["tokens", "events", "kinds", "none", "an engine's own", "raw"],
)
def test_a_batch_costs_by_its_events_and_their_tokens(dearer: Any, cheaper: Any) -> None:
    assert batch_cost(EventBatch(1.0, dearer)) > batch_cost(EventBatch(1.0, cheaper)) > 0


@pytest.mark.parametrize("junk", [None, object(), EventBatch(1.0, None), EventBatch(1.0, 5)])  # type: ignore[arg-type]
def test_an_object_that_is_no_batch_is_sent_immediately(junk: Any) -> None:
    assert batch_cost(junk) >= MAX_WAITING_COST


@given(st.floats(0.0001, 0.01), st.floats(0.0, 0.02), st.sampled_from([17.0, 90.0, 1_000.0]))
def test_the_thread_polls_before_a_batch_is_too_old_and_pauses_for_the_scheduler(
    gap_s: float, since_s: float, cost: float
) -> None:
    backlog = Backlog()
    for number in range(3):
        backlog.may_wait(cost, number * gap_s, 1)
    wait_s = backlog.next_poll_in_s(2 * gap_s + since_s)
    assert 0.0001 <= wait_s <= POLL_INTERVAL_S < MAX_WAIT_S
    if cost < MAX_WAITING_COST / MAX_WAITING:
        assert wait_s == POLL_INTERVAL_S  # several small ones are sent together
    elif since_s < gap_s - 0.0001:
        assert wait_s <= gap_s - since_s + 1e-9  # the poll is due when the next large one arrives
