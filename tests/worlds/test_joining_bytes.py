"""What a joining reader may receive is what the publisher sends for one answer, to the byte."""

from __future__ import annotations

import pytest

from scheduler_components import BlockRemoved, BlockStored
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest, ReplayVerb
from worlds import LiveFrame, PublisherActor, PublisherShape
from worlds.joining_bytes import JoiningBytes, snapshot_bytes


class Bench:
    """A publisher whose replay buffer has four batches, and a reader that joins later."""

    def __init__(self) -> None:
        self.joining: JoiningBytes | None = None
        self.actor = PublisherActor(PublisherShape(), broadcast=self.broadcast, first_sequence=lambda _: 0)
        self.publish(20)

    def broadcast(self, frame: LiveFrame) -> None:
        if self.joining is not None:
            self.joining.on_sent(frame)

    def publish(self, count: int) -> None:
        for number in range(count):
            blocks = tuple(range(2 * number, 2 * number + 2))
            self.actor.publish_events((BlockStored(blocks, None, blocks, 1, None), BlockRemoved((2 * number + 1,))))
            self.actor.idle()

    def answer_bytes(self, verb: ReplayVerb | None) -> int:
        """Return the payload bytes of one whole answer, without METAs."""
        self.actor.receive(b"client", ReplayRequest(0, verb), has_extension=verb is not None)
        num_bytes = 0
        while b"client" in self.actor.sessions.clients:
            message = self.actor.sessions.message(b"client")
            self.actor.sessions.on_sent(b"client")
            num_bytes += len(message[-1]) if message is not None and message[-2] != END_SEQ else 0
        return num_bytes


@pytest.mark.parametrize("verb", [ReplayVerb.SYNC, None])
def test_an_answer_has_the_size_of_the_snapshot_and_the_replay_buffer(verb: ReplayVerb | None) -> None:
    it = Bench()
    assert it.actor.stream.has_folded and snapshot_bytes(it.actor.stream) > 100
    assert it.answer_bytes(verb) == JoiningBytes(it.actor).limit(0)


def test_later_batches_count_once_and_requests_without_the_extension_repeat_one() -> None:
    it = Bench()
    joining = it.joining = JoiningBytes(it.actor)
    before = joining.limit(0)
    it.publish(1)
    batch = len(it.actor.stream.payload(it.actor.last_sequence))
    assert joining.limit(0) >= before + batch  # the snapshot may have grown
    assert joining.limit(2) - joining.limit(0) >= 2 * batch


def test_another_epoch_may_cost_another_answer() -> None:
    it = Bench()
    joining = it.joining = JoiningBytes(it.actor)
    before = joining.limit(0)
    it.actor.start_epoch()
    it.publish(20)
    assert before < joining.limit(0) <= before + it.answer_bytes(ReplayVerb.SYNC) + 20 * 100
