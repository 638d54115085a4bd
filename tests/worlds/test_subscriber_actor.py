"""A reader whose view is LIVE and wrong, who asks too often, or who never arrives, breaks a promise."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamState
from observability.kv_stream.instructions import SendReplayRequest
from scheduler_components import BlockStored
from worlds import (
    FORGED_PAYLOAD,
    OTHER_TOPIC,
    TOPIC,
    Answer,
    BrokenPromise,
    LiveFrame,
    PublisherActor,
    PublisherShape,
    SubscriberActor,
)
from worlds.recovery_model import POLICY


class Bench:
    """A publisher and one reader next to it: each request is answered immediately."""

    def __init__(self) -> None:
        self.reader: SubscriberActor | None = None
        self.publisher = PublisherActor(
            PublisherShape(), broadcast=self.broadcast, first_sequence=lambda _: 0, clock=lambda: 0.0
        )
        self.requests: list[SendReplayRequest] = []
        self.reader = SubscriberActor("reader", self.publisher, channel=self, policy=POLICY)
        self.reader.on_connected(0, 0.0)
        self.publish(1)
        self.answer()

    def broadcast(self, frame: LiveFrame) -> None:
        if self.reader is not None:
            self.reader.on_live(frame, self.reader.now_s)

    def send(self, request: SendReplayRequest) -> None:
        self.requests.append(request)

    def cancel(self) -> None:
        """Do nothing."""

    def publish(self, block: int) -> None:
        self.publisher.publish_events((BlockStored((block,), None, (block,), 1, None),))
        self.publisher.idle()

    def answer(self) -> None:
        """Answer the newest request whole."""
        assert self.reader is not None
        request, client = self.requests[-1], b"client"
        self.publisher.receive(client, request.request, has_extension=True)
        while client in self.publisher.sessions.clients:
            message = self.publisher.sessions.message(client)
            self.publisher.sessions.on_sent(client)
            if message is not None:
                sequence = int.from_bytes(message[-2], "big", signed=True)
                answer = Answer(request_id=request.request_id, sequence=sequence, payload=message[-1], epoch=0)
                self.reader.on_answer(answer, self.reader.now_s)


def live_reader() -> tuple[Bench, SubscriberActor]:
    bench = Bench()
    assert bench.reader is not None and bench.reader.state is StreamState.LIVE
    return bench, bench.reader


def test_a_view_that_is_live_and_right_keeps_every_promise() -> None:
    bench, reader = live_reader()
    bench.publish(2)
    reader.check()
    reader.check_converged()
    assert (reader.blocks, reader.epoch, reader.is_connected) == (bench.publisher.held, 0, True)


def test_a_view_that_is_live_and_wrong_breaks_a_promise() -> None:
    _, reader = live_reader()
    reader.view.apply(0, (BlockStored((9,), None, (9,), 1, None),))
    with pytest.raises(BrokenPromise, match="a LIVE view is never wrong"):
        reader.check()


def test_a_frame_of_another_epoch_excuses_the_reader_until_the_next_proof() -> None:
    bench, reader = live_reader()
    number = bench.publisher.stream.next_sequence.to_bytes(8, "big")
    reader.on_live(LiveFrame(None, (TOPIC, number, FORGED_PAYLOAD)), 0.0)
    assert reader.truth.is_spliced
    reader.check()
    reader.tick(10.0)
    with pytest.raises(BrokenPromise, match="every view converges"):
        reader.check_converged()


def test_a_frame_of_another_topic_that_is_applied_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, reader = live_reader()
    number = bench.publisher.stream.next_sequence.to_bytes(8, "big")
    reader.on_live(LiveFrame(None, (OTHER_TOPIC, number, FORGED_PAYLOAD)), 0.0)
    assert reader.frames.other_topics == 1
    monkeypatch.setattr(type(reader.frames), "parse_live", lambda _, frames: (1, frames[2]))
    with pytest.raises(BrokenPromise, match="frames of another topic are dropped"):
        reader.on_live(LiveFrame(None, (OTHER_TOPIC, number, FORGED_PAYLOAD)), 0.0)


def test_more_requests_than_the_credit_allows_break_a_promise() -> None:
    _, reader = live_reader()
    with pytest.raises(BrokenPromise, match="bounded requests"):
        for number in range(2, 12):
            reader.send(SendReplayRequest(number, 0))


def test_a_reader_behind_the_publisher_has_not_converged() -> None:
    bench, reader = live_reader()
    bench.reader = None  # its network fails
    bench.publish(2)
    with pytest.raises(BrokenPromise, match="every view converges"):
        reader.check_converged()


def test_a_reader_that_distrusts_an_honest_publisher_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, reader = live_reader()
    counters = reader.follower.cursor.counters

    def distrust(*_: object) -> bool:
        counters.splices += 1
        return True

    monkeypatch.setattr(type(reader.follower), "on_replay_marker", distrust)
    with pytest.raises(BrokenPromise, match="an honest publisher is trusted"):
        bench.answer()
