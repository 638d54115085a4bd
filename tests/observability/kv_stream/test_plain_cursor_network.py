"""The plain rules against a publisher with a ring of batches, and a faulty network: actors of the simulated world.

Properties, after every step:
- A LIVE view is never wrong: it equals the publisher's state after ``last_seq`` in the current epoch.
- A PARTIAL view has no block that the publisher did not hold.
- The cursor always settles once the faults stop, and is LIVE if the publisher still has its history.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples
from worlds import (
    Answer,
    FaultyLink,
    LinkFault,
    LiveFrame,
    PublisherActor,
    PublisherShape,
    SubscriberActor,
)
from worlds.plain_publisher import BatchRing

from observability.kv_stream import FollowPolicy, StreamCursor, StreamState
from observability.kv_stream.instructions import SendReplayRequest
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.events import Tier

CLEAR = -1
POLICY = FollowPolicy(
    answer_timeout_s=1.0,
    extension_timeout_s=1.0,
    retry_min_s=0.1,
    retry_max_s=0.5,
    request_interval_s=0.1,
    probe_interval_s=2.0,
    dead_after_s=5.0,
)


class PlainNetwork:
    """A publisher, its ring, and one reader. Nothing arrives but by a step. It is the channel of the reader."""

    def __init__(self, *, window: int, has_replay: bool, patience: int = 3) -> None:
        self.ring = BatchRing(window)
        self.live: FaultyLink[LiveFrame] = FaultyLink()
        self.request: SendReplayRequest | None = None
        self.answer: FaultyLink[Answer] | None = None
        self.old_answers: list[FaultyLink[Answer]] = []
        self.first_sequence = 0
        self.publisher = PublisherActor(
            PublisherShape(max_pending=100),
            broadcast=self.broadcast,
            first_sequence=lambda _: self.first_sequence,
            clock=lambda: self.reader.now_s,
        )
        self.reader = SubscriberActor(
            "reader",
            self.publisher,
            channel=self,
            policy=POLICY,
            has_extension=False,
        )
        self.reader.follower.cursor = StreamCursor(has_replay=has_replay, patience=patience)

    def broadcast(self, frame: LiveFrame) -> None:
        self.ring.append(frame)
        if self.reader.is_connected:
            self.live.send(frame)

    # --- the reader's channel ---

    def send(self, request: SendReplayRequest) -> None:
        self.cancel()
        self.request = request

    def cancel(self) -> None:
        if self.answer is not None and self.answer.in_transit:
            self.old_answers.append(self.answer)
        self.request = self.answer = None

    def check(self) -> None:
        reader = self.reader
        reader.check()
        if reader.state is StreamState.PARTIAL and reader.is_connected:
            known = self.publisher.states.get((self.publisher.epoch, reader.follower.cursor.last_seq), frozenset())
            assert reader.blocks <= known

    # --- what may happen ---

    def connect(self) -> None:
        if not self.reader.is_connected:
            self.reader.on_connected(self.publisher.epoch, self.reader.now_s)

    def disconnect(self) -> None:
        if self.reader.is_connected:
            self.live.cut()
            self.request = self.answer = None
            self.reader.on_disconnected(self.reader.now_s)

    def publish(self, ops: list[int]) -> None:
        """Publish each of ``ops``: CLEAR, or a block to store if absent and remove if present."""
        for op in ops:
            if op == CLEAR:
                self.publisher.publish_events((AllBlocksCleared(),))
            elif (op, Tier.DEVICE) in self.publisher.held:
                self.publisher.publish_events((BlockRemoved((op,)),))
            else:
                self.publisher.publish_events((BlockStored((op,), None, (op,), 1, None),))
        self.publisher.idle()

    def restart(self, base: int) -> None:
        """Start the next epoch. That takes time: the same bytes under the same number would be the same batch."""
        self.disconnect()
        self.reader.tick_until(self.reader.now_s + 0.01)
        self.ring.clear()
        self.first_sequence = base
        self.publisher.start_epoch()
        if base:
            self.publish([CLEAR])

    def deliver(self, count: int, fault: str) -> None:
        for _ in range(min(count, len(self.live.in_transit))):
            frame = self.live.deliver(LinkFault(fault))
            if frame is not None:
                self.reader.on_live(frame, self.reader.now_s)
                self.check()

    def serve(self, count: int, fault: str) -> None:
        """Deliver a part of the answer. Only messages after the first can be lost, as with TCP."""
        for _ in range(count):
            if self.request is None or not self.reader.is_connected:
                return
            is_first = self.answer is None
            if self.answer is None:
                self.answer = self.answer_to(self.request)
            if fault == "silence" and not is_first:
                self.wait(10)
                return
            message = self.answer.deliver(LinkFault.LOSE if fault == "lose" and not is_first else LinkFault.NONE)
            if message is not None:
                self.reader.on_answer(message, self.reader.now_s)
            self.check()

    def answer_to(self, request: SendReplayRequest) -> FaultyLink[Answer]:
        answer: FaultyLink[Answer] = FaultyLink()
        for number, payload in self.ring.answer(request.request):
            answer.send(
                Answer(
                    request_id=request.request_id,
                    sequence=int.from_bytes(number, "big", signed=True),
                    payload=payload,
                    epoch=self.publisher.epoch,
                )
            )
        return answer

    def serve_stale(self) -> None:
        if self.old_answers:
            answer = self.old_answers.pop()
            while (message := answer.deliver()) is not None:
                self.reader.on_answer(message, self.reader.now_s)
                self.check()

    def wait(self, tenths: int) -> None:
        """Let tenths of a second pass: requests time out and are sent again, and probes are due."""
        for _ in range(tenths):
            self.reader.tick_until(self.reader.now_s + 0.1)
            self.check()

    def recover(self) -> None:
        """Stop the faults: deliver, answer and retry everything until a probe has been answered."""
        self.connect()
        for _ in range(100):
            self.serve(1_000, "none")
            if self.reader.follower.cursor.is_accepting_live:
                self.deliver(1_000, "none")
            self.wait(1)

    # --- steps ---

    def run(self, steps: list[tuple]) -> None:
        self.publish([0, 1, 2])
        self.connect()
        self.serve(3, "none")
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
            self.check()


OPS = st.lists(st.integers(0, 5) | st.just(CLEAR), min_size=1, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("publish"), OPS),
    st.tuples(st.just("deliver"), st.integers(1, 4), st.sampled_from(["none", "none", "lose", "repeat", "reorder"])),
    st.tuples(st.just("serve"), st.integers(1, 6), st.sampled_from(["none", "none", "lose", "silence"])),
    st.tuples(st.just("restart"), st.sampled_from([0, 0, 1_000_000])),
    st.tuples(st.just("wait"), st.sampled_from([1, 5, 10, 21, 55])),
    st.tuples(st.sampled_from(["connect", "connect", "disconnect", "serve_stale"])),
)


@pytest.mark.soak
@given(
    window=st.integers(0, 6), has_replay=st.booleans(), patience=st.integers(1, 3), steps=st.lists(STEPS, max_size=60)
)
@settings(max_examples=num_examples(6), deadline=None)
def test_no_wrong_view_is_live_and_the_cursor_settles(
    window: int, has_replay: bool, patience: int, steps: list[tuple]
) -> None:
    world = PlainNetwork(window=window, has_replay=has_replay, patience=patience)
    world.run(steps)
    world.recover()
    cursor = world.reader.follower.cursor
    assert cursor.is_accepting_live and cursor.state is not StreamState.CONNECTING


@pytest.mark.soak
@example(steps=[("restart", 0), ("publish", [CLEAR])], last=[1])
@given(steps=st.lists(STEPS, max_size=60), last=OPS)
@settings(max_examples=num_examples(6), deadline=None)
def test_converges_when_the_publisher_has_its_history(steps: list[tuple], last: list[int]) -> None:
    """With all history in the ring, the view converges after the faults and one probe."""
    world = PlainNetwork(window=1_000, has_replay=True)
    world.run(steps)
    world.publish(last)
    world.live.cut()  # the last batches are lost on the live channel
    world.recover()
    cursor = world.reader.follower.cursor
    assert cursor.state is StreamState.LIVE
    assert cursor.last_seq == world.publisher.stream.next_sequence - 1
    assert world.reader.blocks == world.publisher.held
