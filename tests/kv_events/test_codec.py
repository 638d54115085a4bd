"""The codec: byte for byte against golden vectors, and against the variations that peers send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.events import UnknownEvent
from kit.searches import num_examples

from scheduler_components import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ConfigError,
    DecodeError,
    KVCacheEvent,
    KVEventBatch,
)
from scheduler_components.kv_events import BatchDecoder, BatchEncoder
from scheduler_components.kv_events.codec import DIALECTS, MAX_PAYLOAD_BYTES, split_events
from scheduler_components.kv_events.decoder import BlockStoredRawTokens
from scheduler_components.testing.golden import BatchVector, PeerVector, batch_vectors, peer_vectors
from scheduler_components.testing.strategies import events as any_events
from scheduler_components.testing.strategies import removed_events, stored_events


@pytest.mark.parametrize("vector", batch_vectors(), ids=str)
def test_writes_the_golden_bytes(vector: BatchVector) -> None:
    assert BatchEncoder(vector.dialect).encode(vector.event_batch, vector.rank or 0) == vector.payload


@pytest.mark.parametrize("vector", [*batch_vectors(), *peer_vectors()], ids=str)
def test_reads_the_golden_bytes_of_every_dialect_and_peer(vector: PeerVector) -> None:
    decoded = BatchDecoder().decode(vector.payload)
    assert decoded.events == vector.events
    assert (decoded.ts, decoded.attn_dp_rank, decoded.errors) == (vector.batch.ts, vector.rank, ())


def test_every_dialect_has_vectors() -> None:
    engines_own = {"native"}  # test_native_events.py compares its bytes with those of the engines' classes
    assert {vector.dialect for vector in batch_vectors()} == set(DIALECTS) - engines_own


@settings(deadline=None)
@given(dialect=st.sampled_from(DIALECTS), events=any_events(), rank=st.integers(0, 64))
def test_encoded_events_are_decoded_unchanged(dialect: str, events: tuple[KVCacheEvent, ...], rank: int) -> None:
    decoded = BatchDecoder().decode(BatchEncoder(dialect).encode(KVEventBatch(2.25, events), rank))
    assert (decoded.ts, decoded.events, decoded.attn_dp_rank, decoded.errors) == (2.25, events, rank, ())


def block_by_block(events: tuple[KVCacheEvent, ...]) -> list[object]:
    """Return the effect of the events on each block, in order."""
    effects: list[object] = []
    for event in events:
        if isinstance(event, BlockRemoved):
            effects += [(block_hash, event.medium) for block_hash in event.block_hashes]
        elif isinstance(event, BlockStored):
            size, parent = event.block_size, event.parent_block_hash
            for number, block_hash in enumerate(event.block_hashes):
                effects.append((block_hash, parent, event.token_ids[number * size : (number + 1) * size], event.medium))
                parent = block_hash
        else:
            effects.append(event)
    return effects


@given(any_events())
@example((BlockRemoved((1, 2)),))
@example((BlockRemoved((1,)), BlockRemoved((2,))))
def test_a_too_large_batch_is_split_without_a_change_of_meaning(events: tuple[KVCacheEvent, ...]) -> None:
    parts = split_events(events) if events else None
    if parts is None:
        assert len(events) < 2
        assert len(block_by_block(events)) < 2
    else:
        assert [block_by_block(events)] == [block_by_block(parts[0]) + block_by_block(parts[1])]
        assert all(parts)
        assert all(len(part) < len(events) or len(block_by_block(part)) < len(block_by_block(events)) for part in parts)


def test_a_cut_event_keeps_each_blocks_own_keys() -> None:
    event = BlockStored((1, 2), None, (5, 6), 1, None, extra_keys=(("salt",), ("image", 3)))
    parts = split_events((event,))
    assert parts is not None
    assert [part.extra_keys for half in parts for part in half if isinstance(part, BlockStored)] == [
        (("salt",),),
        (("image", 3),),
    ]


def test_batch_keeps_a_rank_of_its_own() -> None:
    batch = KVEventBatch(ts=1.0, events=(AllBlocksCleared(),), attn_dp_rank=5)
    assert BatchDecoder().decode(BatchEncoder().encode(batch, 0)).attn_dp_rank == 5


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_event_that_cannot_be_encoded_is_refused_alone(dialect: str) -> None:
    good = BlockRemoved((1,))
    too_wide = BlockRemoved((2**64,))
    payload, sound, refused = BatchEncoder(dialect).encode_valid(
        KVEventBatch(1.0, (good, UnknownEvent(1), too_wide)), 2
    )
    assert payload is not None
    assert BatchDecoder().decode(payload).events == sound == (good,)
    assert [event.name for event in refused] == ["UnknownEvent", "BlockRemoved"]


def test_a_batch_of_nothing_but_poison_gives_no_payload() -> None:
    payload, sound, refused = BatchEncoder().encode_valid(KVEventBatch(1.0, (UnknownEvent(1),)), 0)
    assert (payload, sound, len(refused)) == (None, (), 1)


def test_unknown_dialect_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"dialect='protobuf'.*array, map, vllm"):
        BatchEncoder("protobuf")


def decode(value: object) -> Any:
    return BatchDecoder().decode(msgspec.msgpack.encode(value))


STORED = ["BlockStored", [5], None, [1], 1, None]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (2**64 - 5, -5),  # vLLM: the low 64 bits, unsigned
        (b"\xff" * 24 + (7).to_bytes(8, "big"), 7),  # newer vLLM: a whole digest, of which the last 8 bytes count
        ((-5).to_bytes(8, "big", signed=True), -5),
        (b"\x01\x02", 258),
        (-5, -5),
        (2**63, -(2**63)),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_hashes_of_every_peer_are_read_as_signed(sent: object, read: int) -> None:
    as_array = decode([1.0, [["BlockStored", [sent], sent, [1], 1, None], ["BlockRemoved", [sent]]], 0])
    removed = {"type": "BlockRemoved", "block_hashes": [sent]}
    stored = {"type": "BlockStored", "block_hashes": [sent], "parent_block_hash": sent, "token_ids": [1]}
    for others in ([], [{"type": "BlockMoved"}]):  # one typed decode, and event by event
        as_map = decode([1.0, [stored | {"block_size": 1}, removed, *others], 0])
        assert as_map.events == as_array.events
    assert as_array.events == (BlockStored((read,), read, (1,), 1, None), BlockRemoved((read,)))


def test_dialects_may_mix_and_unknown_fields_are_skipped() -> None:
    later_array = [*STORED, *[None] * 11, "later"]
    later_map = {"type": "BlockStored", "block_hashes": [5], "token_ids": [1], "block_size": 1, "later": {}}
    decoded = decode([1.0, [later_array, later_map], None])
    assert decoded.events == (BlockStored((5,), None, (1,), 1, None),) * 2
    assert decoded.attn_dp_rank is None


HASH_FORMS: dict[str, Callable[[int], object]] = {
    "signed": lambda value: value,
    "unsigned": lambda value: value % 2**64,
    "bytes": lambda value: b"\x07" * 24 + value.to_bytes(8, "big", signed=True),
}
JUNK = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.lists(st.none(), max_size=2)
)


@st.composite
def peers_maps(draw: st.DrawFn) -> dict[str, object]:
    """An event as a peer could send it: hashes in any form, nil or missing options, unknown fields, and junk."""
    event = draw(stored_events() | removed_events())
    fields = {"type": type(event).__name__} | {name: getattr(event, name) for name in event.__struct_fields__}
    form = HASH_FORMS[draw(st.sampled_from(sorted(HASH_FORMS)))]
    fields["block_hashes"] = [form(value) for value in event.block_hashes]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = form(fields["parent_block_hash"])
    for name in draw(st.sets(st.sampled_from(sorted(fields)))):
        if fields[name] is None:
            del fields[name]
    return fields | draw(st.dictionaries(st.sampled_from([*sorted(fields), "locality"]), JUNK, max_size=1))


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@given(sent=st.lists(peers_maps(), max_size=4))
def test_a_batch_of_maps_is_read_as_each_of_its_events_is(sent: list[dict[str, object]]) -> None:
    decoder = BatchDecoder()
    decoder.decode(
        msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0])
    )  # the decoder knows the dialect now
    alone = [decode([1.0, [event, {"type": "BlockMoved"}], 0]) for event in sent]  # the second event is unknown
    decoded = decoder.decode(msgspec.msgpack.encode([1.0, sent, 0]))
    assert decoded.events == tuple(event for each in alone for event in each.events)
    assert len(decoded.errors) == sum(len(each.errors) - 1 for each in alone)


@pytest.mark.parametrize("later", [[[]], [["late"]], [[["DecodeError", "late"]]], [None], [{"a": 1}], [[], []]])
def test_no_payload_fills_the_errors_of_its_batch(later: list[object]) -> None:
    decoded = decode([1.0, [STORED], 0, *later])
    assert decoded.events == (BlockStored((5,), None, (1,), 1, None),)
    assert (decoded.ts, decoded.attn_dp_rank, decoded.errors) == (1.0, 0, ())


def test_sglangs_event_with_metadata_is_decoded() -> None:
    metadata = {"cache_salt": "tenant", "later": 1}
    decoded = decode([1.0, [["BlockStoredWithMetadata", [5], None, [1], 1, None, "GPU", metadata]], 0])
    assert decoded.events == (BlockStored((5,), None, (1,), 1, None, medium="GPU", cache_salt="tenant"),)


@pytest.mark.parametrize("rest", [[], [None], ["GPU"], ["GPU", None], ["GPU", "no map"]])
def test_sglangs_event_with_metadata_may_have_none(rest: list[object]) -> None:
    decoded = decode([1.0, [["BlockStoredWithMetadata", [5], None, [1], 1, None, *rest]], 0])
    assert decoded.events == (BlockStored((5,), None, (1,), 1, None, medium=rest[0] if rest else None),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"later": 1}, 'event is not a map with a "type"'),
        ([], "event is not an array that starts with a tag"),
        (["BlockMoved", [5]], "unknown event 'BlockMoved'"),
        (["BlockRemoved", 5], "block_hashes is not an array"),
        (["BlockStored", [5], None, [1, 2], 1, None], "2 tokens do not fill 1 blocks of 1"),
        (["BlockRemoved", ["AAAA"]], "Expected `int | bytes`, got `str` - at `$.block_hashes[0]`"),
        (
            ["BlockStored", [5], "AAAA", [1], 1, None],
            "Expected `int | bytes | null`, got `str` - at `$.parent_block_hash`",
        ),
        (["BlockRemoved", [b""]], "a block hash is an integer or non-empty bytes, not b''"),
    ],
)
def test_the_error_of_a_bad_event_names_the_problem(event: object, reason: str) -> None:
    (error,) = decode([1.0, [event], 0]).errors
    assert error.reason == reason


@pytest.mark.parametrize("payload", [[1.0, [["BlockMoved"]] * 1_001, 0], [float("nan"), [], 0], [1.0]])
def test_the_error_of_a_bad_batch_names_the_problem(payload: list[object]) -> None:
    named = "more than 1000 bad events, such as: unknown event" if len(payload) == 3 and payload[1] else "batch"
    with pytest.raises(DecodeError, match=named):
        decode(payload)


def test_a_thousand_bad_events_are_reported_each_and_the_rest_is_read() -> None:
    decoded = decode([1.0, [["BlockMoved"]] * 1_000 + [STORED], 0])
    assert [error.reason for error in decoded.errors] == ["unknown event 'BlockMoved'"] * 1_000
    assert decoded.events == (BlockStored((5,), None, (1,), 1, None),)


def test_a_payload_of_the_largest_size_is_read_and_no_larger_one() -> None:
    payload = msgspec.msgpack.encode([1.0, [STORED], 0])
    assert BatchDecoder(len(payload)).decode(payload).events
    with pytest.raises(DecodeError, match=f"{len(payload)} bytes"):
        BatchDecoder(len(payload) - 1).decode(payload)


@pytest.mark.parametrize("ts", ["soon", None, 2**63, -(2**63), 10**400, float("inf"), float("nan")], ids=str)
def test_the_rest_of_a_batch_with_an_invalid_time_gets_a_valid_one(ts: Any) -> None:
    event = BlockStored((5,), None, (1,), 1, None)
    payload, _, _ = BatchEncoder().encode_valid(KVEventBatch(ts, (event,)), 0)
    assert payload is not None
    assert BatchDecoder().decode(payload).ts == 0.0


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [5], None, [1, 2], 1, None],  # tokens do not fill the blocks
        ["BlockStored", [5], None, [1], 0, None],
        ["BlockStored", [5], None, [1], -1, None],
        ["BlockStored", [5], None, [-1], 1, None],
        ["BlockStored", [5], None, [2**32], 1, None],
        ["BlockStored", ["5"], None, [1], 1, None],
        ["BlockStored", [5.0], None, [1], 1, None],
        ["BlockStored", [b""], None, [1], 1, None],
        ["BlockStored", [True], None, [1], 1, None],
        ["BlockStored", 5, None, [1], 1, None],
        ["BlockStored", [5]],
        ["BlockStored"],
        ["BlockMoved", [5]],
        [],
        [7],
        {},
        {"type": 5},
        {"type": "BlockStored"},
        {"type": "BlockRemoved", "block_hashes": {"a": 1}},
        None,
        7,
        "BlockStored",
    ],
)
def test_a_bad_event_costs_itself(event: object) -> None:
    decoded = decode([1.0, [STORED, event, ["AllBlocksCleared"]], 0])
    assert decoded.events == (BlockStored((5,), None, (1,), 1, None), AllBlocksCleared())
    assert len(decoded.errors) == 1


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([None, [], 0]),
        msgspec.msgpack.encode([float("nan"), [], 0]),
        msgspec.msgpack.encode([float("inf"), [], 0]),
        msgspec.msgpack.encode(["1.0", [], 0]),
        msgspec.msgpack.encode([1.0, {}, 0]),
        b"\x93\xcb" + b"\x00" * 8 + b"\xdd\xff\xff\xff\xff\x00",  # a list of four billion events
        b"\x93\xcb" + b"\x00" * 8 + nested(100_000) + b"\x00",
        bytes(MAX_PAYLOAD_BYTES + 1),
    ],
    ids=range(12),
)
def test_an_unreadable_batch_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        BatchDecoder().decode(payload)


@pytest.mark.parametrize("field", [b"\xa4\xff\xfe\xfd\xfc", nested(300)], ids=["bad UTF-8", "deep nesting"])
def test_hostile_bytes_inside_an_event_cost_the_event(field: bytes) -> None:
    head = b"\x93\xcb" + b"\x00" * 8 + b"\x92\x91\xb0AllBlocksCleared\x92\xacBlockRemoved"
    decoded = BatchDecoder().decode(head + field + b"\x00")
    assert decoded.events == (AllBlocksCleared(),)
    assert len(decoded.errors) == 1


# Without tokens: a reader that needs only blocks decodes all other fields.


def without_tokens(events: tuple[KVCacheEvent, ...]) -> list[object]:
    """Return the fields of the events without the tokens."""
    return [
        {name: getattr(event, name) for name in event.__struct_fields__ if name != "token_ids"}
        | {"kind": next(kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared) if isinstance(event, kind))}
        for event in events
    ]


def assert_reads_the_same_without_tokens(payload: bytes) -> None:
    reader = BatchDecoder(decode_tokens=False)
    whole = BatchDecoder().decode(payload)
    for _ in range(2):  # the first batch determines the dialect
        bare = reader.decode(payload)
        assert without_tokens(bare.events) == without_tokens(whole.events)
        assert [str(error) for error in bare.errors] == [str(error) for error in whole.errors]
        assert (bare.ts, bare.attn_dp_rank) == (whole.ts, whole.attn_dp_rank)


@settings(deadline=None)
@given(dialect=st.sampled_from(DIALECTS), events=any_events())
def test_without_tokens_all_else_is_read(dialect: str, events: tuple[KVCacheEvent, ...]) -> None:
    payload = BatchEncoder(dialect).encode(KVEventBatch(2.25, events), 1)
    assert_reads_the_same_without_tokens(payload)
    reader = BatchDecoder(decode_tokens=False)
    reader.decode(payload)
    for event in reader.decode(payload).events:
        assert not isinstance(event, BlockStored) or isinstance(event, BlockStoredRawTokens)


@pytest.mark.parametrize("vector", [*batch_vectors(), *peer_vectors()], ids=str)
def test_without_tokens_every_dialect_and_peer_is_read(vector: PeerVector) -> None:
    assert_reads_the_same_without_tokens(vector.payload)


def stored_with(tokens: object, *, as_map: bool, count: int = 1) -> bytes:
    values = {"block_hashes": list(range(count)), "parent_block_hash": None, "token_ids": tokens, "block_size": 1}
    values["lora_id"] = None
    event = {"type": "BlockStored"} | values if as_map else ["BlockStored", *values.values()]
    return msgspec.msgpack.encode([1.0, [event], 0])


@pytest.mark.parametrize("as_map", [False, True], ids=["array", "map"])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 65_535, 65_536, 65_537])
def test_tokens_that_are_not_read_are_counted(count: int, *, as_map: bool) -> None:
    for tokens in ([7] * count, [7] * (count - 1), [7] * (count + 1), [], None, 7, "", "text", b"bytes", {}):
        assert_reads_the_same_without_tokens(stored_with(tokens, as_map=as_map, count=count))


@pytest.mark.parametrize("as_map", [False, True], ids=["array", "map"])
@pytest.mark.parametrize("count", [1, 15, 16, 255, 256, 0x0203, 65_535, 65_536, 0x0102_03])
def test_a_valid_batch_is_decoded_in_one_typed_decode(count: int, *, as_map: bool) -> None:
    reader = BatchDecoder(decode_tokens=False)
    assert reader.decode_typed(stored_with([7] * count, as_map=as_map, count=count)) is not None
    assert reader.decode_typed(stored_with([7] * count, as_map=as_map, count=count - 1)) is None


@pytest.mark.parametrize("as_map", [False, True], ids=["array", "map"])
@pytest.mark.parametrize("tokens", [[-1], [2**32], ["x"], [None], [0.5]], ids=str)
def test_tokens_that_are_not_decoded_may_be_invalid(tokens: list[object], *, as_map: bool) -> None:
    """A reader without tokens accepts the blocks; a reader of tokens drops the event."""
    payload = stored_with(tokens, as_map=as_map)
    assert len(BatchDecoder().decode(payload).errors) == 1
    (event,) = BatchDecoder(decode_tokens=False).decode(payload).events
    assert isinstance(event, BlockStoredRawTokens)
    assert event.block_hashes == (0,)
    assert msgspec.msgpack.decode(event.token_ids) == tokens


def test_an_event_of_unread_tokens_is_refused_by_name_when_it_is_written() -> None:
    (event,) = BatchDecoder(decode_tokens=False).decode(stored_with([7], as_map=False)).events
    with pytest.raises(ValueError, match="token_ids"):
        BatchEncoder().encode(KVEventBatch(1.0, (event,)), 0)
