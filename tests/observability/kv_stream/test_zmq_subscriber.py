"""The subscriber over real sockets, against a hand-written publisher with the faults of released ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from kit.events import stored
from kit.waiting import wait_until

from observability.kv_stream import BlockView, FollowPolicy, StreamState, Subscriber, open_subscriber, static_address
from scheduler_components import AllBlocksCleared, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchEncoder, StreamAddress

pytestmark = pytest.mark.sockets

DEADLINE_S = 60.0
QUICK = FollowPolicy(
    answer_timeout_s=0.3, retry_min_s=0.02, retry_max_s=0.1, probe_interval_s=0.1, dead_after_s=DEADLINE_S
)
END = (-1).to_bytes(8, "big", signed=True)


class PlainPublisher:
    """A publisher with PUB and ROUTER as in SGLang and vLLM; its faults are attributes."""

    def __init__(self, *, framing: str = "seed", topic: bytes = b"kv", dialect: str = "array") -> None:
        self.framing, self.topic, self.encoder = framing, topic, BatchEncoder(dialect)
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind("tcp://127.0.0.1:*")
        self.sent: dict[int, bytes] = {}
        self.requests: list[int] = []
        self.ends_answers = True
        self.answers = True

    @property
    def address(self) -> StreamAddress:
        return static_address(
            self.pub.getsockopt_string(zmq.LAST_ENDPOINT),
            replay=self.router.getsockopt_string(zmq.LAST_ENDPOINT),
            topic=self.topic.decode(),
        )

    def publish(self, seq: int, *events: KVCacheEvent, lost: bool = False) -> None:
        payload = self.encoder.encode(KVEventBatch(ts=float(seq), events=events), 0)
        self.sent[seq] = payload
        if not lost:
            self.pub.send_multipart((self.topic, seq.to_bytes(8, "big"), payload))

    def serve(self) -> None:
        """Answer the waiting replay requests."""
        while self.router.poll(0):
            client, _, start = self.router.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            middle = (self.topic,) if self.framing == "topic" else ()
            for seq, payload in self.sent.items():
                if seq >= self.requests[-1]:
                    self.router.send_multipart((client, b"", *middle, seq.to_bytes(8, "big"), payload))
            if self.ends_answers:
                self.router.send_multipart((client, b"", *(b"" for _ in middle), END, b""))

    def close(self) -> None:
        self.context.destroy(linger=0)


def poll_until(sub: Subscriber, publisher: PlainPublisher, condition: Callable[[], bool]) -> None:
    def serve_and_poll() -> None:
        publisher.serve()
        sub.poll(0.005)

    wait_until(condition, poll=serve_and_poll, describe=sub.stats, deadline_s=DEADLINE_S)


def state(sub: Subscriber) -> StreamState:
    return sub.stats()[0].state


def is_live_at(sub: Subscriber, seq: int) -> Callable[[], bool]:
    return lambda: state(sub) is StreamState.LIVE and sub.stats()[0].last_seq == seq


def publish_until_followed(sub: Subscriber, publisher: PlainPublisher) -> int:
    """Publish until a live batch arrives, because PUB drops batches before it has read the subscription."""
    deadline_s = time.monotonic() + DEADLINE_S
    seq = 0
    while sub.stats()[0].lag_s is None:
        assert time.monotonic() < deadline_s, sub.stats()
        publisher.publish(seq, stored(seq))
        seq += 1
        publisher.serve()
        sub.poll(0.005)
    poll_until(sub, publisher, is_live_at(sub, seq - 1))
    return seq


@pytest.fixture(params=["seed", "topic"])
def publisher(request: pytest.FixtureRequest) -> Iterator[PlainPublisher]:
    publisher = PlainPublisher(framing=request.param, dialect="map" if request.param == "topic" else "array")
    yield publisher
    publisher.close()


@pytest.fixture
def sub(publisher: PlainPublisher) -> Iterator[Subscriber]:
    with open_subscriber([publisher.address], policy=QUICK) as subscriber:
        yield subscriber


def test_a_late_subscriber_replays_and_follows(publisher: PlainPublisher, sub: Subscriber) -> None:
    for seq in range(50):
        publisher.publish(seq, stored(seq))
    poll_until(sub, publisher, is_live_at(sub, 49))
    for seq in range(50, 100):
        publisher.publish(seq, stored(seq))
    poll_until(sub, publisher, is_live_at(sub, 99))
    assert sub.blocks(0) == set(range(100))
    assert (sub.stats()[0].gaps, sub.stats()[0].bad_frames) == (0, 0)


def test_a_gap_is_replayed(publisher: PlainPublisher, sub: Subscriber) -> None:
    seq = publish_until_followed(sub, publisher)
    before = sub.stats()[0].gaps
    publisher.publish(seq, stored(seq), lost=True)
    publisher.publish(seq + 1, stored(seq + 1))
    poll_until(sub, publisher, is_live_at(sub, seq + 1))
    assert sub.blocks(0) == set(range(seq + 2))
    assert sub.stats()[0].gaps == before + 1


def test_a_probe_finds_a_lost_last_batch(publisher: PlainPublisher, sub: Subscriber) -> None:
    publisher.publish(0, stored(0))
    poll_until(sub, publisher, is_live_at(sub, 0))
    publisher.publish(1, AllBlocksCleared(), lost=True)
    poll_until(sub, publisher, is_live_at(sub, 1))
    assert sub.blocks(0) == frozenset()


def test_a_lost_end_marker_does_not_block_the_stream(publisher: PlainPublisher, sub: Subscriber) -> None:
    publisher.ends_answers = False
    publisher.publish(0, stored(0))
    poll_until(sub, publisher, lambda: sub.stats()[0].replays_unanswered > 0)
    publisher.ends_answers = True
    publisher.publish(1, stored(1))
    poll_until(sub, publisher, is_live_at(sub, 1))
    assert sub.blocks(0) == {0, 1}


def test_a_silent_replay_channel_is_partial_until_it_answers(publisher: PlainPublisher, sub: Subscriber) -> None:
    publisher.answers = False
    publisher.publish(0, stored(0))
    publisher.publish(1, stored(1))
    poll_until(sub, publisher, lambda: state(sub) is StreamState.PARTIAL)
    publisher.publish(2, stored(2))
    poll_until(sub, publisher, lambda: 2 in sub.blocks(0))
    publisher.answers = True
    poll_until(sub, publisher, is_live_at(sub, 2))
    assert sub.blocks(0) == {0, 1, 2}


def test_a_truncated_replay_buffer_is_never_live(publisher: PlainPublisher, sub: Subscriber) -> None:
    publisher.publish(5, stored(5))
    poll_until(sub, publisher, lambda: state(sub) is StreamState.PARTIAL)
    publisher.publish(6, stored(6))
    poll_until(sub, publisher, lambda: sub.blocks(0) == {5, 6})
    assert state(sub) is StreamState.PARTIAL


def test_malformed_messages_are_counted_and_skipped(publisher: PlainPublisher, sub: Subscriber) -> None:
    seq = publish_until_followed(sub, publisher)
    publisher.pub.send_multipart((b"kv", b"short", b""))
    publisher.pub.send_multipart((b"kv", (1).to_bytes(8, "big")))
    publisher.pub.send_multipart((b"kv", END, b""))
    publisher.publish(seq, stored(seq))
    poll_until(sub, publisher, is_live_at(sub, seq))
    assert sub.stats()[0].bad_frames == 3


def test_another_topic_is_skipped(publisher: PlainPublisher, sub: Subscriber) -> None:
    poll_until(sub, publisher, lambda: state(sub) is StreamState.SYNCING and bool(publisher.requests))
    publisher.pub.send_multipart((b"other", (0).to_bytes(8, "big"), b"junk"))
    publisher.publish(0, stored(0))
    poll_until(sub, publisher, is_live_at(sub, 0))
    assert sub.stats()[0].decode_errors == 0


def test_wait_until_returns_false_after_its_timeout(publisher: PlainPublisher, sub: Subscriber) -> None:
    assert not sub.wait_until(0, 5, timeout_s=0.01)


def test_the_view_stays_readable_after_closing_twice(publisher: PlainPublisher) -> None:
    with open_subscriber([publisher.address], policy=QUICK) as sub:
        publisher.publish(0, stored(0))
        poll_until(sub, publisher, is_live_at(sub, 0))
    sub.close()
    assert sub.blocks(0) == {0}


def test_an_absent_publisher_is_dead_until_it_connects(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "events"
    policy = FollowPolicy(dead_after_s=0.05)
    with open_subscriber([static_address(f"ipc://{path}")], policy=policy) as sub, zmq.Context() as context:
        deadline_s = time.monotonic() + DEADLINE_S
        while state(sub) is not StreamState.DEAD:
            assert time.monotonic() < deadline_s
            sub.poll(0.05)
        with context.socket(zmq.PUB) as pub:
            pub.bind(f"ipc://{path}")
            while state(sub) is not StreamState.PARTIAL:
                assert time.monotonic() < deadline_s
                sub.poll(0.05)


def test_a_subscriber_sleeps_between_two_connection_attempts(free_ports: Callable[[int], int]) -> None:
    with open_subscriber([static_address(f"tcp://127.0.0.1:{free_ports(1)}")], policy=QUICK) as sub:
        while sub.sockets() or sub.due_in_s < 0.1:
            sub.poll(0.05)
        begun_s, wait_s = time.monotonic(), sub.due_in_s / 2
        assert not sub.poll(wait_s)
        assert time.monotonic() - begun_s >= wait_s / 2


def test_a_clear_is_swept_without_further_batches() -> None:
    publisher, view = PlainPublisher(), BlockView()
    with open_subscriber([publisher.address], policy=QUICK, view=view) as sub:
        poll_until(sub, publisher, lambda: sub.stats()[0].state is not StreamState.CONNECTING)
        publisher.publish(0, stored(*range(30_000)), AllBlocksCleared(), stored(7))
        poll_until(sub, publisher, lambda: sub.stats()[0].last_seq == 0)
        assert not view.is_swept
        assert sub.due_in_s <= 0.001
        poll_until(sub, publisher, lambda: view.is_swept)
        assert sub.blocks(0) == {7}
        assert (sub.best_ranks([7, 8])[0], set(sub.best_ranks([7, 8])[1])) == (1, {0})
    publisher.close()
