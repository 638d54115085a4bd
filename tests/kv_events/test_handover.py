"""What publish() leaves to the thread, and when the thread works.

Property: with a thread that never runs, few batches wait, and open answers get a share of the time.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import numbered_batch

from scheduler_components.kv_events import BatchEncoder, EventStream
from scheduler_components.kv_events.backlog import MAX_WAIT_S, MAX_WAITING
from scheduler_components.kv_events.handover import PAUSE_S, PUBLISH_S, Handover
from scheduler_components.kv_events.live_sender import HEAVY_BYTES, LiveSender
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import encode_plain_request

ASLEEP = math.inf


class Bench:
    """A publisher without sockets and without a thread."""

    def __init__(self, *, is_inline: bool = False) -> None:
        stream, encoder = EventStream(epoch=bytes(16), max_steps=9, max_bytes=10**6), BatchEncoder("array")
        self.sessions = ReplaySessions(stream, encoder=encoder, rank=0)
        self.live = LiveSender(lambda _: True, topic=b"", encoder=encoder, stream=stream, rank=0, max_pending=100)
        self.handover = Handover(self.live, self.sessions, max_waiting=100, is_inline=is_inline)

    def may_wait(self, now_s: float, due_s: float = ASLEEP) -> bool:
        self.handover.is_active = True
        self.live.pending.append(numbered_batch(0))
        return self.handover.may_wait(now_s, due_s)

    def ask(self) -> None:
        self.sessions.receive((b"a", b"", encode_plain_request(0)))


def test_a_thread_that_was_late_or_is_overdue_is_not_counted_on() -> None:
    it = Bench()
    assert it.handover.is_thread_prompt(10.0, ASLEEP)
    assert it.handover.is_thread_prompt(10.0, 9.9975) and not it.handover.is_thread_prompt(10.0, 9.9965)
    it.handover.pause_s(10.0, 0.004, 10.0)
    assert not it.handover.is_thread_prompt(10.9, ASLEEP) and it.handover.is_thread_prompt(11.0, ASLEEP)
    it.handover.pause_s(11.0, 0.002, 10.0)
    assert it.handover.is_thread_prompt(11.0, ASLEEP)


def test_a_heavy_batch_does_not_wait_for_a_late_thread() -> None:
    for payload_bytes, expected in ((HEAVY_BYTES - 1, True), (HEAVY_BYTES, False)):
        it = Bench()
        it.live.payload_bytes = payload_bytes
        it.may_wait(1.0)
        it.live.pending.clear()
        assert it.may_wait(1.001)
        it.live.pending.clear()
        it.handover.pause_s(1.001, 1.0, 1.0)
        assert it.may_wait(1.002) is expected


@settings(max_examples=50, deadline=None)
@given(gaps_s=st.lists(st.floats(1e-5, 0.02), min_size=1, max_size=80))
def test_without_a_thread_few_batches_wait_and_an_answer_gets_its_share(gaps_s: list[float]) -> None:
    it, now_s, served_s = Bench(), 1.0, 0.0
    it.ask()
    for gap_s in gaps_s:
        now_s += gap_s
        replay_s = it.handover.replay_s(now_s, 1.0)
        served_s += replay_s
        assert replay_s == 0.0 or 50e-6 <= replay_s <= 0.005
        if not it.may_wait(now_s, 1.0):
            it.live.send_pending(0.0)
        assert len(it.live.pending) < MAX_WAITING
    assert served_s <= 0.1 * (now_s - 1.0) + 0.005
    assert served_s > 0.0 or now_s < 1.0 + 0.0031


def test_a_prompt_thread_serves_the_answers_alone() -> None:
    it = Bench()
    assert it.handover.replay_s(1.0, 0.9) == 0.0, "no answer is open"
    it.ask()
    assert it.handover.replay_s(1.0, 0.9999) == it.handover.replay_s(1.0, ASLEEP) == 0.0
    assert it.handover.replay_s(1.0, 0.9) == 0.005
    assert it.handover.replay_s(1.0001, 0.9) == 0.0, "a call just did"
    inline = Bench(is_inline=True)
    inline.ask()
    assert inline.handover.replay_s(1.0, ASLEEP) == 0.005


def test_the_thread_leaves_the_work_to_a_scheduler_that_idles() -> None:
    it = Bench()
    it.handover.drained_at_s = 1.0
    assert it.handover.pause_s(1.001, 0.0, 1.0) == pytest.approx(0.004)
    assert it.handover.pause_s(1.006, 0.0, 1.0) == 0.0
    it.may_wait(1.006)
    assert it.handover.pause_s(1.007, 0.0, 1.0) == 0.0, "the scheduler publishes and leaves its batches to the thread"


def test_a_late_thread_interrupts_no_step_unless_a_client_waits() -> None:
    it = Bench()
    it.may_wait(1.0)
    assert it.handover.pause_s(1.001, 0.01, 1.0) > 0.0
    assert it.handover.pause_s(1.001, 0.01, 0.9) == 0.0, "requests have not been received for long"
    assert it.handover.pause_s(1.0 + MAX_WAIT_S, 0.01, 1.0) == 0.0, "the scheduler has stopped calling"
    it.ask()
    assert it.handover.pause_s(1.001, 0.01, 1.0) == 0.0


@pytest.mark.parametrize(("late_s", "slice_s"), [(0.0, 0.0003), (0.002, 0.0005), (1.0, 0.001)])
def test_a_slice_is_a_share_of_the_time_that_the_thread_waited(late_s: float, slice_s: float) -> None:
    assert Bench().handover.slice_s(late_s) == slice_s > PUBLISH_S


def test_the_thread_polls_while_there_is_work_and_sleeps_when_there_is_none() -> None:
    it = Bench()

    def next_poll_s(now_s: float, *, unfinished: bool = False) -> float:
        return it.handover.next_poll_s(now_s, was_busy_at_s=None, unfinished=unfinished)

    assert next_poll_s(1.0) == ASLEEP
    assert it.handover.next_poll_s(1.0, was_busy_at_s=1.0, unfinished=False) == 0.008, "a request may follow"
    assert next_poll_s(1.6) == ASLEEP
    assert next_poll_s(1.6, unfinished=True) == PAUSE_S
    it.may_wait(2.0)
    assert next_poll_s(2.0) == pytest.approx(0.003)
    it.live.pending.clear()
    assert next_poll_s(2.01) == pytest.approx(0.003), "the next batch is probable"
    assert next_poll_s(2.03) == ASLEEP
    it.ask()
    assert next_poll_s(2.03) == pytest.approx(0.003)
    it.handover.is_active = False
    assert next_poll_s(2.03) == 0.008
    it.sessions.on_full(b"a", 2.03)
    assert next_poll_s(5.0) == 0.5, "a stuck client"
    for _ in range(MAX_WAITING - 1):
        it.may_wait(6.0)
    assert next_poll_s(6.0) == pytest.approx(0.003)
    it.may_wait(6.0)
    assert next_poll_s(6.0) == PAUSE_S, "publish() found the sockets in use"
