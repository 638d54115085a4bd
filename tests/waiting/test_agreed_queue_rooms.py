"""WaitingRooms: a request leaves when all rooms have let it go, or when one has failed or expired, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.waiting_room import ListedRoom

from scheduler_components import ConfigError
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.errors import QueueFullError
from scheduler_components.values import AgreedQueueStats
from scheduler_components.waiting.agreed_queue import WaitingRooms


@dataclass(frozen=True)
class Guest:
    rid: str
    rooms: frozenset[int] = frozenset((0, 1))


class TwoRooms:
    """Two rooms of one rank, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.each = [ListedRoom[Guest](name, lambda guest, at=at: at in guest.rooms) for at, name in enumerate("ab")]  # type: ignore[misc]
        self.rooms = WaitingRooms[Guest](rooms=self.each)
        self._agreement = StepAgreement(parts=self.each, clock=lambda: self.now_s)
        self._step = 0

    def step(self) -> list[tuple[str, str, str]]:
        self._step += 1
        self._agreement.step(self._step)
        departures = self.rooms.pop_departures()
        for each in departures:
            if each.reason != "ready":
                self.rooms.end(each.item)
        return [(each.rid, each.reason, each.problem) for each in departures]


def test_a_request_leaves_when_every_room_that_it_entered_has_let_it_go() -> None:
    it = TwoRooms()
    assert it.rooms.enter(Guest("both"))
    assert it.rooms.enter(Guest("one", frozenset((1,))))
    assert not it.rooms.enter(Guest("none", frozenset()))
    it.each[1].report_ready(["both", "one"])
    assert it.step() == [("one", "ready", "")]
    assert len(it.rooms) == 1
    it.each[0].report_ready(["both"])
    assert it.step() == [("both", "ready", "")]
    assert not len(it.rooms)
    assert it.step() == []


@pytest.mark.parametrize("is_ready_in_the_other", [False, True])
def test_a_failure_in_one_room_ends_the_wait_in_all(is_ready_in_the_other: bool) -> None:
    it = TwoRooms()
    it.rooms.enter(Guest("g"))
    it.each[0].queue.on_failed("g", "no such schema")
    if is_ready_in_the_other:
        it.each[1].queue.on_ready("g")
    assert it.step() == [("g", "failed", "a: no such schema")]
    assert [each.ended for each in it.each] == [["g"], ["g"]]
    assert not len(it.each[1].queue)
    assert it.step() == []


def test_a_limit_names_its_room() -> None:
    it = TwoRooms()
    it.rooms.enter(Guest("g"))
    assert it.step() == []
    assert it.rooms.next_deadline_s == 100.0
    it.now_s = 100.0
    assert it.step() == [("g", "expired", "a: waited longer than 100 s")]
    assert WaitingRooms[Guest]().next_deadline_s == float("inf")


def test_a_refusal_by_one_room_leaves_none_of_them_waiting() -> None:
    it = TwoRooms()

    def refuse(guest: Guest) -> bool:
        raise ConfigError("lora", "x", "is not an adapter", "load it first")

    it.each[1].wants = refuse
    with pytest.raises(ConfigError, match="is not an adapter"):
        it.rooms.enter(Guest("g"))
    assert not len(it.rooms)
    assert [len(each.queue) for each in it.each] == [0, 0]
    it.each[1].wants, it.each[1].queue.max_waiting = lambda _: True, 0
    with pytest.raises(QueueFullError, match="queue 'b' holds 0 requests, which is its limit; try again later"):
        it.rooms.enter(Guest("g"))
    assert [len(each.queue) for each in it.each] == [0, 0]


def test_an_ended_request_leaves_no_room() -> None:
    it = TwoRooms()
    guest = Guest("g")
    it.rooms.enter(guest)
    it.each[0].report_ready(["g"])
    it.step()
    for _ in range(2):
        it.rooms.end(guest)
    it.each[1].report_ready(["g"])
    assert it.step() == []
    assert not len(it.rooms)
    assert it.rooms.stats() == AgreedQueueStats(ready=1, cancelled=1, unknown=1)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "ready", "failed", "end"]), st.sampled_from("abcd"), st.integers(0, 1)),
    max_size=30,
)


@given(ACTIONS)
def test_each_request_that_enters_leaves_once(actions: Sequence[tuple[str, str, int]]) -> None:
    it, inside = TwoRooms(), dict[str, Guest]()
    for verb, rid, at in actions:
        if verb == "enter" and rid not in inside:
            inside[rid] = Guest(rid)
            assert it.rooms.enter(inside[rid])
        elif verb == "end" and rid in inside:
            it.rooms.end(inside.pop(rid))
        elif verb == "ready":
            it.each[at].report_ready([rid])
        elif verb == "failed":
            it.each[at].queue.on_failed(rid, "failed")
        for left, _, _ in it.step():
            del inside[left]
        assert len(it.rooms) == len(inside)
        assert {guest.rid for room in it.each for guest in room.queue} == set(inside)
    it.now_s = 1e6
    it.step()  # a wait is counted from the first agreement
    it.now_s = 2e6
    it.step()
    assert not len(it.rooms)
