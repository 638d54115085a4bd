"""One drain: what is sent, folded, received and answered, in which order, and for how long.

Property: every client whose connection takes messages gets its whole answer, whatever is published meanwhile.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import numbered_batch

from scheduler_components import BlockRemoved, EventBatch
from scheduler_components.kv_events import BatchEncoder, EventStream
from scheduler_components.kv_events.live_sender import LiveSender
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import END_SEQ, encode_plain_request
from scheduler_components.kv_events.sequence_floor import SequenceFloor
from scheduler_components.kv_events.stream_drain import MESSAGES_PER_TURN, ReplayServer, StreamDrain


class Bench:
    """A stream whose messages cost time, and clients with queues. It is the channel of its clients."""

    def __init__(
        self,
        *,
        window: int = 100,
        has_replay: bool = True,
        cost_s: float = 0.0,
        first_sequence: int = 0,
        floor: SequenceFloor | None = None,
    ) -> None:
        self.now_s, self.cost_s = 0.0, cost_s
        self.sent: list[bytes] = []
        self.requests: list[tuple[bytes, bytes, bytes]] = []
        self.answers: dict[bytes, list[bytes]] = {}
        self.room: dict[bytes, int | None] = {}  # None for a client that is gone
        self.order: list[str] = []
        self.has_failed = False
        self.num_counts = 0
        stream = EventStream(epoch=bytes(16), max_steps=window, max_bytes=10**6, first_sequence=first_sequence)
        encoder = BatchEncoder("array")
        self.stream, self.sessions = stream, ReplaySessions(stream, encoder=encoder, rank=0)
        self.live = LiveSender(
            self._send_live, topic=b"", encoder=encoder, stream=stream, rank=0, max_pending=100, clock=self._clock
        )
        self.work = StreamDrain(
            self.live,
            stream,
            self.sessions,
            floor=floor,
            server=ReplayServer(self.sessions, self, clock=self._clock) if has_replay else None,
            count_peers=self._count_peers,
            clock=self._clock,
        )

    def _clock(self) -> float:
        return self.now_s

    def _send_live(self, frames: tuple[bytes, bytes, bytes]) -> bool:
        self.now_s += self.cost_s
        self.sent.append(frames[1])
        self.order.append("live")
        return True

    def _count_peers(self) -> None:
        self.num_counts += 1

    def receive_requests(self) -> bool:
        self.order.append("requests")
        for request in self.requests:
            self.sessions.receive(request)
        self.requests.clear()
        return False

    def send(self, message: tuple[bytes, ...]) -> bool | None:
        client = message[0]
        room = self.room.get(client, 10**6)
        if not room:
            return False if room == 0 else None
        self.now_s += self.cost_s
        self.room[client] = room - 1
        self.answers.setdefault(client, []).append(message[-2])
        self.order.append("answer")
        return True

    def publish(self, count: int) -> None:
        for number in range(count):
            self.live.pending.append(numbered_batch(number))

    def ask(self, client: bytes) -> None:
        self.requests.append((client, b"", encode_plain_request(0)))


def numbers(count: int) -> list[bytes]:
    return [*(number.to_bytes(8, "big") for number in range(count)), END_SEQ]


def test_an_answer_covers_what_was_pending_and_is_served_in_the_same_drain() -> None:
    it = Bench()
    it.publish(3)
    it.ask(b"a")
    assert not it.work.drain(1.0, 1.0)
    assert it.order == [*["live"] * 3, "requests", *["answer"] * 4]
    assert it.answers[b"a"] == numbers(3)


def test_answers_are_served_although_batches_are_always_pending() -> None:
    it = Bench(cost_s=0.001)
    it.publish(20)
    it.work.drain(1.0, 0.0)
    it.ask(b"a")
    it.work.drain(0.0, 0.0)
    while it.answers.get(b"a") != numbers(20):
        before = len(it.answers.get(b"a", ()))
        it.publish(50)
        assert it.work.drain(0.002, 0.001)
        assert len(it.answers[b"a"]) > before, "each drain sends at least a turn"
        it.live.pending.clear()


def test_time_for_answers_is_in_addition_and_zero_leaves_them_to_another_call() -> None:
    it = Bench(cost_s=0.001)
    it.publish(40)
    it.work.drain(1.0, 0.0)
    for client in (b"a", b"b"):
        it.ask(client)
    assert not it.work.drain(0.0, 0.0)
    assert not it.answers
    assert it.work.drain(0.0, 0.01)
    assert [len(it.answers[client]) for client in (b"a", b"b")] == [MESSAGES_PER_TURN] * 2


@pytest.mark.parametrize("room", [0, None])
def test_a_client_that_takes_nothing_keeps_no_other_waiting(room: int | None) -> None:
    it = Bench()
    it.publish(20)
    it.room[b"full"] = room
    for client in (b"full", b"fast"):
        it.ask(client)
    it.work.drain(1.0, 1.0)
    assert it.answers[b"fast"] == numbers(20)
    assert it.sessions.clients == ((b"full",) if room == 0 else ())
    assert it.sessions.num_truncated == (room is None)
    assert bool(it.stream.holds) == (room == 0)


def test_requests_are_polled_once_in_a_while_and_never_before_the_batches_are_sent() -> None:
    it = Bench(cost_s=0.01)
    it.publish(9)
    it.ask(b"a")
    assert it.work.drain(0.001, 0.0, requests_every_s=0.004)
    assert "requests" not in it.order, "an answer would lack the pending batches"
    it.work.drain(1.0, 0.0, requests_every_s=0.004)
    it.work.drain(1.0, 0.0, requests_every_s=0.004)
    assert it.order.count("requests") == 1
    assert it.work.requests_at_s == it.now_s
    it.now_s += 0.005
    it.work.drain(1.0, 0.0, requests_every_s=0.004)
    assert it.order.count("requests") == 2


def test_without_replay_or_with_a_failed_socket_only_batches_are_sent() -> None:
    for it in (Bench(has_replay=False), Bench()):
        it.has_failed = True
        it.publish(5)
        it.ask(b"a")
        assert not it.work.drain(1.0, 1.0)
        assert (len(it.sent), it.answers) == (5, {})


class Disk:
    """The file of a floor."""

    name = "floor"
    is_open = True
    content = b""

    def read(self) -> bytes | None:
        return self.content

    def replace(self, content: bytes) -> None:
        self.content = content

    def close(self) -> None: ...


def test_some_drains_count_peers_and_reserve_numbers() -> None:
    disk = Disk()
    it = Bench(first_sequence=2**31, floor=SequenceFloor(disk, 0))
    for _ in range(63):
        it.work.drain(0.0, 0.0)
    assert (it.num_counts, disk.content) == (0, b"")
    it.work.drain(0.0, 0.0)
    assert it.num_counts == 1 and disk.content.startswith(b"%d " % (2**31 + 2**32))
    for _ in range(64):
        it.work.drain(0.0, 0.0)
    assert it.num_counts == 2


def test_a_full_client_is_served_after_the_others() -> None:
    it = Bench(cost_s=0.001)
    it.publish(20)
    it.work.drain(1.0, 0.0)
    for client in (b"full", b"a", b"b"):
        it.ask(client)
    it.room[b"full"] = 0
    it.work.drain(0.0, 0.0)
    it.work.drain(0.0, 0.001)
    assert it.sessions.clients == (b"b", b"full", b"a")


def test_large_messages_end_a_turn_early() -> None:
    it = Bench(cost_s=0.001)
    for _ in range(20):
        it.live.pending.append(EventBatch(1.0, (BlockRemoved(tuple(range(2**40, 2**40 + 3_000))),)))
    it.work.drain(1.0, 0.0)
    it.ask(b"a")
    it.work.drain(0.0, 0.0)
    it.work.drain(0.0, 1e-9)
    assert len(it.answers[b"a"]) == 3, "64 KiB of 27 KB each"


def test_what_a_pin_has_held_up_is_folded_while_there_is_time() -> None:
    it = Bench(window=4)
    it.stream.pins = 1
    it.publish(100)
    it.work.drain(1.0, 0.0)
    assert len(it.stream) == 100
    it.stream.pins = 0
    it.work.drain(0.0, 0.0)
    assert len(it.stream) > 4
    it.work.drain(1.0, 0.0)
    assert len(it.stream) == 4


def test_an_answer_that_cannot_be_completed_is_cut() -> None:
    it = Bench(window=4)
    it.publish(4)
    it.work.drain(1.0, 0.0)
    it.room[b"slow"] = 0
    it.ask(b"slow")
    it.work.drain(1.0, 1.0)
    assert it.stream.holds
    for _ in range(20):
        it.publish(1)
        it.work.drain(1.0, 0.0)
    assert not it.stream.has_stuck_pins and not it.stream.holds


@settings(max_examples=60, deadline=None)
@given(
    num_batches=st.integers(0, 60),
    window=st.integers(60, 100),
    reads=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 12)), max_size=40),
)
def test_every_client_that_goes_on_reading_gets_its_whole_answer(
    num_batches: int, window: int, reads: list[tuple[bytes, int]]
) -> None:
    it = Bench(window=window, cost_s=0.0001)
    it.publish(num_batches)
    clients = (b"a", b"b", b"c")
    for client in clients:
        it.room[client] = 0
        it.ask(client)
    for client, count in reads:
        it.room[client] = (it.room[client] or 0) + count
        it.work.drain(0.001, 0.0003)
        assert all(it.answers[each] == numbers(num_batches)[: len(it.answers[each])] for each in it.answers)
    for _ in range(3 * (num_batches + 1)):
        for client in clients:
            it.room[client] = (it.room[client] or 0) + 1
        it.work.drain(0.001, 0.0003)
    assert it.answers == dict.fromkeys(clients, numbers(num_batches))


def test_a_client_that_is_gone_loses_its_answer() -> None:
    it = Bench()
    it.publish(3)
    it.ask(b"gone")
    it.room[b"gone"] = None
    it.work.drain(1.0, 1.0)
    assert (len(it.sessions), it.sessions.num_truncated, it.stream.holds) == (0, 1, {})
