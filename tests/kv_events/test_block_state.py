"""Folding: whoever applies the folded state ends where whoever applied every event ends."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import (
    DIALECTS,
    BatchDecoder,
    BatchEncoder,
    BlockState,
    EventStream,
    Place,
    collapse,
)
from scheduler_components.kv_events.stream import fold_payload, segment_event
from scheduler_components.testing import EventLedger
from scheduler_components.testing.strategies import hostile_histories


def ledger_after(*histories: list[KVEventBatch]) -> EventLedger:
    """The plain consumer, who applies one block at a time."""
    ledger = EventLedger()
    for history in histories:
        for batch in history:
            ledger.apply_all(batch.events)
    return ledger


def applied(events: tuple[KVCacheEvent, ...], *before: list[KVEventBatch]) -> dict[tuple[Place, int], object]:
    return ledger_after(*before, [KVEventBatch(0.0, events)]).blocks()


def run(*hashes: int, parent: int | None = None) -> BlockStored:
    tokens = tuple(token for block_hash in hashes for token in (block_hash, block_hash + 1))
    return BlockStored(hashes, parent, tokens, 2, None)


PARENT_STORED_AGAIN = [KVEventBatch(0.0, (run(1, 2), BlockRemoved((1,)), run(1)))]
CYCLE = [KVEventBatch(0.0, (run(1, parent=2), run(2, parent=1)))]


@settings(deadline=None, max_examples=300)
@example(history=PARENT_STORED_AGAIN, dialect="array")
@example(history=CYCLE, dialect="array")
@given(history=hostile_histories(), dialect=st.sampled_from(DIALECTS))
def test_a_folded_history_stands_for_the_history(history: list[KVEventBatch], dialect: str) -> None:
    encoder, decoder = BatchEncoder(dialect), BatchDecoder()
    state: BlockState[bytes] = BlockState()
    for batch in history:
        fold_payload(state, encoder.encode(batch, 0))
    expected = ledger_after(history).blocks()
    events: list[KVCacheEvent] = [segment_event(segment) for segment in state.segments()]
    decoded = decoder.decode(encoder.encode(KVEventBatch(0.0, tuple(events)), 0))
    assert decoded.errors == ()
    assert applied(decoded.events) == expected
    assert len(state) == len(expected)


@settings(deadline=None, max_examples=300)
@example(before=[], history=PARENT_STORED_AGAIN)
@given(before=hostile_histories(), history=hostile_histories())
def test_a_collapsed_queue_ends_where_the_queue_ends(before: list[KVEventBatch], history: list[KVEventBatch]) -> None:
    merged = collapse(history)
    assert (merged is None) == (not history)
    if merged is not None:
        assert applied(merged.events, before) == ledger_after(before, history).blocks()
        assert merged.ts == history[-1].ts


@settings(deadline=None)
@example(history=PARENT_STORED_AGAIN)
@given(history=hostile_histories())
def test_parents_come_before_children(history: list[KVEventBatch]) -> None:
    state: BlockState[bytes] = BlockState()
    for batch in history:
        fold_payload(state, BatchEncoder().encode(batch, 0))
    standing = ledger_after(history).blocks()
    parents = {key: block.parent for key, block in standing.items()}
    seen: set[tuple[object, int]] = set()
    for segment in state.segments():
        place = segment.run.place
        first = segment.run.block_hashes[segment.first]
        above = segment.parent
        if above is not None and (place, above) in standing and not _in_cycle(parents, place, first):
            assert (place, above) in seen
        blocks = {(place, each) for each in segment.run.block_hashes[segment.first : segment.stop]}
        assert not blocks & seen
        seen |= blocks
    assert seen == standing.keys()


def _in_cycle(parents: dict[tuple[Place, int], int | None], place: Place, block_hash: int) -> bool:
    """Only a hostile history has one: no order puts its parents first."""
    visited: set[int] = set()
    above: int | None = block_hash
    while above is not None and above not in visited:
        visited.add(above)
        above = parents.get((place, above))
    return above is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_odd_event_leaves_the_others_of_its_batch_as_they_are(dialect: str) -> None:
    """A scheduler's unsigned hashes mean the same blocks in every batch, also beside a hash that is none."""
    unsigned = 2**64 - 5
    odd = BlockRemoved(("none",))  # type: ignore[arg-type]
    state: BlockState[bytes] = BlockState()
    for events in ((run(unsigned),), (odd, BlockRemoved((unsigned,)))):
        fold_payload(state, BatchEncoder(dialect).encode(KVEventBatch(0.0, events), 300))
    assert len(state) == 0
    fold_payload(state, BatchEncoder(dialect).encode(KVEventBatch(0.0, (odd,)), 300))
    assert len(state) == 0


def test_collapse_keeps_what_it_does_not_know_for_the_encoder_to_refuse() -> None:
    class Unknown(KVCacheEvent, frozen=True):
        pass

    merged = collapse([KVEventBatch(1.0, (Unknown(), BlockRemoved((1,))))])
    assert merged is not None
    assert [type(event).__name__ for event in merged.events] == ["Unknown", "BlockRemoved"]


@settings(deadline=None)
@given(
    history=hostile_histories(),
    max_steps=st.integers(1, 4),
    max_bytes=st.integers(1, 300),
    max_chunks=st.none() | st.integers(1, 2),
)
def test_base_plus_window_is_the_whole_state(
    history: list[KVEventBatch], max_steps: int, max_bytes: int, max_chunks: int | None
) -> None:
    encoder, decoder = BatchEncoder(), BatchDecoder()
    stream = EventStream(epoch=bytes(16), max_steps=max_steps, max_bytes=max_bytes)
    for batch in history:
        stream.append(encoder.encode(batch, 0))
        stream.fold_some()
    (chunks,) = [each for each in stream.plan_base(max_chunks=max_chunks) if each is not None]
    reader = ledger_after([KVEventBatch(0.0, (run(99),))])  # stale: the base begins with a clear
    for number, chunk in enumerate(chunks):
        reader.apply_all(decoder.decode(stream.encode_chunk(chunk, encoder, 0, clear=number == 0)).events)
    for sequence in range(stream.first, stream.next_sequence):
        reader.apply_all(decoder.decode(stream.payload(sequence)).events)
    assert reader.blocks() == ledger_after(history).blocks()
    assert len(stream) <= max_steps
    assert stream.kept_bytes <= max_bytes or len(stream) == 1
