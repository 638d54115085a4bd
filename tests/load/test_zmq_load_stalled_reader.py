"""A reader that is stopped at any point never takes the samples of that time for the present load."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_components.load.load_stat import LoadStat, to_load_stat
from scheduler_components.load.zmq_load import ZmqLoadReader
from scheduler_components.values import LoadSnapshot

STALL_S = 0.5
STEP_S = 0.01
KEPT = 40
"""Samples that fit between a publisher and a reader that does not read; further ones are dropped."""


@dataclass
class StalledConnection:
    """Connections to a publisher that sends at each step, and one stop of this process before ``stop_at``."""

    stop_at: int
    stop_s: float
    now_s: float = 0.0
    num_steps: int = 0
    sent_s: list[float] = field(default_factory=list)
    waiting: deque[LoadStat] = field(default_factory=deque)
    continued_s: float = float("inf")

    def step(self, num_sent: int = 1) -> None:
        if self.num_steps == self.stop_at:
            for _ in range(round(self.stop_s / STEP_S)):
                self.send()
            self.continued_s = self.now_s
        self.num_steps += 1
        for _ in range(num_sent):
            self.send()

    def send(self) -> None:
        self.now_s += STEP_S
        load = to_load_stat(LoadSnapshot(), sequence=len(self.sent_s), epoch=1)
        self.sent_s.append(self.now_s)
        if len(self.waiting) < KEPT:
            self.waiting.append(load)

    def receive(self, timeout_s: float, limit: int) -> list[LoadStat]:
        self.step()
        found = []
        while self.waiting and len(found) < limit:
            self.step(num_sent=0)  # a reader is quicker than a publisher
            found.append(self.waiting.popleft())
        return found

    def reopen(self) -> None:
        self.step()
        self.waiting.clear()
        self.step()

    def clock(self) -> float:
        self.step()
        return self.now_s


@given(
    stop_at=st.integers(0, 200),
    stop_s=st.sampled_from([0.2, 0.8, 1.5, 30.0]),
    timeout_s=st.sampled_from([0.0, 5.0]),
)
@example(stop_at=2, stop_s=1.5, timeout_s=0.0)  # between the first dialing and the first look
def test_no_sample_is_older_than_a_stall_when_it_is_taken(stop_at: int, stop_s: float, timeout_s: float) -> None:
    world = StalledConnection(stop_at, stop_s)
    connections: Any = world
    opened_s = world.clock()
    world.reopen()
    reader = ZmqLoadReader(reports=connections, opened_s=opened_s, stall_s=STALL_S, clock=world.clock)
    taken = -1
    while world.num_steps < 300:
        for sample in reader.read(timeout_s).samples.values():
            age_s = sample.received_s - world.sent_s[sample.stat.sequence]
            taken = sample.stat.sequence
            assert age_s <= 1.5 * STALL_S, f"sample {taken} was sent {age_s} s before it was taken"
    assert taken >= 0
    assert world.sent_s[taken] > world.continued_s
