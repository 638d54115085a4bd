"""Folding: whoever applies the folded state ends where whoever applied every event ends."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components.kv_events.block_state import BlockState, tier_of
from scheduler_components.kv_events.codec import DIALECTS, BatchDecoder, BatchEncoder
from scheduler_components.kv_events.event_stream import EventStream
from scheduler_components.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from scheduler_components.kv_events.folding import collapse, fold_payload, segment_event

MEDIA = (None, "GPU", "CPU")

Standing = dict[tuple[object, int], BlockStored]


def apply(standing: Standing, events: tuple[KVCacheEvent, ...]) -> Standing:
    """The plain consumer: one block at a time."""
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for index, block_hash in enumerate(event.block_hashes):
                tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
                one = BlockStored((block_hash,), parent, tokens, event.block_size, event.lora_id, event.medium)
                standing.pop((tier_of(event.medium), block_hash), None)
                standing[tier_of(event.medium), block_hash] = one
                parent = block_hash
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                standing.pop((tier_of(event.medium), block_hash), None)
        else:
            standing.clear()
    return standing


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    block_hashes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)))
    tokens = tuple(token for block_hash in block_hashes for token in (block_hash, block_hash + 1))
    return BlockStored(
        block_hashes, draw(st.none() | st.integers(1, 9)), tokens, 2, None, medium=draw(st.sampled_from(MEDIA))
    )


removed = st.builds(BlockRemoved, st.lists(st.integers(1, 9), max_size=4).map(tuple), medium=st.sampled_from(MEDIA))
histories = st.lists(st.lists(stored() | removed | st.just(AllBlocksCleared()), max_size=4), max_size=8).map(
    lambda batches: [KVEventBatch(float(number), tuple(events)) for number, events in enumerate(batches)]
)  # fmt: skip


def run(*hashes: int, parent: int | None = None) -> BlockStored:
    tokens = tuple(token for block_hash in hashes for token in (block_hash, block_hash + 1))
    return BlockStored(hashes, parent, tokens, 2, None)


PARENT_STORED_AGAIN = [KVEventBatch(0.0, (run(1, 2), BlockRemoved((1,)), run(1)))]
CYCLE = [KVEventBatch(0.0, (run(1, parent=2), run(2, parent=1)))]


@settings(deadline=None, max_examples=300)
@example(history=PARENT_STORED_AGAIN, dialect="array")
@example(history=CYCLE, dialect="array")
@given(history=histories, dialect=st.sampled_from(DIALECTS))
def test_a_folded_history_stands_for_the_history(history: list[KVEventBatch], dialect: str) -> None:
    encoder, decoder = BatchEncoder(dialect), BatchDecoder()
    state: BlockState[bytes] = BlockState()
    expected: Standing = {}
    for batch in history:
        fold_payload(state, encoder.encode(batch, 0))
        apply(expected, batch.events)
    events: list[KVCacheEvent] = [segment_event(segment) for segment in state.segments()]
    decoded = decoder.decode(encoder.encode(KVEventBatch(0.0, tuple(events)), 0))
    assert decoded.errors == ()
    assert apply({}, decoded.events) == expected
    assert len(state) == len(expected)


@settings(deadline=None, max_examples=300)
@example(before=[], history=PARENT_STORED_AGAIN)
@given(before=histories, history=histories)
def test_a_collapsed_queue_ends_where_the_queue_ends(before: list[KVEventBatch], history: list[KVEventBatch]) -> None:
    start: Standing = {}
    for batch in before:
        apply(start, batch.events)
    one_by_one = dict(start)
    for batch in history:
        apply(one_by_one, batch.events)
    merged = collapse(history)
    assert (merged is None) == (not history)
    if merged is not None:
        assert apply(dict(start), merged.events) == one_by_one
        assert merged.ts == history[-1].ts


@settings(deadline=None)
@example(history=PARENT_STORED_AGAIN)
@given(history=histories)
def test_parents_come_before_children(history: list[KVEventBatch]) -> None:
    state: BlockState[bytes] = BlockState()
    standing: Standing = {}
    for batch in history:
        fold_payload(state, BatchEncoder().encode(batch, 0))
        apply(standing, batch.events)
    parents = {key: block.parent_block_hash for key, block in standing.items()}
    seen: set[tuple[object, int]] = set()
    for segment in state.segments():
        tier = segment.run.tier
        first = segment.run.block_hashes[segment.first]
        above = segment.parent
        if above is not None and (tier, above) in standing and not _in_cycle(parents, tier, first):
            assert (tier, above) in seen
        seen |= {(tier, each) for each in segment.run.block_hashes[segment.first : segment.stop]}


def _in_cycle(parents: dict[tuple[object, int], int | None], tier: object, block_hash: int) -> bool:
    """Only a hostile history has one: no order puts its parents first."""
    visited: set[int] = set()
    above: int | None = block_hash
    while above is not None and above not in visited:
        visited.add(above)
        above = parents.get((tier, above))
    return above is not None


def test_collapse_keeps_what_it_does_not_know_for_the_encoder_to_refuse() -> None:
    class Unknown(KVCacheEvent, frozen=True):
        pass

    merged = collapse([KVEventBatch(1.0, (Unknown(), BlockRemoved((1,))))])
    assert merged is not None
    assert [type(event).__name__ for event in merged.events] == ["Unknown", "BlockRemoved"]


@settings(deadline=None)
@given(
    history=histories,
    max_steps=st.integers(1, 4),
    max_bytes=st.integers(1, 300),
    max_chunks=st.none() | st.integers(1, 2),
)
def test_base_plus_window_is_the_whole_state(
    history: list[KVEventBatch], max_steps: int, max_bytes: int, max_chunks: int | None
) -> None:
    encoder, decoder = BatchEncoder(), BatchDecoder()
    stream = EventStream(epoch=bytes(16), max_steps=max_steps, max_bytes=max_bytes)
    expected: Standing = {}
    for batch in history:
        stream.append(encoder.encode(batch, 0))
        stream.fold_some()
        apply(expected, batch.events)
    (chunks,) = [each for each in stream.plan_base(max_chunks=max_chunks) if each is not None]
    standing: Standing = {1: run(99)}  # type: ignore[dict-item]  # stale: the base begins with a clear
    for number, chunk in enumerate(chunks):
        apply(standing, decoder.decode(stream.encode_chunk(chunk, encoder, 0, clear=number == 0)).events)
    for sequence in range(stream.first, stream.next_sequence):
        apply(standing, decoder.decode(stream.payload(sequence)).events)
    assert standing == expected
    assert len(stream) <= max_steps
    assert stream.kept_bytes <= max_bytes or len(stream) == 1
