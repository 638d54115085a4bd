"""A signal handler raises anywhere in a stream, its snapshot or its answers.

Property: when the call is repeated, stream and snapshot are those of the history, and every later answer is complete.
"""

from __future__ import annotations

from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.interruptions import InterruptedAtCallError, interrupted_at_call, until_done
from kit.searches import num_examples

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream, replay, snapshot, stream
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest, ReplayVerb
from scheduler_components.kv_events.snapshot import StreamSnapshot
from scheduler_components.kv_events.stream_digest import digest_after, initial_digest
from scheduler_components.testing import EventLedger

EPOCH, TOKEN = bytes(16), bytes(8)
ENCODER = BatchEncoder()

BLOCKS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple)
EVENTS = st.one_of(
    BLOCKS.map(lambda hashes: BlockStored(hashes, None, hashes, 1, None)),
    BLOCKS.map(BlockRemoved),
    st.just(AllBlocksCleared()),
)
HISTORIES = st.lists(st.lists(EVENTS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)
Events = tuple[KVCacheEvent, ...]


def new_stream(shared_bytes: int, max_steps: int) -> EventStream:
    with mock.patch.object(stream, "StreamSnapshot", lambda: StreamSnapshot(shared_bytes=shared_bytes)):
        return EventStream(epoch=EPOCH, max_steps=max_steps, max_bytes=10**6)


def blocks_of(history: list[Events]) -> object:
    ledger = EventLedger()
    for events in history:
        ledger.apply_all(events)
    return ledger.blocks()


def publish(events: Events, kept: EventStream) -> None:
    kept.append(*ENCODER.encode_with_changes(KVEventBatch(0.0, events), 0))
    kept.fold_oldest()


def read(kept: EventStream) -> object:
    """Return the blocks of a reader that joins now."""
    (chunks,) = [each for each in kept.plan_snapshot() if each is not None]
    payloads = [
        payload
        for number, chunk in enumerate(chunks)
        for payload in kept.encode_chunk(chunk, ENCODER, 0, clear=number == 0)
        if payload is not None
    ]
    payloads += [kept.payload(sequence) for sequence in range(kept.first, kept.next_sequence)]
    return blocks_of([BatchDecoder().decode(payload).events for payload in payloads])


def check_numbers(kept: EventStream) -> None:
    """Judge what follows from the batches: their bytes and their digests."""
    payloads = [kept.payload(sequence) for sequence in range(kept.first, kept.next_sequence)]
    assert kept.buffered_bytes == sum(map(len, payloads))
    digest = kept.digest_before(kept.first)
    for sequence in range(kept.first, kept.next_sequence):
        assert kept.digest_before(sequence) == digest
        digest = digest_after(digest, sequence, kept.payload(sequence))
    assert kept.digest == digest
    if kept.first == 0:
        assert kept.digest_before(0) == initial_digest(EPOCH)


@settings(deadline=None, max_examples=num_examples(5))
@example(history=[(BlockStored((1, 2), None, (1, 2), 1, None),), (BlockRemoved((1,)),)] * 4, number=60, shared_bytes=1)
@given(history=HISTORIES, number=st.integers(1, 400), shared_bytes=st.sampled_from([1, 60, 10_000]))
def test_an_interrupted_stream_is_the_stream_of_its_history(
    history: list[Events], number: int, shared_bytes: int
) -> None:
    kept = new_stream(shared_bytes, max_steps=2)
    applied: list[Events] = []
    with interrupted_at_call(number, stream, snapshot):
        for events in history:
            applied.append(events)
            try:
                publish(events, kept)
            except InterruptedAtCallError:
                assert read(kept) in (
                    blocks_of(applied),
                    blocks_of(applied[:-1]),
                )  # a reader joins before the next call
                publish(events, kept)
    check_numbers(kept)
    assert read(kept) == blocks_of(history)
    publish((AllBlocksCleared(),), kept)
    publish((), kept)
    publish((), kept)
    assert kept.num_snapshot_blocks == 0


REQUESTS = st.sampled_from([ReplayRequest(0), ReplayRequest(0, ReplayVerb.SNAPSHOT, TOKEN, EPOCH)])


def serve(sessions: ReplaySessions, kept: EventStream, limit: int = 500) -> dict[bytes, list[tuple[bytes, ...]]]:
    """Send one message to each client in turn until all have ended, while the publisher goes on."""
    sent: dict[bytes, list[tuple[bytes, ...]]] = {}
    while len(sessions) and limit:
        limit -= 1
        for client in sessions.clients:
            message = sessions.message(client)
            if message is not None:
                sent.setdefault(client, []).append(message)
            sessions.on_sent(client)
        kept.fold_oldest()
    assert limit, "an answer never ends"
    return sent


@settings(deadline=None, max_examples=num_examples(4))
@given(number=st.integers(1, 900), requests=st.lists(REQUESTS, min_size=1, max_size=3))
def test_answers_are_cut_or_complete_and_hold_nothing_after_an_interruption(
    number: int, requests: list[ReplayRequest]
) -> None:
    kept = new_stream(shared_bytes=60, max_steps=4)
    for block in range(12):
        publish((BlockStored((block,), None, (block,), 1, None),), kept)
    sessions = ReplaySessions(kept, encoder=ENCODER, rank=0)

    def ask() -> None:
        for client, request in enumerate(requests):
            sessions.receive([bytes([client]), b"", request.encode()])

    with interrupted_at_call(number, stream, replay, snapshot):
        until_done(ask)
        until_done(lambda: serve(sessions, kept))
    assert (kept.pins, kept.holds) == (0, {})
    publish((BlockStored((12,), None, (12,), 1, None),), kept)
    assert len(kept) == 4
    ask()
    sent = serve(sessions, kept)
    for client in range(len(requests)):
        messages = sent[bytes([client])]
        assert messages[-1][-2] == END_SEQ
        payloads = [message[-1] for message in messages if message[-2] != END_SEQ]
        assert blocks_of([BatchDecoder().decode(payload).events for payload in payloads]) == read(kept)
