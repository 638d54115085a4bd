"""A reader like llm-d's router (llm-d-router, September 2026), against real publishers with the guide's settings.

It reads exactly three frames, live and replayed, takes pod and model from the topic, and requests from 0.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import zmq
from kit.sockets import OpenSocket

from scheduler_components import KVEventBatch
from scheduler_components.kv_events import ZmqEventPublisher
from scheduler_components.testing.chain_event_generator import ChainEventGenerator

pytestmark = pytest.mark.sockets

Opened = Callable[..., ZmqEventPublisher]
TOPIC = "kv@10.0.0.7:8000@my-model"


class MalformedReplayError(Exception):
    """An answer with another number of frames. The router drops its index of this pod and requests again after 30 s."""


class LlmdReader:
    """The index of one pod. Its only other state is the last number that it applied, live or replayed."""

    def __init__(self, open_socket: OpenSocket, publisher: ZmqEventPublisher) -> None:
        self.index: dict[tuple[str, str], set[int]] = {}
        self.num_resets = 0
        self.last: int | None = None
        self.last_live: int | None = None
        self._open, self._replay = open_socket, str(publisher.replay_endpoint)
        self._sub = open_socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._sub.connect(publisher.endpoint)

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._sub.poll(timeout_ms))

    def lose(self, count: int) -> None:
        """Drop live messages, as the network does."""
        for _ in range(count):
            self._sub.recv_multipart()

    def read_live(self) -> bool:
        """Read one message, after requesting the missing ones before it. Return False if the router would drop it."""
        frames = self._sub.recv_multipart()
        if len(frames) != 3 or len(frames[1]) < 8:
            return False
        sequence = int.from_bytes(frames[1], "big")
        if self.last_live is not None and sequence < self.last_live:
            self._reset()
            self.ask(0)
        self.last_live = sequence
        if self.last is None and sequence > 0:
            self.ask(0)
        elif self.last is not None and sequence > self.last + 1:
            self.ask(self.last + 1)
        if self.last is not None and sequence != self.last + 1:
            return False
        self._apply(frames[0], sequence, frames[2])
        return True

    def ask(self, start: int) -> None:
        """Replay from ``start``. If the first batch is a later one, drop the index."""
        dealer = self._open(zmq.DEALER)
        dealer.connect(self._replay)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        expected, has_begun = start, False
        while True:
            frames = dealer.recv_multipart()
            if frames and not frames[0]:
                frames = frames[1:]
            if len(frames) == 3 and not frames[2]:
                return
            if len(frames) != 3 or len(frames[1]) < 8:
                self._reset()
                raise MalformedReplayError(len(frames))
            sequence = int.from_bytes(frames[1], "big")
            if not has_begun and sequence > expected:
                self._reset()
                expected = sequence
            assert sequence == expected, "the router calls this an incomplete replay"
            self._apply(frames[0], sequence, frames[2])
            expected, has_begun = sequence + 1, True

    def _reset(self) -> None:
        self.index.clear()
        self.last = None
        self.num_resets += 1

    def _apply(self, topic: bytes, sequence: int, payload: bytes) -> None:
        parts = topic.decode().split("@")
        pod, model = (parts[1], parts[2]) if len(parts) == 3 else (topic.decode(), "")
        blocks = self.index.setdefault((pod, model), set())
        _, events, _ = msgspec.msgpack.decode(payload)
        for tag, *fields in events:
            if tag == "BlockStored":
                blocks |= {each % 2**64 for each in fields[0]}
            elif tag == "BlockRemoved":
                blocks -= {each % 2**64 for each in fields[0]}
            else:
                blocks.clear()
        self.last = sequence


def settings(**given: object) -> dict[str, object]:
    return {"topic": TOPIC, "replay_framing": "topic", "seq_base": "clock"} | given


class Pod:
    """A publisher, and the content of its cache."""

    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self.publisher = publisher
        self.history = ChainEventGenerator()
        self._number = 0

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.publisher.publish(KVEventBatch(0.0, (self.history.next(self._number),)))
            self._number += 1

    @property
    def held(self) -> set[int]:
        return {each % 2**64 for each in self.history.live_hashes}

    def is_read_by(self, reader: LlmdReader) -> bool:
        """Publish and let the reader catch up. Return True if its index equals the cache."""
        for _ in range(2_000):
            self.publish(1)
            while reader.poll(20):
                reader.read_live()
            if reader.last == self.publisher.stats().last_sequence:
                return reader.index == {("10.0.0.7:8000", "my-model"): self.held}
        raise AssertionError("the reader never caught up")


def test_it_follows_live_batches(opened: Opened, open_socket: OpenSocket) -> None:
    pod = Pod(opened(**settings()))
    reader = LlmdReader(open_socket, pod.publisher)
    assert pod.is_read_by(reader)
    pod.publish(60)
    assert pod.is_read_by(reader)


def test_a_late_reader_gets_everything_after_the_buffer_has_passed(opened: Opened, open_socket: OpenSocket) -> None:
    pod = Pod(opened(**settings(buffer_steps=4)))
    pod.publish(33)
    assert len(pod.held) > 4
    reader = LlmdReader(open_socket, pod.publisher)
    reader.ask(0)  # as the router does on connecting
    assert reader.index[("10.0.0.7:8000", "my-model")] == pod.held
    assert pod.is_read_by(reader)


@pytest.mark.parametrize("missed", [3, 30])
def test_missed_batches_are_replayed(opened: Opened, open_socket: OpenSocket, missed: int) -> None:
    """From within the replay buffer, and from before it: then the whole present state is sent."""
    pod = Pod(opened(**settings(buffer_steps=8)))
    reader = LlmdReader(open_socket, pod.publisher)
    assert pod.is_read_by(reader)
    pod.publish(missed)
    reader.lose(missed)
    assert pod.is_read_by(reader)


@pytest.mark.parametrize("seq_base", ["zero", "clock"])
def test_a_restart_clears_the_blocks_of_the_earlier_epoch(
    opened: Opened, open_socket: OpenSocket, seq_base: str
) -> None:
    first = Pod(opened(**settings(seq_base=seq_base)))
    reader = LlmdReader(open_socket, first.publisher)
    first.publish(20)
    assert first.is_read_by(reader) and first.held
    at = {"endpoint": first.publisher.endpoint, "replay_endpoint": first.publisher.replay_endpoint}
    first.publisher.shutdown()
    second = Pod(opened(**settings(seq_base=seq_base, **at)))
    assert second.is_read_by(reader)
    assert reader.num_resets


def test_the_default_framing_of_replays_is_malformed_for_it(opened: Opened, open_socket: OpenSocket) -> None:
    """The reason why the guide requires ``topic``: two frames where it reads three."""
    pod = Pod(opened(**settings(replay_framing="seed")))
    pod.publish(3)
    with pytest.raises(MalformedReplayError, match="2"):
        LlmdReader(open_socket, pod.publisher).ask(0)


def test_a_name_with_the_topics_separator_hides_pod_and_model(opened: Opened, open_socket: OpenSocket) -> None:
    """The reason why the guide forbids ``@`` in names: the router splits into exactly three parts."""
    pod = Pod(opened(**settings(topic="kv@pod@org@model")))
    pod.publish(1)
    reader = LlmdReader(open_socket, pod.publisher)
    reader.ask(0)
    assert reader.index == {("kv@pod@org@model", ""): pod.held}
