"""Property: every reader accepts what the encoder accepts, and the snapshot agrees with the live stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.kv_stream import BlockView
from observability.kv_stream.view import location_of
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEventBatch
from scheduler_components.events import Tier, ValidatedEvents
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.kv_events.dialects import OPTIONS, BlockChanges
from scheduler_components.kv_events.snapshot import PayloadReader, merge_batches
from scheduler_components.testing import EventLedger

Payloads = list[bytes]

HASHES = st.sampled_from([-1, 2**64 - 1, 5, 6, 7, -(2**63), 2**63, 2**63 - 1, 0])
BAD_HASHES = st.sampled_from([-(2**63) - 1, 2**64, "x", "5", b"\xff" * 8, 5.0, None, True, msgspec.Raw(b"\xc1")])
TOKENS = st.sampled_from([0, 1, 127, 128, 2**16, 2**32 - 1])
BAD_TOKENS = st.sampled_from([-1, 2**32, 2**64, "x", b"x", 1.0, float("nan"), None, (), msgspec.Raw(b"\xc1")])
BAD_SIZES: list[object] = [0, -1, 1.0, True, "1", None, msgspec.Raw(b"\x01")]
MEDIA = st.sampled_from([None, "GPU", "", "CPU", "DISK", "gpu", "FS", "GPU\0"])
BAD_OPTIONS: list[object] = [b"GPU", {"a": 1}, ["GPU"], 1.5, True, msgspec.Raw(b"\xc1"), "\ud800"]
_LISTS = ("extra_keys", "lookahead_token_ids")
GROUPS = st.sampled_from([None, 0, 1, -1])
NAMES = st.sampled_from([None, "", "a", "ß" * 3])
SEVEN_TIMES = BlockStored((5,), None, (7,), 1, None)


@st.composite
def odd_stored(draw: st.DrawFn) -> BlockStored:
    """A stored event that may have any error; most have none."""
    hashes = draw(st.lists(HASHES, max_size=4))
    size = draw(st.integers(1, 3))
    tokens = draw(st.lists(TOKENS, min_size=len(hashes) * size, max_size=len(hashes) * size))
    fields: dict[str, Any] = {
        "block_hashes": tuple(hashes), "parent_block_hash": draw(st.none() | HASHES), "token_ids": tuple(tokens),
        "block_size": size, "lora_id": draw(st.sampled_from([None, None, 0, -1, 2**63])), "medium": draw(MEDIA),
        "group_idx": draw(GROUPS),
    }  # fmt: skip
    if draw(st.booleans()):
        fields |= {name: draw(NAMES) for name in ("lora_name", "cache_salt", "session_id")}
        fields["extra_keys"] = draw(st.none() | st.just((None, ("a", 1), (), ("b",))[: len(hashes)]))
        fields["kv_cache_spec_sliding_window"] = draw(GROUPS)
        fields["lookahead_token_ids"] = draw(st.none() | st.just((1, 2)))
    spoil = draw(st.sampled_from([None] * 12 + [*fields]))
    if spoil == "block_hashes":
        fields[spoil] = (*hashes[1:], draw(BAD_HASHES))
    elif spoil == "token_ids":
        fields[spoil] = (*tokens[1:], draw(BAD_TOKENS))
    elif spoil == "parent_block_hash":
        fields[spoil] = draw(BAD_HASHES.filter(lambda value: value is not None))
    elif spoil is not None:
        bad = BAD_SIZES if spoil == "block_size" else BAD_OPTIONS
        fields[spoil] = draw(st.sampled_from([*bad, "x", ("x", None)] if spoil in _LISTS else bad))
    return BlockStored(**fields)


@st.composite
def odd_removed(draw: st.DrawFn) -> BlockRemoved:
    hashes = draw(st.lists(HASHES | HASHES | HASHES | BAD_HASHES, max_size=3))
    medium = draw(MEDIA | MEDIA | st.sampled_from(BAD_OPTIONS))
    return BlockRemoved(tuple(hashes), medium, draw(GROUPS))


ODD_EVENTS = odd_stored() | odd_removed() | st.just(AllBlocksCleared())
ODD_HISTORIES = st.lists(st.lists(ODD_EVENTS, max_size=4).map(tuple), max_size=8)


def written(encoder: BatchEncoder, events: tuple[KVCacheEvent, ...]) -> bytes | None:
    """Encode a batch as a publisher does: whole if possible, else without the refused events."""
    try:
        return encoder.encode(KVEventBatch(1.0, events), 0)
    except (TypeError, ValueError, OverflowError):
        return encoder.encode_valid(KVEventBatch(1.0, events), 0)[0]


def view_of(payloads: Payloads) -> dict[str, object]:
    """Return the final view of a router, by tier, and of a plain consumer, by location."""
    view, ledger, decoder = BlockView(), EventLedger(), BatchDecoder()
    for payload in payloads:
        decoded = decoder.decode(payload)
        assert decoded.errors == ()  # a reader accepts everything that was encoded
        view.apply(0, decoded.events)
        ledger.apply_all(decoded.events)
    blocks: dict[str, object] = {tier.name: view.blocks(0, tier) for tier in Tier}
    return blocks | {"places": ledger.blocks().keys()}


def replayed(payloads: Payloads, encoder: BatchEncoder, *, kept: int) -> Payloads:
    """Return the replay of a late reader: the snapshot and the replay buffer."""
    stream = EventStream(epoch=bytes(16), max_steps=kept, max_bytes=10**9)
    for payload in payloads:
        stream.append(payload)
        stream.fold_oldest()
    (chunks,) = [each for each in stream.plan_snapshot() if each is not None]
    answer: Payloads = []
    for number, chunk in enumerate(chunks):
        answer += [each for each in stream.encode_chunk(chunk, encoder, 0, clear=number == 0) if each is not None]
    return answer + [stream.payload(sequence) for sequence in range(stream.first, stream.next_sequence)]


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@example(history=[(BlockStored((5, 2**64 - 1), None, (7, 7), 1, None),), (BlockRemoved((-1,)),), ()], dialect="array")
@example(history=[(BlockStored((5,), None, (7,), 1, None, medium=""),), (), ()], dialect="array")
@example(history=[(BlockStored((5,), None, (7,), 1, None), BlockRemoved((5,), "")), (), ()], dialect="vllm")
@example(history=[(SEVEN_TIMES, BlockStored((6,), 5, (-1,), 1, None)), (BlockRemoved((6,)),), ()], dialect="map")
@example(
    history=[(AllBlocksCleared(), BlockStored((5,), None, (7,), 1, None, extra_keys=(("a",),))), ()], dialect="map"
)
@given(history=ODD_HISTORIES, dialect=st.sampled_from(DIALECTS))
def test_a_late_reader_has_the_view_of_a_live_one(history: list[tuple[KVCacheEvent, ...]], dialect: str) -> None:
    encoder = BatchEncoder(dialect)
    sent = [payload for events in history if (payload := written(encoder, events)) is not None]
    assert view_of(replayed(sent, encoder, kept=1)) == view_of(sent)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@example(history=[(BlockStored((5, 2**64 - 1), None, (7, 7), 1, None),), (BlockRemoved((-1,)),)], dialect="array")
@example(history=[(SEVEN_TIMES,), (BlockRemoved((5.0,)),)], dialect="array")  # type: ignore[arg-type]
@given(history=ODD_HISTORIES, dialect=st.sampled_from(DIALECTS))
def test_a_collapsed_queue_has_the_effect_of_the_queue(history: list[tuple[KVCacheEvent, ...]], dialect: str) -> None:
    encoder = BatchEncoder(dialect)
    sent = [payload for events in history if (payload := written(encoder, events)) is not None]
    merged = merge_batches([KVEventBatch(1.0, events) for events in history])
    payload = written(encoder, merged.events) if merged is not None else None
    assert view_of([payload] if payload else []) == view_of(sent)


HARMFUL: list[KVCacheEvent] = [
    BlockStored((1,), None, (-1,), 1, None),
    BlockStored((1,), None, (2**32,), 1, None),
    BlockStored((1,), None, ("x",), 1, None),  # type: ignore[arg-type]
    BlockStored((1,), None, (1.0,), 1, None),
    BlockStored((1,), None, (7, 7), 1, None),
    BlockStored((1,), None, (), 0, None),
    BlockStored((), None, (), 0, None),
    BlockStored((1,), None, (7,), 1.0, None),  # type: ignore[arg-type]
    BlockStored((1,), None, (7,), True, None),
    BlockStored((1,), "x", (7,), 1, None),  # type: ignore[arg-type]
    BlockStored((1,), None, (7,), 1, "adapter"),  # type: ignore[arg-type]
    BlockStored((1,), None, {7}, 1, None),  # type: ignore[arg-type]
    BlockStored({1}, None, (7,), 1, None),  # type: ignore[arg-type]
    BlockStored(b"\x01", None, (7,), 1, None),  # type: ignore[arg-type]
    BlockStored((1,), None, (7,), 1, None, medium=5),  # type: ignore[arg-type]
    BlockStored((1,), None, (7,), 1, None, medium=msgspec.Raw(b"\xc1")),  # type: ignore[arg-type]
    BlockStored((1,), None, (7,), 1, None, extra_keys=msgspec.Raw(b"\xc1")),  # type: ignore[arg-type]
    *(
        BlockStored((1,), None, (7,), 1, None, **{name: value})
        for name in BlockStored.__struct_fields__[5:]
        for value in (b"x", 1.5, {"a": 1}, True)
    ),
    BlockStored((1,), None, (7,), 1, None, extra_keys=""),  # type: ignore[arg-type]
    BlockStored((1,), None, (7,), 1, None, extra_keys={}),  # type: ignore[arg-type]
    *(BlockRemoved((1,), **{name: 1.5}) for name in BlockRemoved.__struct_fields__[1:]),  # type: ignore[arg-type]
    BlockRemoved(("1",)),  # type: ignore[arg-type]
    BlockRemoved((b"\x01" * 8,)),  # type: ignore[arg-type]
    BlockRemoved((1.0,)),  # type: ignore[arg-type]
    BlockRemoved((True,)),
    BlockRemoved((2**64,)),
    BlockRemoved((-(2**63) - 1,)),
    BlockRemoved(msgspec.Raw(b"\xc1")),  # type: ignore[arg-type]
    BlockRemoved((1,), group_idx="g"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_harmful_event_is_refused_by_name_and_its_neighbours_go_out(dialect: str) -> None:
    neighbours = (SEVEN_TIMES, AllBlocksCleared())
    for harmful in HARMFUL:
        encoder = BatchEncoder(dialect)
        batch = KVEventBatch(1.0, (neighbours[0], harmful, neighbours[1]))
        with pytest.raises((TypeError, ValueError, OverflowError)):
            pytest.fail(f"encoded {harmful!r}: {encoder.encode(batch, 0)!r}")
        payload, sound, refused = encoder.encode_valid(batch, 0)
        assert payload is not None, harmful
        assert BatchDecoder().decode(payload).events == sound == neighbours, harmful
        assert [event.name for event in refused] == [type(harmful).__name__], harmful


@pytest.mark.parametrize("dialect", DIALECTS)
@given(events=ODD_HISTORIES.map(lambda history: sum(history, ())))
def test_one_event_or_many_checked_or_trusted_the_bytes_are_the_same(
    events: tuple[KVCacheEvent, ...], dialect: str
) -> None:
    encoder = BatchEncoder(dialect)
    _, sound, _ = encoder.encode_valid(KVEventBatch(1.0, events), 0)
    together = encoder.encode(KVEventBatch(1.0, tuple(sound)), 0)
    assert together == encoder.encode(KVEventBatch(1.0, ValidatedEvents(sound)), 0)
    rows = [msgspec.Raw(encoder.encode_event(event)) for event in sound]
    assert together == msgspec.msgpack.encode((1.0, rows, 0))
    for event in sound:
        alone = encoder.encode(KVEventBatch(1.0, (event,)), 0)
        assert alone == encoder.encode(KVEventBatch(1.0, ValidatedEvents((event,))), 0)


@pytest.mark.soak
@pytest.mark.parametrize("dialect", ["array", "map", "vllm"])
@settings(deadline=None, max_examples=num_examples(5))
@example(events=(SEVEN_TIMES, AllBlocksCleared(), SEVEN_TIMES))
@example(events=(BlockRemoved((5,)), AllBlocksCleared(), BlockRemoved((6,), "CPU"), BlockRemoved((7,), "CPU")))
@given(events=ODD_HISTORIES.map(lambda history: sum(history, ())))
def test_the_changes_of_a_batch_equal_those_of_its_payload(
    joined: Callable[[BlockChanges], object], events: tuple[KVCacheEvent, ...], dialect: str
) -> None:
    encoder = BatchEncoder(dialect)
    _, sound, _ = encoder.encode_valid(KVEventBatch(1.0, events), 0)
    for each in (tuple(sound), ValidatedEvents(sound)):
        payload, changes = encoder.encode_with_changes(KVEventBatch(1.0, each), 0)
        assert changes is not None
        assert joined(changes) == joined(PayloadReader().changes(payload))


OPTION_VALUES: dict[str, Any] = {
    "medium": "CPU", "lora_name": "a", "extra_keys": (("a", 1), None), "group_idx": 0, "cache_salt": "s",
    "session_id": "i", "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 0, "locality": "REMOTE",
    "ownership": "o", "lookahead_token_ids": (1,),
}  # fmt: skip
PLAIN = {BlockStored: BlockStored((5, 6), None, (7, 8), 1, None), BlockRemoved: BlockRemoved((5, 6))}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in PLAIN for name in OPTIONS[kind]])
@pytest.mark.parametrize("batch_type", [tuple, ValidatedEvents])
def test_an_option_that_is_set_alone_is_written(kind: Any, name: str, dialect: str, batch_type: Any) -> None:
    """The encoder has a short way for events without options, which tests each of them."""
    event = msgspec.structs.replace(PLAIN[kind], **{name: OPTION_VALUES[name]})
    events = batch_type((event, PLAIN[kind], event))
    payload, changes = BatchEncoder(dialect).encode_with_changes(KVEventBatch(1.0, events), 0)
    assert BatchDecoder().decode(payload).events == tuple(events)
    if changes is not None:
        location = location_of(event)
        expected = [location, location_of(PLAIN[kind]), location]
        assert [change.location for change in changes] == (expected if location != expected[1] else expected[:1])


@pytest.mark.parametrize("rank", [-1, 2**63, True, 1.5, "0", msgspec.Raw(b"\xc1")])
def test_a_batch_of_no_rank_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match="attn_dp_rank"):
        BatchEncoder().encode(KVEventBatch(1.0, (SEVEN_TIMES,), rank), 0)


def test_unsigned_hashes_are_written_signed() -> None:
    stored = BlockStored((2**64 - 1, 5), 2**63, (7, 7), 1, None, lora_name="a")
    payload = BatchEncoder().encode(KVEventBatch(1.0, (stored, BlockRemoved((2**64 - 1,)))), 0)
    assert msgspec.msgpack.decode(payload)[1][0][1:3] == [[-1, 5], -(2**63)]
    assert msgspec.msgpack.decode(payload)[1][1][1] == [-1]


@pytest.mark.parametrize("typed", [EventBatch, KVEventBatch])
@settings(deadline=None)
@given(events=ODD_HISTORIES.map(lambda history: sum(history, ())))
def test_a_typed_decoder_reads_the_array_dialect(typed: type[EventBatch], events: tuple[KVCacheEvent, ...]) -> None:
    """The idiom by which peers' code reads."""
    payload = written(BatchEncoder(), events)
    if payload is not None:
        assert msgspec.msgpack.Decoder(type=typed).decode(payload).events == BatchDecoder().decode(payload).events


# The snapshot in messages: none is larger than readers accept, and their numbers suit a plain client.


def blocks_of(first: int, count: int, size: int, **options: Any) -> KVEventBatch:
    hashes = tuple(range(first, first + count))
    return KVEventBatch(1.0, (BlockStored(hashes, None, (2**31,) * (count * size), size, None, **options),))


def stream_after(batches: list[KVEventBatch], *, kept: int) -> EventStream:
    encoder = BatchEncoder()
    stream = EventStream(epoch=bytes(16), max_steps=kept, max_bytes=10**9)
    for batch in batches:
        stream.append(encoder.encode(batch, 0))
        stream.fold_oldest()
    return stream


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(1))
@given(num_batches=st.integers(4, 24), blocks=st.integers(50, 1500), max_chunks=st.integers(1, 24), hole=st.booleans())
def test_chunks_are_bounded_and_complete_or_there_is_none(
    num_batches: int, blocks: int, max_chunks: int, *, hole: bool
) -> None:
    encoder, decoder = BatchEncoder(), BatchDecoder()
    batches = [blocks_of(number * blocks, blocks, 64) for number in range(num_batches)]
    removed = {number * blocks for number in range(num_batches)} if hole else set()
    batches.append(KVEventBatch(1.0, (BlockRemoved(tuple(removed)),)))
    stream = stream_after([*batches, KVEventBatch(1.0, ())], kept=1)
    (chunks,) = [each for each in stream.plan_snapshot(max_chunks=max_chunks) if each is not None]
    assert len(chunks) <= max_chunks
    stored: list[int] = []
    for number, chunk in enumerate(chunks):
        (payload,) = [each for each in stream.encode_chunk(chunk, encoder, 0, clear=number == 0) if each is not None]
        assert len(payload) <= 2 * 1024 * 1024 + 64
        stored += [each for event in decoder.decode(payload).events for each in getattr(event, "block_hashes", ())]
    if chunks:
        assert sorted(stored) == [each for each in range(num_batches * blocks) if each not in removed]
    else:
        assert stream.num_snapshot_bytes > max_chunks * 1024 * 1024


def test_the_bytes_of_the_snapshot_are_those_of_payloads_with_a_cached_block() -> None:
    stream = stream_after([], kept=1)
    encoder = BatchEncoder()
    payloads = [
        encoder.encode(KVEventBatch(1.0, events), 0)
        for events in [
            (BlockStored((1, 2), None, (7,) * 2_000, 1_000, None),), (BlockStored((3,), 2, (7,) * 5_000, 5_000, None),),
            (BlockRemoved((1,)),), (BlockRemoved((2,)),), (BlockStored((3,), 2, (7,) * 9_000, 9_000, None),),
            (AllBlocksCleared(),), (),
        ]
    ]  # fmt: skip
    sizes = []
    for payload in payloads:
        stream.append(payload)
        stream.fold_oldest()
        sizes.append(stream.num_snapshot_bytes)
    pair, one, nine = (len(payloads[index]) for index in (0, 1, 4))
    assert sizes == [0, pair, pair + one, pair + one, one, nine, 0]
