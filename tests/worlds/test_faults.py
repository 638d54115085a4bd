"""Links: nothing vanishes without a count, and the time line brings messages in order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from worlds import DiskFaults, FaultyDisk, FaultyLink, LinkFault, LinkQuality, TimedLink, Timeline
from worlds.faults import WriteFate

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


def disk(seed: int = 0, **faults: float) -> FaultyDisk:
    return FaultyDisk(random=random.Random(seed), faults=DiskFaults(**faults))


@given(
    seed=st.integers(0, 1_000),
    steps=st.lists(st.sampled_from(["write", "crash"]), max_size=30),
    lies=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_file_has_its_newest_write_or_the_disk_says_what_became_of_it(
    seed: int, steps: list[str], lies: float
) -> None:
    it = disk(seed, lies=lies, lost=0.5, torn=0.5)
    written: list[bytes | None] = [None]
    for number, step in enumerate(steps):
        if step == "write":
            written.append(b"content %d" % number)
            before, content = it.read("file"), written[-1]
            it.write("file", content or b"")
        else:
            it.crash()
        found, fate = it.read("file"), it.fate("file")
        if fate is WriteFate.KEPT:
            assert found == written[-1]
        elif fate is WriteFate.LOST:
            assert found == before, "the write before the lost one"
        else:
            assert found is not None and content is not None and content.startswith(found) and found != content
    assert lies or not it.counters
