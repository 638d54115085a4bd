"""Replay sessions answer clients of many kinds, in both framings, completely and in their turn."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kit.events import batch, stored

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events import stream as event_stream
from scheduler_components.kv_events.replay import REPLAY_FRAMINGS, ReplaySessions
from scheduler_components.kv_events.replay_messages import (
    END_SEQ,
    ReplayMeta,
    ReplayMetaKind,
    ReplayRequest,
    ReplayVerb,
)
from scheduler_components.kv_events.stream_digest import digest_after, initial_digest
from scheduler_components.testing.golden import replay_frame_vectors

TOKEN, EPOCH = bytes(range(8)), bytes(range(16))


def test_a_relays_upstream_state_has_the_golden_bytes() -> None:
    *_, golden = replay_frame_vectors()["META of a relay whose upstream is partial"].message
    stream = EventStream(epoch=EPOCH, max_steps=8, max_bytes=1_000, first_sequence=3)
    cursors = cursors_of(stream)
    status = ReplayRequest(0, ReplayVerb.STATUS, TOKEN, EPOCH)
    cursors.upstream = "partial"
    cursors.receive([b"c", b"", status.encode()])
    assert cursors.message(b"c") == (b"c", b"", END_SEQ, golden)
    assert ReplayMeta.decode(golden).upstream == "partial"


# Replay sessions: clients with valid and invalid requests, late, slow, or many together.


ENCODER = BatchEncoder()


def add(stream: EventStream, count: int) -> None:
    for _ in range(count):
        stream.append(ENCODER.encode(batch(stored(stream.next_sequence + 1)), 0))
        stream.fold_oldest()


def stream_of(count: int, *, max_steps: int = 100, first_sequence: int = 0) -> EventStream:
    stream = EventStream(epoch=EPOCH, max_steps=max_steps, max_bytes=10**9, first_sequence=first_sequence)
    add(stream, count)
    return stream


def cursors_of(stream: EventStream, **options: object) -> ReplaySessions:
    return ReplaySessions(stream, encoder=ENCODER, rank=0, **options)  # type: ignore[arg-type]


def ask(cursors: ReplaySessions, request: ReplayRequest | int, client: bytes = b"c") -> None:
    cursors.receive([client, b"", (request if isinstance(request, ReplayRequest) else ReplayRequest(request)).encode()])


def answer(cursors: ReplaySessions, client: bytes = b"c") -> list[tuple[bytes, ...]]:
    """Read a whole answer; every answer ends."""
    messages = []
    while client in cursors.clients:
        message = cursors.message(client)
        if message is not None:
            messages.append(message)
        cursors.on_sent(client)
    return messages


def numbers(messages: list[tuple[bytes, ...]]) -> list[int]:
    return [int.from_bytes(message[-2], "big", signed=True) for message in messages]


def hashes(messages: list[tuple[bytes, ...]]) -> list[int]:
    """Return the blocks of a plain consumer at the end, in order."""
    held: dict[int, None] = {}
    for message in messages:
        for event in BatchDecoder().decode(message[-1]).events if message[-2] != END_SEQ else ():
            if isinstance(event, AllBlocksCleared):
                held.clear()
            elif isinstance(event, BlockStored | BlockRemoved):
                held |= dict.fromkeys(event.block_hashes)
    return list(held)


@pytest.mark.parametrize("framing", REPLAY_FRAMINGS)
def test_both_framings_are_the_golden_bytes(framing: str) -> None:
    golden = replay_frame_vectors()
    wanted = [golden[f"{framing} framing: {what}"].message for what in ("batch 1", "end")]
    stream = stream_of(1)
    stream.append(ENCODER.encode(KVEventBatch(1.0, ()), 0))
    cursors = cursors_of(stream, framing=framing, topic=b"t")
    ask(cursors, 1)
    assert answer(cursors) == [(b"c", *message) for message in wanted]


def test_unknown_framing_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="replay_framing='vllm'"):
        cursors_of(stream_of(0), framing="vllm")


@settings(deadline=None)
@example(kept=2, sent=5, start=0, framing=REPLAY_FRAMINGS[0])  # behind the replay buffer: the snapshot first
@given(
    kept=st.integers(1, 8),
    sent=st.integers(0, 12),
    start=st.integers(0, 2**64 - 1) | st.integers(0, 13),
    framing=st.sampled_from(REPLAY_FRAMINGS),
)
def test_a_plain_answer_contains_everything_from_start(kept: int, sent: int, start: int, framing: str) -> None:
    stream = stream_of(sent, max_steps=kept)
    cursors = cursors_of(stream, framing=framing)
    ask(cursors, start)
    messages = answer(cursors)
    assert messages[-1][-2:] == (END_SEQ, b"")
    assert numbers(messages)[:-1] == sorted(numbers(messages)[:-1])
    if start < stream.first:
        # Contiguous up to the replay buffer and through it, above what the client has, and complete.
        assert numbers(messages)[:-1] == list(range(stream.first - 1, sent))
        assert hashes(messages) == list(range(1, sent + 1))
    else:
        assert numbers(messages)[:-1] == list(range(start, sent))
    assert cursors.num_served == 1


def test_a_high_first_number_is_no_lost_history() -> None:
    cursors = cursors_of(stream_of(2, first_sequence=10**12))
    ask(cursors, 0)
    assert numbers(answer(cursors)) == [10**12, 10**12 + 1, -1]


@pytest.mark.parametrize(
    "frames",
    [[b"c", bytes(8)], [b"c", b"", b""], [b"c", b"", bytes(7)], [b"c", b"", bytes(9)], [b"c", b"x", bytes(8)],
     [b"c", b"", bytes(8), b""], [b"c", b"", bytes(37)], [b"c"]],
)  # fmt: skip
def test_a_malformed_request_gets_a_bare_end_marker(frames: list[bytes]) -> None:
    cursors = cursors_of(stream_of(3))
    cursors.receive(frames)
    assert answer(cursors) == [(b"c", b"", END_SEQ, b"")]
    assert cursors.num_refused == 1


def test_a_waiting_client_that_sends_garbage_or_leaves_is_removed() -> None:
    cursors = cursors_of(stream_of(3), max_clients=1)
    for client in (b"c", b"d", b"e"):
        ask(cursors, 0, client)
    cursors.receive([b"d", b"", b"bad"])
    cursors.drop(b"e")
    assert (cursors.num_waiting, cursors.num_refused) == (0, 1)
    assert answer(cursors, b"d") == [(b"d", b"", END_SEQ, b"")]
    cursors.receive([b"d", b"", b"bad"])
    answer(cursors, b"d")
    answer(cursors)
    assert (len(cursors), cursors.num_refused) == (0, 2)


def test_replayed_batches_are_counted_and_folded_ones_carry_the_rank() -> None:
    stream = stream_of(8, max_steps=3)
    cursors = ReplaySessions(stream, encoder=ENCODER, rank=5)
    for turn in (1, 2):
        ask(cursors, ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH))
        chunk, *_ = (message for message in answer(cursors) if message[-2] != END_SEQ)
        assert BatchDecoder().decode(chunk[-1]).attn_dp_rank == 5
        assert (cursors.num_served, cursors.num_batches) == (turn, 4 * turn)


def test_a_waiting_client_keeps_its_turn_when_it_changes_its_request() -> None:
    cursors = cursors_of(stream_of(3), max_clients=1)
    for client, start in ((b"a", 0), (b"b", 0), (b"c", 0), (b"b", 2)):
        ask(cursors, start, client)
    answer(cursors, b"a")
    assert cursors.clients == (b"b",)
    assert numbers(answer(cursors, b"b")) == [2, -1]


def test_without_a_place_to_wait_there_is_no_answer_that_could_be_mistaken() -> None:
    cursors = cursors_of(stream_of(3), max_clients=1)
    for number in range(3_000):
        ask(cursors, 0, b"%d" % number)
    assert len(cursors) == 1
    assert cursors.num_waiting + cursors.num_refused == 2_999
    assert cursors.num_refused > 0


CROWD_STREAM = stream_of(300, max_steps=300)
CROWD_QUEUE = 3
"""Messages that the crowd's sockets hold for a client that does not read."""


class Crowd(RuleBasedStateMachine):
    """Clients that read, pause or never read, more than there are sessions, and a server without sockets.

    A plain client that keeps reading gets all batches and then the end marker. A client with an end marker has
    everything.
    """

    clients = st.sampled_from([b"%d" % number for number in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.cursors = cursors_of(CROWD_STREAM, max_clients=2)
        self.queues: dict[bytes, list[int]] = {}
        self.received: dict[bytes, list[int]] = {}
        self.asked: set[bytes] = set()
        self.now_s = 0.0

    @rule(client=clients)
    def ask(self, client: bytes) -> None:
        ask(self.cursors, 0, client)
        self.queues[client], self.received[client] = [], []
        self.asked.add(client)

    @rule(sends=st.integers(1, 40))
    def serve(self, sends: int) -> None:
        """Serve one slice as ``ZmqReplayServer`` does."""
        for client in self.cursors.clients:
            while client in self.cursors.clients:
                message = self.cursors.message(client)
                assert message is not None
                if len(self.queues[client]) >= CROWD_QUEUE:
                    self.cursors.on_full(client, self.now_s)
                    break
                if not sends:
                    return
                sends -= 1
                self.queues[client].append(int.from_bytes(message[-2], "big", signed=True))
                if self.cursors.on_sent(client):
                    break
            self.cursors.rotate(client)

    @rule(client=clients, count=st.integers(1, 400))
    def read(self, client: bytes, count: int) -> None:
        queue = self.queues.get(client, [])
        self.received.get(client, []).extend(queue[:count])
        del queue[:count]

    @rule(seconds=st.floats(0.1, 3.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def no_end_marker_comes_early(self) -> None:
        for client in self.asked:
            got = [*self.received[client], *self.queues[client]]
            assert got == [*range(300), -1][: len(got)]

    @invariant()
    def there_are_never_more_open_than_places(self) -> None:
        assert len(self.cursors) <= 2

    @rule(client=clients)
    def ask_and_read_on(self, client: bytes) -> None:
        """However many clients are stuck or slow, a new client that reads gets everything in bounded time."""
        self.ask(client)
        began_s = self.now_s
        while self.received[client][-1:] != [-1]:
            self.serve(40)
            self.read(client, 400)
            for other in self.asked - {client}:
                self.read(other, 1)  # slow reading, which is hardly progress
            self.now_s += 0.05  # 60 messages per second: twice the rate that counts as stuck
            assert self.now_s - began_s < 20.0


def test_a_waiting_client_that_requests_again_is_served_in_its_turn() -> None:
    crowd = Crowd()
    for client in (b"0", b"1", b"2", b"3", b"4"):
        crowd.ask(client)
    crowd.ask_and_read_on(b"2")


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(deadline=None, max_examples=30, stateful_step_count=20)


def stream_of_runs(count: int, *, max_steps: int) -> EventStream:
    """Batches of 250 KB, so that about ten of the snapshot fit into the largest message."""
    stream = EventStream(epoch=EPOCH, max_steps=max_steps, max_bytes=10**9)
    for number in range(count):
        hashes = tuple(range(number * 50, number * 50 + 50))
        stream.append(ENCODER.encode(KVEventBatch(1.0, (BlockStored(hashes, None, (2**31,) * 50_000, 1000, None),)), 0))
        stream.fold_oldest()
    return stream


@pytest.mark.parametrize("behind", [3, 6, 20])
def test_a_large_snapshot_is_sent_in_bounded_messages_below_the_buffer(behind: int) -> None:
    stream = stream_of_runs(25, max_steps=5)
    cursors = cursors_of(stream)
    ask(cursors, stream.first - behind)
    messages = answer(cursors)
    assert max(len(message[-1]) for message in messages) <= 2 * 1024 * 1024 + 64
    assert numbers(messages)[-6:] == [20, 21, 22, 23, 24, -1]
    assert numbers(messages)[:-1] == list(range(20 - (len(messages) - 6), 25))
    assert len(messages) - 6 in range(1, behind + 1)
    assert sorted(hashes(messages)) == list(range(25 * 50))
    assert BatchDecoder().decode(messages[0][-1]).events[0] == AllBlocksCleared()


def test_a_snapshot_that_does_not_fit_below_the_buffer_shows_as_a_gap() -> None:
    stream = stream_of_runs(25, max_steps=5)
    cursors = cursors_of(stream)
    ask(cursors, stream.first - 2)
    assert numbers(answer(cursors)) == [20, 21, 22, 23, 24, -1]
    assert (cursors.num_truncated, stream.pins) == (1, 0)


def test_a_step_of_an_answer_builds_a_bounded_part_of_a_large_message() -> None:
    """Ten runs that each lack a block are read and encoded again, but not all in one call."""
    stream = stream_of_runs(11, max_steps=1)
    stream.append(ENCODER.encode(KVEventBatch(1.0, (BlockRemoved(tuple(range(7, 500, 50))),)), 0))
    stream.append(ENCODER.encode(KVEventBatch(1.0, ()), 0))
    stream.fold_oldest()
    (chunks,) = [each for each in stream.plan_snapshot(max_chunks=10) if each is not None]
    steps = [list(stream.encode_chunk(chunk, ENCODER, 0, clear=False)) for chunk in chunks]
    assert max(len(chunk) for chunk in chunks) >= 6
    assert all(len(each) >= len(chunk) / 2 for each, chunk in zip(steps, chunks, strict=True))


@pytest.mark.parametrize("request_", [ReplayRequest(0), ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN)])
def test_only_the_first_chunk_of_a_snapshot_clears(request_: ReplayRequest) -> None:
    cursors = cursors_of(stream_of_runs(60, max_steps=2))
    ask(cursors, request_)
    batches = [BatchDecoder().decode(message[-1]) for message in answer(cursors) if message[-2] != END_SEQ]
    clears = [sum(isinstance(event, AllBlocksCleared) for event in batch.events) for batch in batches]
    assert len(clears) > 4
    assert (clears[0], isinstance(batches[0].events[0], AllBlocksCleared), sum(clears)) == (1, True, 1)


def test_every_answer_that_is_cut_is_counted() -> None:
    cursors = cursors_of(stream_of(3), max_clients=2)
    for client in (b"a", b"b", b"c", b"d"):
        ask(cursors, 0, client)
    for client, gives_way in ((b"a", b"c"), (b"b", b"d")):
        cursors.on_full(client, 0.0)
        assert client in cursors.clients
        cursors.on_full(client, 60.0)
        assert client not in cursors.clients
        assert gives_way in cursors.clients
    assert cursors.num_truncated == 2
    cursors.end_all()
    assert cursors.num_truncated == 4


def test_clients_are_served_one_after_the_other_and_a_lost_one_is_forgotten() -> None:
    cursors = cursors_of(stream_of(3))
    for client in (b"a", b"b"):
        ask(cursors, 0, client)
    cursors.rotate(b"a")
    assert cursors.clients == (b"b", b"a")
    cursors.drop(b"b")
    cursors.drop(b"never seen")
    assert cursors.clients == (b"a",)


def meta_of(message: tuple[bytes, ...]) -> ReplayMeta:
    assert message[-2] == END_SEQ
    return ReplayMeta.decode(message[-1])


def chain_through(stream: EventStream, stop: int) -> bytes:
    chain = initial_digest(EPOCH)
    for sequence in range(stop):
        chain = digest_after(chain, sequence, stream.payload(sequence))
    return chain


def test_status_reports_the_position_of_the_stream() -> None:
    stream = stream_of(5)
    cursors = cursors_of(stream)
    ask(cursors, ReplayRequest(3, ReplayVerb.STATUS, TOKEN, EPOCH))
    (message,) = answer(cursors)
    assert meta_of(message) == ReplayMeta(TOKEN, EPOCH, 0, 5, ReplayMetaKind.STATUS, False, 3, chain_through(stream, 3))


@pytest.mark.parametrize("start", [0, 3, 5])
def test_sync_within_the_replay_buffer_is_incremental(start: int) -> None:
    stream = stream_of(5)
    cursors = cursors_of(stream)
    ask(cursors, ReplayRequest(start, ReplayVerb.SYNC, TOKEN, EPOCH))
    begin, *batches, end = answer(cursors)
    assert meta_of(begin) == ReplayMeta(
        TOKEN, EPOCH, 0, 5, ReplayMetaKind.BEGIN, False, start, chain_through(stream, start)
    )
    assert numbers(batches) == list(range(start, 5))
    assert meta_of(end) == ReplayMeta(TOKEN, EPOCH, 0, 5, ReplayMetaKind.END, False, 5, stream.digest)


@pytest.mark.parametrize(
    ("request_", "folded"),
    [
        (ReplayRequest(0, ReplayVerb.SYNC, TOKEN, EPOCH), 5),  # older than the replay buffer
        (ReplayRequest(99, ReplayVerb.SYNC, TOKEN, EPOCH), 5),  # from the future
        (ReplayRequest(6, ReplayVerb.SYNC, TOKEN, bytes(16)), 5),  # of another epoch
        (ReplayRequest(6, ReplayVerb.SNAPSHOT, TOKEN, EPOCH), 5),  # wanted
        (
            ReplayRequest(1, ReplayVerb.SYNC, TOKEN, bytes(16)),
            0,
        ),  # nothing is folded yet: an empty snapshot, then the buffer
    ],
)
def test_otherwise_sync_is_the_snapshot_and_then_the_buffer(request_: ReplayRequest, folded: int) -> None:
    stream = stream_of(8, max_steps=8 - folded)
    cursors = cursors_of(stream)
    ask(cursors, request_)
    messages = answer(cursors)
    metas = [meta_of(message) for message in messages if message[-2] == END_SEQ]
    assert [(meta.kind, meta.snap, meta.start) for meta in metas] == [
        (ReplayMetaKind.BEGIN, True, folded), (ReplayMetaKind.BEGIN, False, folded), (ReplayMetaKind.END, False, 8)
    ]  # fmt: skip
    assert numbers(messages) == [-1, 0, -1, *range(folded, 8), -1]
    assert hashes(messages) == list(range(1, 9))


def test_a_snapshot_is_pinned_while_it_is_cut_into_chunks_or_until_its_client_leaves() -> None:
    stream = stream_of(8, max_steps=3)
    cursors = cursors_of(stream)
    for client in (b"c", b"leaves"):
        ask(cursors, ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH), client)
    add(stream, 3)
    assert (stream.first, stream.pins) == (5, 2)
    cursors.on_sent(b"c")
    assert stream.pins == 1
    cursors.drop(b"leaves")
    assert stream.pins == 0


def test_clients_that_join_together_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_SEGMENTS_PER_STEP", 10)
    stream = stream_of(208, max_steps=8)
    cursors = cursors_of(stream)
    clients = [b"%d" % number for number in range(8)]
    for client in clients:
        ask(cursors, ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH), client)
        cursors.on_sent(client)
    num_steps = 0
    while stream.pins:
        for client in clients:
            if cursors.message(client) is None:
                num_steps += 1
                cursors.on_sent(client)
    assert num_steps <= 200 / 10 + 1 + len(clients)
    add(stream, 4)
    ask(cursors, ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH), b"later")
    assert [hashes(answer(cursors, client)) for client in clients] == [list(range(1, 209))] * 8
    assert hashes(answer(cursors, b"later")) == list(range(1, 213))
    assert stream.pins == 0


def test_the_stream_keeps_the_batches_of_an_answer_until_they_are_sent_or_its_client_leaves() -> None:
    stream = stream_of(8, max_steps=3)
    cursors = cursors_of(stream)
    for client in (b"c", b"leaves"):
        ask(cursors, ReplayRequest(5, ReplayVerb.SYNC, TOKEN, EPOCH), client)
    add(stream, 2)
    assert (stream.first, stream.oldest) == (7, 5)
    assert numbers(answer(cursors)) == [-1, 5, 6, 7, -1]
    assert stream.oldest == 5
    cursors.drop(b"leaves")
    assert stream.holds == {}
    stream.fold_oldest()
    assert stream.oldest == stream.first == 7


@pytest.mark.parametrize("verb", [ReplayVerb.SYNC, ReplayVerb.SNAPSHOT])
def test_the_buffer_and_the_batches_of_open_answers_have_at_most_twice_the_bounds(verb: ReplayVerb) -> None:
    """Clients that never read join one after the other. Without a bound each would keep a whole buffer."""
    stream = EventStream(epoch=EPOCH, max_steps=20, max_bytes=10**9)
    cursors = cursors_of(stream)
    add(stream, 60)
    for number in range(30):
        ask(cursors, ReplayRequest(stream.first, verb, TOKEN, EPOCH), b"%d" % number)
        for _ in range(7):
            add(stream, 1)
            if stream.has_stuck_pins:
                cursors.cancel_pinned()
            assert stream.next_sequence - stream.oldest <= 2 * 20 + 1
    assert len(cursors) == 30


def test_only_clients_that_are_too_slow_are_cut() -> None:
    stream = stream_of(30, max_steps=5)
    cursors = cursors_of(stream)
    ask(cursors, 0, b"slow and plain")
    ask(cursors, ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH), b"slow")
    cursors.on_sent(b"slow")
    add(stream, 4)
    ask(cursors, 29, b"prompt")
    add(stream, 2)
    assert (stream.first, stream.oldest) == (31, 26)
    cursors.cancel_pinned()
    # A plain client would read an end marker as the complete answer.
    assert [numbers(answer(cursors, client)) for client in (b"slow", b"slow and plain")] == [[-1], []]
    assert numbers(answer(cursors, b"prompt")) == [*range(29, 34), -1]
    assert (stream.pins, cursors.num_truncated) == (0, 2)


def test_a_buffer_that_overtakes_its_last_batch_does_not_break_an_extended_answer() -> None:
    stream = stream_of(4, max_steps=3)
    cursors = cursors_of(stream)
    ask(cursors, ReplayRequest(2, ReplayVerb.SYNC, TOKEN, EPOCH))
    end_digest = stream.digest
    for _ in range(2):
        cursors.on_sent(b"c")
    add(stream, 10)  # the last batch waits for a slow client
    assert numbers(answer(cursors)) == [3, -1]
    ask(cursors, ReplayRequest(2, ReplayVerb.SYNC, TOKEN, EPOCH))
    metas = [ReplayMeta.decode(message[-1]) for message in answer(cursors) if message[-2] == END_SEQ]
    assert [meta.kind for meta in metas] == [ReplayMetaKind.BEGIN, ReplayMetaKind.BEGIN, ReplayMetaKind.END]
    assert metas[-1].chain != end_digest


def test_a_replayed_snapshot_reports_its_number_of_chunks() -> None:
    cursors = cursors_of(stream_of(4, max_steps=2))
    ask(cursors, ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN))
    metas = [ReplayMeta.decode(message[-1]) for message in answer(cursors) if message[-2] == END_SEQ]
    assert [meta.chunks for meta in metas] == [None, 1, None]


# A client that keeps the snapshot from folding is cut, and gets everything with its next request.


CLIENT = b"c"
MAX_STEPS = 200


class Turns:
    """The turns of a publisher without sockets: append, fold, cut, serve a slice."""

    def __init__(self) -> None:
        self.stream = EventStream(epoch=EPOCH, max_steps=MAX_STEPS, max_bytes=10**9)
        self.encoder = BatchEncoder()
        self.cursors = ReplaySessions(self.stream, encoder=self.encoder, rank=0)
        self.answer: list[tuple[bytes, ...]] = []

    def take(self, *, batches: int, sends: int) -> None:
        for _ in range(batches):
            block = self.stream.next_sequence + 1
            event = BlockStored((block,), None, (block,), 1, None)
            self.stream.append(self.encoder.encode(KVEventBatch(1.0, (event,)), 0))
        self.stream.fold_oldest()
        if self.stream.has_stuck_pins:
            self.cursors.cancel_pinned()
        for _ in range(sends):
            if CLIENT in self.cursors.clients:
                message = self.cursors.message(CLIENT)
                self.answer += [] if message is None else [message]
                self.cursors.on_sent(CLIENT)

    def ask(self, request: ReplayRequest) -> None:
        self.answer = []
        self.cursors.receive([CLIENT, b"", request.encode()])

    @property
    def is_answered(self) -> bool:
        return bool(self.answer) and self.answer[-1][-2] == END_SEQ and CLIENT not in self.cursors.clients

    def blocks(self) -> list[int]:
        batches = [BatchDecoder().decode(each[-1]) for each in self.answer if each[-2] != END_SEQ]
        return [
            block
            for batch in batches
            for event in batch.events
            if isinstance(event, BlockStored)
            for block in event.block_hashes
        ]


@pytest.mark.parametrize("batches", [1, 8], ids=["a batch a turn", "bursts"])
@pytest.mark.parametrize(
    "request_", [ReplayRequest(0), ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH)], ids=["plain", "snapshot"]
)
def test_a_client_that_was_cut_and_requests_again_immediately_gets_everything(
    batches: int, request_: ReplayRequest
) -> None:
    turns = Turns()
    for _ in range(60):
        turns.take(batches=8, sends=0)
    turns.ask(request_)
    for _ in range(MAX_STEPS + 1):
        turns.take(batches=batches, sends=0)
    assert turns.cursors.num_truncated == 1
    for _ in range(10):
        turns.ask(request_)
        held = turns.stream.next_sequence
        for _ in range(200):
            turns.take(batches=batches, sends=32)
            if turns.is_answered:
                break
        assert turns.blocks()[:held] == list(range(1, held + 1))
    assert turns.cursors.num_truncated == 1


@pytest.mark.parametrize(
    "request_", [ReplayRequest(0), ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH)], ids=["plain", "snapshot"]
)
@settings(deadline=None, max_examples=10)
@example(batches=1, sends=16)
@example(batches=20, sends=16)
@given(batches=st.integers(1, 20), sends=st.integers(16, 96))
def test_a_client_that_joins_a_full_buffer_gets_everything_while_batches_continue(
    request_: ReplayRequest, batches: int, sends: int
) -> None:
    """The fold of each turn takes away the oldest batch: the one with which the answer begins."""
    turns = Turns()
    for _ in range(75):
        turns.take(batches=8, sends=0)
    turns.ask(request_)
    for _ in range(2 + (MAX_STEPS + 10 * batches) // sends + 10):
        turns.take(batches=batches, sends=sends)
        if turns.is_answered:
            break
    assert turns.is_answered
    assert turns.cursors.num_truncated == 0
    assert len(turns.blocks()) >= 600
    assert turns.blocks() == list(range(1, len(turns.blocks()) + 1))


def test_a_plain_client_gets_the_snapshot_at_most_once_more_however_slow_it_is() -> None:
    turns = Turns()
    for _ in range(75):
        turns.take(batches=8, sends=0)
    turns.ask(ReplayRequest(0))
    for _ in range(600):
        turns.take(batches=8, sends=1)
        if turns.is_answered:
            break
    assert turns.is_answered
    batches = [BatchDecoder().decode(each[-1]) for each in turns.answer[:-1]]
    assert sum(isinstance(event, AllBlocksCleared) for batch in batches for event in batch.events) == 2
    assert set(turns.blocks()) >= set(range(1, 601))


def test_a_plain_client_overtaken_by_the_replay_buffer_gets_the_snapshot() -> None:
    stream = stream_of(3, max_steps=3)
    cursors = cursors_of(stream)
    ask(cursors, 0)
    first = cursors.message(b"c")
    assert first is not None
    cursors.on_sent(b"c")
    add(stream, 10)
    messages = [first, *answer(cursors)]
    assert messages[-1][-2] == END_SEQ
    assert set(hashes(messages)) >= {1, 2, 3}
    assert numbers(messages)[:-1] == sorted(numbers(messages)[:-1])
