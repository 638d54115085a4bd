"""A plain publisher answers as vLLM's and SGLang's do, and worlds with one keep the promises of plain readers."""

from __future__ import annotations

import random
from functools import partial

import pytest

from scheduler_components import BlockStored
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest, ReplayVerb
from worlds.faulty_disk import DiskFaults, FaultyDisk
from worlds.plain_publisher import RingAnswers
from worlds.publisher_actor import LiveFrame, PublisherShape
from worlds.publisher_process import ProcessShape, PublisherProcess
from worlds.timeline import Timeline
from worlds.world_counters import WorldCounters


class Client:
    """A client with a queue of a few messages."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.messages: list[tuple[bytes, ...]] = []

    def on_frame(self, frame: LiveFrame) -> None: ...

    def can_take(self, _: bytes) -> bool:
        return len(self.messages) < self.capacity

    def take(self, _: bytes, message: tuple[bytes, ...]) -> None:
        self.messages.append(message)

    def on_publisher_gone(self) -> None: ...


@pytest.fixture
def process() -> PublisherProcess:
    shape = ProcessShape(publisher=PublisherShape(window=4, max_pending=1), calls_idle=True)
    disk = FaultyDisk(random=random.Random(1), faults=DiskFaults())
    process = PublisherProcess(
        Timeline(seed=1), shape, disk=disk, counters=WorldCounters(), make_answers=partial(RingAnswers, size=4)
    )
    for block in range(6):
        process.publish((BlockStored((block,), None, (block,), 1, None),))
    return process


def answered(process: PublisherProcess, request: ReplayRequest, *, capacity: int = 100) -> list[int]:
    client = Client(capacity)
    process.receive(b"client", request, client, has_extension=False)
    return [int.from_bytes(message[-2], "big", signed=True) for message in client.messages]


def test_answers_from_the_ring_and_ends_with_a_marker(process: PublisherProcess) -> None:
    end = int.from_bytes(END_SEQ, "big", signed=True)
    assert answered(process, ReplayRequest(4)) == [4, 5, end]
    assert answered(process, ReplayRequest(0)) == [2, 3, 4, 5, end]
    assert answered(process, ReplayRequest(9)) == [end]


def test_reads_an_extended_request_as_a_very_large_number(process: PublisherProcess) -> None:
    assert answered(process, ReplayRequest(0, ReplayVerb.SNAPSHOT, b"t" * 12, b"e" * 16)) == [-1]


def test_drops_what_a_client_cannot_take(process: PublisherProcess) -> None:
    assert answered(process, ReplayRequest(0), capacity=3) == [2, 3, 4]


def test_a_restart_empties_the_ring_and_begins_at_0(process: PublisherProcess) -> None:
    process.crash(is_clean=False)
    assert answered(process, ReplayRequest(0)) == []
    process.restart(skew_s=0.0)
    assert answered(process, ReplayRequest(0)) == [-1]
    process.publish((BlockStored((1,), None, (1,), 1, None),))
    assert answered(process, ReplayRequest(0)) == [0, -1]
