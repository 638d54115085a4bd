"""Links: nothing vanishes without a count, and the time line brings messages in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError
from worlds import PERFECT, FaultyLink, LinkFault, LinkQuality, TimedLink, Timeline

STEPS = st.lists(st.sampled_from(["send", "send", "cut", *LinkFault]), max_size=40)


@given(steps=STEPS, capacity=st.sampled_from([None, 1, 3]))
def test_every_message_is_counted(steps: list[str], capacity: int | None) -> None:
    link: FaultyLink[int] = FaultyLink(capacity=capacity)
    arrived = list[int]()
    for number, step in enumerate(steps):
        if step == "send":
            link.send(number)
        elif step == "cut":
            link.cut()
        elif (message := link.deliver(LinkFault(step))) is not None:
            arrived.append(message)
    counters = link.counters
    assert counters.sent + counters.overflowed == steps.count("send")
    assert counters.sent + counters.repeated == counters.arrived + counters.lost + counters.cut + len(link.in_transit)
    assert counters.arrived == len(arrived)
    if not counters.reordered:
        assert arrived == sorted(arrived)
    if capacity is not None:
        assert len(link.in_transit) <= capacity


class Receiver:
    """Notes what arrives, and when."""

    def __init__(self, quality: LinkQuality, seed: int = 0) -> None:
        self.timeline = Timeline(seed=seed)
        self.arrived: list[tuple[float, int]] = []
        self.faults: list[tuple[LinkFault, int]] = []
        self.link: TimedLink[int] = TimedLink(
            self.timeline, quality, self.receive, on_fault=lambda fault, message: self.faults.append((fault, message))
        )

    def receive(self, message: int) -> None:
        self.arrived.append((self.timeline.now_s, message))


def test_messages_arrive_in_order_after_latency_and_jitter() -> None:
    it = Receiver(LinkQuality(latency_s=0.1, jitter_s=0.05))
    for number in range(20):
        it.timeline.after(0.001 * number, lambda number=number: it.link.send(number))  # type: ignore[misc]
    it.timeline.run_until(1.0)
    assert [number for _, number in it.arrived] == list(range(20))
    assert all(0.1 <= time_s - 0.001 * number <= 0.17 for time_s, number in it.arrived)
    assert it.faults == []


def test_each_fault_is_reported_with_its_message() -> None:
    it = Receiver(LinkQuality(latency_s=0.0, loss=0.2, duplication=0.2, reordering=0.2))
    for number in range(300):
        it.link.send(number)
    it.timeline.run_until(1.0)
    counters = it.link.link.counters
    kinds = [fault for fault, _ in it.faults]
    assert (kinds.count(LinkFault.LOSE), kinds.count(LinkFault.REPEAT)) == (counters.lost, counters.repeated)
    assert kinds.count(LinkFault.REORDER) == counters.reordered
    assert min(counters.lost, counters.repeated, counters.reordered) > 20
    lost = {number for fault, number in it.faults if fault is LinkFault.LOSE}
    repeated = {number for fault, number in it.faults if fault is LinkFault.REPEAT}
    assert {number for _, number in it.arrived} >= set(range(300)) - lost
    assert all([number for _, number in it.arrived].count(each) > 1 for each in repeated - lost)


def test_nothing_arrives_after_a_cut() -> None:
    it = Receiver(PERFECT)
    it.link.send(1)
    it.link.cut()
    assert not it.link.send(2)
    it.timeline.run_until(1.0)
    assert it.arrived == []
    assert it.link.link.counters.cut == 1


def test_a_full_link_refuses() -> None:
    it = Receiver(LinkQuality(capacity=1))
    assert (it.link.send(1), it.link.send(2)) == (True, False)


def test_a_negative_probability_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss.*is not a probability"):
        LinkQuality(loss=-0.1)
