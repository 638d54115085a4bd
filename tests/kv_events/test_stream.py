"""Folding and numbers of a stream: golden bytes, and a folded history has the state of the history."""

from __future__ import annotations

import gc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.events import UnknownEvent
from kit.searches import num_examples

from scheduler_components import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.events import MediumGroup, ValidatedEvents
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.kv_events.decoder import decode_event
from scheduler_components.kv_events.dialects import BlockChanges
from scheduler_components.kv_events.native_events import slice_raw_event
from scheduler_components.kv_events.snapshot import PayloadReader, RunSegment, StreamSnapshot, merge_batches
from scheduler_components.kv_events.stream import _FOLDS_PER_DRAIN as FOLDS_PER_DRAIN
from scheduler_components.kv_events.stream import _MAX_CHUNK_BYTES as MAX_CHUNK_BYTES
from scheduler_components.testing import EventLedger
from scheduler_components.testing.golden import DigestVector, digest_vectors
from scheduler_components.testing.strategies import events as any_events
from scheduler_components.testing.strategies import invalid_histories


@pytest.mark.parametrize("vector", digest_vectors(), ids=str)
def test_digests_are_the_golden_bytes(vector: DigestVector) -> None:
    first = vector.first_sequence
    stream = EventStream(epoch=bytes.fromhex(vector.epoch), max_steps=10, max_bytes=10**6, first_sequence=first)
    sequences = [stream.append(bytes.fromhex(payload)) for payload in vector.payloads]
    assert sequences == list(range(first, first + len(vector.payloads)))
    chains = [stream.digest_before(sequence).hex() for sequence in range(first, stream.next_sequence + 1)]
    assert chains == list(vector.chains)


@pytest.mark.parametrize("sequence", [-1, 2, 3, 8, 9])
def test_a_batch_outside_the_replay_buffer_is_an_error(sequence: int) -> None:
    stream = EventStream(epoch=bytes(16), max_steps=4, max_bytes=10**6)
    for _ in range(8):
        stream.append(b"\x93\xcb" + bytes(8) + b"\x90\x00")
        stream.fold_oldest()
    assert (stream.first, stream.next_sequence) == (4, 8)
    with pytest.raises(LookupError, match=f"batch {sequence} is not in the replay buffer of 4 to 7"):
        stream.payload(sequence)


# Folding: a reader of the folded state ends in the state of a reader of every event.


def ledger_after(*histories: list[KVEventBatch]) -> EventLedger:
    """A plain consumer that applies one block at a time."""
    ledger = EventLedger()
    for history in histories:
        for batch in history:
            ledger.apply_all(batch.events)
    return ledger


def applied(events: tuple[KVCacheEvent, ...], *before: list[KVEventBatch]) -> dict[tuple[MediumGroup, int], object]:
    return ledger_after(*before, [KVEventBatch(0.0, events)]).blocks()


def run(*hashes: int, parent: int | None = None) -> BlockStored:
    tokens = tuple(token for block_hash in hashes for token in (block_hash, block_hash + 1))
    return BlockStored(hashes, parent, tokens, 2, None)


PARENT_STORED_AGAIN = [KVEventBatch(0.0, (run(1, 2), BlockRemoved((1,)), run(1)))]
PARENT_COMES_LAST = [KVEventBatch(0.0, (run(5), run(2, parent=1), run(1)))]
FOREBEARS_COME_LAST = [
    KVEventBatch(0.0, (event,))
    for event in (run(1), run(2, parent=1), run(3, parent=2), BlockRemoved((1, 2)), run(2, parent=1), run(1))
]
CYCLE = [KVEventBatch(0.0, (run(1, parent=2), run(2, parent=1)))]


SHARED_BYTES = st.sampled_from([1, 100, 300, 10_000])
"""The references of a snapshot hold one batch, some, or all."""


def new_snapshot(shared_bytes: int) -> StreamSnapshot:
    """A snapshot whose references are rewritten as soon as half is gone."""
    return StreamSnapshot(shared_bytes=shared_bytes, max_gone_blocks=0)


def stored_event(segment: RunSegment[msgspec.Raw]) -> KVCacheEvent:
    event = segment.run.event
    return decode_event(bytes(event if segment.is_whole else slice_raw_event(event, segment.first, segment.stop)))


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@example(history=PARENT_STORED_AGAIN, dialect="array", with_changes=True, shared_bytes=10_000)
@example(history=CYCLE, dialect="array", with_changes=True, shared_bytes=1)
@given(
    history=invalid_histories(),
    dialect=st.sampled_from(DIALECTS),
    with_changes=st.booleans(),
    shared_bytes=SHARED_BYTES,
)
def test_a_folded_history_has_the_state_of_the_history(
    history: list[KVEventBatch], dialect: str, shared_bytes: int, *, with_changes: bool
) -> None:
    encoder, decoder = BatchEncoder(dialect), BatchDecoder()
    state = new_snapshot(shared_bytes)
    for batch in history:
        payload, changes = encoder.encode_with_changes(batch, 0)
        state.fold(payload, changes if with_changes else None)
    expected = ledger_after(history).blocks()
    events = [stored_event(segment) for segment in state.segments()]
    decoded = decoder.decode(encoder.encode(KVEventBatch(0.0, tuple(events)), 0))
    assert decoded.errors == ()
    assert applied(decoded.events) == expected
    assert len(state) == len(expected)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@example(before=[], history=PARENT_STORED_AGAIN)
@given(before=invalid_histories(), history=invalid_histories())
def test_a_collapsed_queue_ends_where_the_queue_ends(before: list[KVEventBatch], history: list[KVEventBatch]) -> None:
    one = merge_batches(history)
    assert (one is None) == (not history)
    if one is not None:
        assert applied(one.events, before) == ledger_after(before, history).blocks()
        assert one.ts == history[-1].ts


@settings(deadline=None)
@example(history=PARENT_STORED_AGAIN, shared_bytes=10_000)
@example(history=PARENT_STORED_AGAIN, shared_bytes=1)
@example(history=PARENT_COMES_LAST, shared_bytes=1)
@example(history=FOREBEARS_COME_LAST, shared_bytes=1)
@example(history=FOREBEARS_COME_LAST, shared_bytes=100)
@given(history=invalid_histories(), shared_bytes=SHARED_BYTES)
def test_parents_precede_children(history: list[KVEventBatch], shared_bytes: int) -> None:
    state = new_snapshot(shared_bytes)
    for batch in history:
        state.fold(BatchEncoder().encode(batch, 0))
    standing = ledger_after(history).blocks()
    parents = {key: block.parent for key, block in standing.items()}
    seen: set[tuple[object, int]] = set()
    for segment in state.segments():
        place = segment.run.location[:2]
        first = segment.run.block_hashes[segment.first]
        above = segment.parent
        if above is not None and (place, above) in standing and not _in_cycle(parents, place, first):
            assert (place, above) in seen
        blocks = {(place, each) for each in segment.run.block_hashes[segment.first : segment.stop]}
        assert not blocks & seen
        seen |= blocks
    assert seen == standing.keys()


def _in_cycle(parents: dict[tuple[MediumGroup, int], int | None], place: MediumGroup, block_hash: int) -> bool:
    """Return True for a cyclic history, which has no order with parents first. Only a hostile peer sends one."""
    visited: set[int] = set()
    above: int | None = block_hash
    while above is not None and above not in visited:
        visited.add(above)
        above = parents.get((place, above))
    return above is not None


@settings(deadline=None)
@example(steps=[("pin", 0), *[("append", 3)] * 20, ("unpin", 0), *[("append", 1)] * 3], max_steps=2, max_bytes=10**6)
@example(steps=[("append", 9)] * 6, max_steps=100, max_bytes=300)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["append", "append", "append", "pin", "unpin"]), st.integers(1, 9))),
    max_steps=st.integers(1, 5),
    max_bytes=st.integers(1, 600),
)
def test_the_replay_buffer_is_bounded_and_its_bytes_are_counted(
    steps: list[tuple[str, int]], max_steps: int, max_bytes: int
) -> None:
    stream = EventStream(epoch=bytes(16), max_steps=max_steps, max_bytes=max_bytes)
    encoder, counts = BatchEncoder("array"), [0]
    for what, count in steps:
        stream.pins = {"pin": 1, "unpin": 0}.get(what, stream.pins)
        if what == "append":
            hashes = tuple(range(sum(counts), sum(counts) + count))
            counts.append(count)
            stored = KVEventBatch(1.0, (BlockStored(hashes, None, (1,) * count, 1, None),))
            stream.append(*encoder.encode_with_changes(stored, 0))
        first = stream.first
        stream.fold_oldest()
        assert stream.first - first <= (0 if stream.pins else 1 + FOLDS_PER_DRAIN)
        kept = [len(stream.payload(sequence)) for sequence in range(stream.first, stream.next_sequence)]
        assert stream.buffered_bytes == sum(kept)
        fits = len(kept) <= max_steps and (sum(kept) <= max_bytes or len(kept) == 1)
        assert stream.is_over_limit == (bool(kept) and not fits)
    stream.pins = 0
    while stream.is_over_limit:
        stream.fold_oldest()
    assert stream.num_snapshot_blocks == sum(counts[: stream.first + 1])


def test_one_drain_folds_what_a_pin_has_held_back() -> None:
    stream = EventStream(epoch=bytes(16), max_steps=2, max_bytes=10**6)
    stream.pins = 1
    for number in range(8):
        stream.append(BatchEncoder("array").encode(KVEventBatch(float(number), ()), 0))
    stream.pins = 0
    stream.fold_oldest()
    assert not stream.is_over_limit


def test_a_snapshot_fits_into_as_few_messages_as_it_needs() -> None:
    stream = EventStream(epoch=bytes(16), max_steps=1, max_bytes=10**9)
    encoder = BatchEncoder("array")
    for number in range(1, 100):
        tokens = tuple(range(2**31, 2**31 + 9_000))
        stored = KVEventBatch(1.0, (BlockStored((number,), None, tokens, 9_000, None),))
        stream.append(*encoder.encode_with_changes(stored, 0))
        stream.fold_oldest()

    def num_chunks(most: int | None) -> int:
        *_, chunks = stream.plan_snapshot(max_chunks=most)
        assert chunks is not None
        return len(chunks)

    num_bytes = stream.num_snapshot_bytes
    least = min(most for most in range(1, 50) if num_chunks(most))
    assert num_chunks(None) > least > 1
    assert [num_chunks(least - 1), num_chunks(least), num_chunks(num_chunks(None))] == [0, least, num_chunks(None)]
    assert least == -(-num_bytes // MAX_CHUNK_BYTES)


def test_chunks_are_as_large_as_the_stream_is_asked_for() -> None:
    encoder = BatchEncoder("array")
    lengths = {}
    for chunk_bytes in (40, 600):
        stream = EventStream(epoch=bytes(16), max_steps=1, max_bytes=10**9, chunk_bytes=chunk_bytes)
        for number in range(100):
            batch = KVEventBatch(1.0, (BlockStored((number,), None, (number,), 1, None),))
            stream.append(*encoder.encode_with_changes(batch, 0))
            stream.fold_oldest()
        *_, chunks = stream.plan_snapshot()
        assert chunks is not None
        lengths[chunk_bytes] = [sum(len(each) for each in chunk) for chunk in chunks]  # type: ignore[arg-type]
        assert max(lengths[chunk_bytes]) <= chunk_bytes
    assert len(lengths[40]) > 5 * len(lengths[600]) > 5


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@given(events=any_events(), dialect=st.sampled_from(DIALECTS), are_checked=st.booleans())
def test_the_changes_of_the_encoder_equal_those_of_the_payload(
    joined: Callable[[BlockChanges], object], events: tuple[KVCacheEvent, ...], dialect: str, *, are_checked: bool
) -> None:
    batch = KVEventBatch(1.0, ValidatedEvents(events) if are_checked else events)
    encoder = BatchEncoder(dialect)
    payload, changes = encoder.encode_with_changes(batch, 0)
    assert payload == encoder.encode(batch, 0)
    assert changes is not None or dialect == "native"
    if changes is not None:
        assert joined(changes) == joined(PayloadReader().changes(payload))


@pytest.mark.parametrize("events_per_batch", [1, 16])
def test_no_more_gone_blocks_than_cached_ones_are_kept(events_per_batch: int) -> None:
    """One of sixteen blocks of each batch stays. Whole batches would keep sixteen times its bytes."""
    encoder, snapshot = BatchEncoder(), StreamSnapshot(shared_bytes=4_096)

    def fold(*events: KVCacheEvent) -> None:
        snapshot.fold(*encoder.encode_with_changes(KVEventBatch(0.0, events), 0))

    for hashes in (range(16_000), range(16_000, 32_000)):  # twice: a wrong count shows in the second round
        for first in hashes[::events_per_batch]:
            fold(*(run(block_hash) for block_hash in range(first, first + events_per_batch)))
        num_bytes = snapshot.num_bytes
        for first_gone, last_gone in ((4, 15), (1, 3)):  # twice: a rewritten reference is rewritten again
            for stays in hashes[::16]:
                fold(BlockRemoved(tuple(range(stays + first_gone, stays + last_gone + 1))))
            for _ in range(500):
                fold()
        assert len(snapshot) == len(hashes) / 16
        assert 0 < snapshot.num_bytes < 1.1 * (num_bytes / 16 * 2 + 1_000 * num_bytes / len(hashes))
        fold(BlockRemoved(tuple(hashes[::16])))
        assert len(snapshot) == 0
        assert 0 <= snapshot.num_bytes < 4_096  # of the reference that gathers payloads


def test_an_unknown_event_changes_nothing_and_hides_nothing() -> None:
    known = [["BlockStored", [1], None, [7], 1, None], ["BlockRemoved", [1]]]
    payload = msgspec.msgpack.encode([1.0, [known[0], ["Unheard", [2]], known[1]], 0])
    assert [change.kind for change in PayloadReader().changes(payload)] == [BlockStored, BlockRemoved]


@pytest.mark.parametrize("events_per_batch", [1, 40, 400])
def test_no_payload_is_decoded_if_blocks_leave_in_order(events_per_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that leave in the order of storing soon empty their reference, so rewriting it would be useless."""
    read: list[bytes] = []
    runs = PayloadReader.runs
    monkeypatch.setattr(PayloadReader, "runs", lambda self, content: read.append(content) or runs(self, content))
    monkeypatch.setattr(PayloadReader, "changes", lambda self, payload: read.append(payload))
    encoder, snapshot = BatchEncoder(), StreamSnapshot()
    for first in range(0, 100 * events_per_batch, events_per_batch):
        hashes = range(first, first + events_per_batch)
        gone = BlockRemoved(tuple(each - 30 * events_per_batch for each in hashes))
        batch = KVEventBatch(0.0, (*(run(each) for each in hashes), gone))
        snapshot.fold(*encoder.encode_with_changes(batch, 0))
    assert len(snapshot) == 30 * events_per_batch
    assert not read


@pytest.mark.parametrize("max_steps", [10, 10_000], ids=["snapshot", "replay buffer"])
def test_the_garbage_collector_walks_neither_buffer_nor_snapshot(max_steps: int) -> None:
    encoder = BatchEncoder()
    stream = EventStream(epoch=bytes(16), max_steps=max_steps, max_bytes=10**7)
    gc.collect()
    num_walked = len(gc.get_objects())
    for number in range(5_000):
        batch = KVEventBatch(0.0, (run(2 * number), run(2 * number + 1, parent=2 * number)))
        stream.append(*encoder.encode_with_changes(batch, 0))
        stream.fold_oldest()
    gc.collect()
    assert stream.num_snapshot_blocks > 9_000 or len(stream) == 5_000
    assert len(gc.get_objects()) - num_walked < 100


def test_collapse_keeps_unknown_events_for_the_encoder_to_refuse() -> None:
    one = merge_batches([KVEventBatch(1.0, (UnknownEvent(), BlockRemoved((1,))))])
    assert one is not None
    assert [type(event).__name__ for event in one.events] == ["UnknownEvent", "BlockRemoved"]


@settings(deadline=None)
@given(
    history=invalid_histories(),
    max_steps=st.integers(1, 4),
    max_bytes=st.integers(1, 300),
    max_chunks=st.none() | st.integers(1, 2),
)
def test_snapshot_plus_replay_buffer_is_the_whole_state(
    history: list[KVEventBatch], max_steps: int, max_bytes: int, max_chunks: int | None
) -> None:
    encoder, decoder = BatchEncoder(), BatchDecoder()
    stream = EventStream(epoch=bytes(16), max_steps=max_steps, max_bytes=max_bytes)
    for batch in history:
        stream.append(*encoder.encode_with_changes(batch, 0))
        stream.fold_oldest()
    (chunks,) = [each for each in stream.plan_snapshot(max_chunks=max_chunks) if each is not None]
    reader = ledger_after([KVEventBatch(0.0, (run(99),))])  # stale: the snapshot begins with a clear
    for number, chunk in enumerate(chunks):
        (payload,) = [each for each in stream.encode_chunk(chunk, encoder, 0, clear=number == 0) if each is not None]
        reader.apply_all(decoder.decode(payload).events)
    for sequence in range(stream.first, stream.next_sequence):
        reader.apply_all(decoder.decode(stream.payload(sequence)).events)
    assert reader.blocks() == ledger_after(history).blocks()
    assert len(stream) <= max_steps
    assert stream.buffered_bytes <= max_bytes or len(stream) == 1


@pytest.mark.parametrize(
    "removed",
    [
        BlockRemoved((1, 2)),
        BlockRemoved((1,), "CPU"),
        BlockRemoved((1,), None, 3),
        BlockRemoved((1,), "CPU", None, "REMOTE"),
        BlockRemoved((1,), "CPU", 2, "REMOTE", "SHARED"),
    ],
    ids=str,
)
def test_a_collapsed_removal_keeps_its_location(removed: BlockRemoved) -> None:
    one = merge_batches([KVEventBatch(1.0, (removed,)), KVEventBatch(2.0, ())])
    assert one is not None
    assert one.events == (removed,)


def test_a_parent_that_was_stored_again_precedes_its_child() -> None:
    parent, child = BlockStored((1,), None, (7,), 1, None), BlockStored((2,), 1, (8,), 1, None)
    one = merge_batches([KVEventBatch(1.0, (parent, child)), KVEventBatch(2.0, (BlockRemoved((1,)), parent))])
    assert one is not None
    stored = [event for event in one.events if isinstance(event, BlockStored)]
    assert stored == [parent, child]
