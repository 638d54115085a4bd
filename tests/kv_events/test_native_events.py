"""Events of an engine's own classes: encoded as the engine does, and folded, cut and merged without a loss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.kv_stream import BlockView, Tier
from scheduler_components import AllBlocksCleared, BlockStored, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.codec import oversize_reason, split_events
from scheduler_components.kv_events.dialects import BlockChanges
from scheduler_components.kv_events.native_events import slice_raw_event
from scheduler_components.kv_events.snapshot import PayloadReader, merge_batches

# The declarations of two engines, as in vLLM 0.33 and SGLang 0.5.23. vLLM's are those of its double.


def _vllms_declarations() -> ModuleType:
    name, path = "vllm_kv_events_double", Path(__file__).parents[1] / "engines/doubles/vllm/distributed/kv_events.py"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # msgspec looks for its types there
    spec.loader.exec_module(module)
    return module


VLLM = _vllms_declarations()
VllmBatch, VllmStored, VllmRemoved, VllmCleared = (
    VLLM.EventBatch, VLLM.BlockStored, VLLM.BlockRemoved, VLLM.AllBlocksCleared,
)  # fmt: skip


class LaterStored(VllmStored, tag="BlockStored"):
    """A future version with unknown fields."""

    per_block: list[Any] | None = None
    per_token: list[Any] | None = None
    whole: Any = None


class LaterRemoved(VllmRemoved, tag="BlockRemoved"):
    whole: Any = None


class SglangBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class SglangStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class StorageMedium(str, Enum):  # noqa: UP042 - as SGLang has it
    GPU = "GPU"
    CPU = "CPU_PINNED"


class ArrayStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"):
    """Both engines' first form."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class ArrayRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


def engines_bytes(batch: Any, rank: int) -> bytes:
    """Return the payload of the engine's own publisher."""
    name = "attn_dp_rank" if isinstance(batch, SglangBatch) else "data_parallel_rank"
    if getattr(batch, name) is None:
        batch = msgspec.structs.replace(batch, **{name: rank})
    return msgspec.msgpack.Encoder().encode(batch)


WIDE = (1 << 64) - 3
DIGEST = bytes(range(24)) + WIDE.to_bytes(8, "big")

FULL_STORED = VllmStored(
    [5, WIDE], DIGEST, [1, 2, 3, 4], 2, None, "GPU", "adapter", [("a", ("mm", 3)), None], 1, "sliding_window", 128,
    "LOCAL", "fs", "session", [9],
)  # fmt: skip
BATCHES: list[Any] = [
    VllmBatch(1.5, [VllmStored([1], None, [7], 1, None, "GPU", None)]),
    VllmBatch(1.5, [FULL_STORED, VllmRemoved([DIGEST, 5], None, 1, "REMOTE", "obj"), VllmCleared()], 4),
    VllmBatch(2.5, [VllmStored([DIGEST], None, [], 0, None, "STORAGE", None)]),
    VllmBatch(2.5, [VllmStored([4], 3, [1, 2, 3, 4], 2, None, "GPU", None, kv_cache_spec_kind="mamba", group_idx=1)]),
    VllmBatch(2.5, []),
    SglangBatch(1.5, [SglangStored([-5, 6], None, [7, 8], 1, None, StorageMedium.CPU, "salt", "session", "adapter")]),
    SglangBatch(1.5, [ArrayStored([-5, WIDE], 7, [7, 8], 1, 3), ArrayRemoved([WIDE], "FS")], 2),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_the_payload_is_that_of_the_engines_own_publisher(batch: Any) -> None:
    assert BatchEncoder("native").encode(batch, 3) == engines_bytes(batch, 3)
    raw = VllmBatch(
        batch.ts,
        [msgspec.Raw(msgspec.msgpack.encode(event)) for event in batch.events],
        batch.data_parallel_rank if isinstance(batch, VllmBatch) else batch.attn_dp_rank,
    )
    assert BatchEncoder("native").encode(raw, 3) == engines_bytes(batch, 3)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_reader_decodes_all_fields(batch: Any) -> None:
    decoded = BatchDecoder().decode(BatchEncoder("native").encode(batch, 3))
    assert decoded.errors == ()
    assert len(decoded.events) == len(batch.events)


def test_a_reader_knows_the_new_fields() -> None:
    event = msgspec.structs.replace(FULL_STORED, extra_keys=[("a",), None])
    (read,) = BatchDecoder().decode(BatchEncoder("native").encode(VllmBatch(1.0, [event]), 0)).events
    assert read == BlockStored(
        (5, -3), -3, (1, 2, 3, 4), 2, None, "GPU", "adapter", (("a",), None), 1, None, "session", "sliding_window", 128,
        "LOCAL", "fs", (9,),
    )  # fmt: skip


class MovedBlock(msgspec.Struct, tag="BlockMoved"):
    block_hashes: list[int]


class Untagged(msgspec.Struct):
    block_hashes: list[int]


def stored(**fields: Any) -> VllmStored:
    values: dict[str, Any] = {
        "block_hashes": [1], "parent_block_hash": None, "token_ids": [7], "block_size": 1, "lora_id": None,
        "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return VllmStored(**values | fields)


REFUSED: list[tuple[Any, str]] = [
    (MovedBlock([1]), "BlockMoved"),
    (Untagged([1]), "Untagged"),
    (7, "int"),
    (stored(token_ids=[-1]), "token_ids"),
    (stored(token_ids=[2**32]), "token_ids"),
    (stored(token_ids=["x"]), "token_ids"),
    (stored(token_ids=[(1, 2)]), "token_ids"),
    (stored(token_ids={7}), "token_ids"),
    (stored(token_ids=[7, 7]), "fill"),
    (stored(block_hashes=["x"]), "block_hashes"),
    (stored(block_hashes=[1.0]), "block_hashes"),
    (stored(block_hashes=[True]), "block_hashes"),
    (stored(block_hashes=[b""]), "hash"),
    (stored(block_hashes=[2**64]), "serialize"),
    (stored(block_hashes=[-(2**63) - 1]), "serialize"),
    (stored(block_hashes={1}), "block_hashes"),
    (stored(parent_block_hash="x"), "parent_block_hash"),
    (stored(block_size=-1, token_ids=[]), "block_size"),
    (stored(block_size=1.0), "block_size"),
    (stored(medium=5), "medium"),
    (stored(lora_id="x"), "lora_id"),
    (stored(group_idx="x"), "group_idx"),
    (stored(kv_cache_spec_kind=b"x"), "kv_cache_spec_kind"),
    (stored(locality=1), "locality"),
    (stored(ownership=1), "ownership"),
    (stored(session_id=1), "session_id"),
    (stored(extra_keys=[object()]), "object"),
    (VllmRemoved([None], None), "block_hashes"),  # type: ignore[list-item]
    (VllmRemoved([1], 7), "medium"),  # type: ignore[arg-type]
    (msgspec.Raw(b"\xc1"), "msgpack"),
    (msgspec.Raw(b"\x93"), "msgpack"),
    (msgspec.Raw(msgspec.msgpack.encode(["BlockMoved", [1]])), "BlockMoved"),
    (msgspec.Raw(msgspec.msgpack.encode(["BlockStored", [1], None, [-1], 1, None])), "token_ids"),
    (msgspec.Raw(msgspec.msgpack.encode(["BlockStored", [1]])), "missing"),
    (msgspec.Raw(msgspec.msgpack.encode({"type": "BlockRemoved", "block_hashes": ["x"]})), "block_hashes"),
    (msgspec.Raw(msgspec.msgpack.encode({"type": "BlockRemoved", "block_hashes": ["AAAA"]})), "got `str`"),
    (msgspec.Raw(msgspec.msgpack.encode({"type": "BlockRemoved"})), "block_hashes is missing"),
    (msgspec.Raw(msgspec.msgpack.encode(["BlockStored", [1], b"", [7], 1, None])), "a block hash"),
    (stored(medium=StorageMedium.GPU, token_ids=[-1]), "token_ids"),
]


@pytest.mark.parametrize(("bad", "named"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_event_is_refused_by_name_and_its_neighbours_go_out(bad: Any, named: str) -> None:
    encoder, good = BatchEncoder("native"), [stored(), VllmCleared()]
    for events in ([good[0], bad, good[1]], [bad]):
        with pytest.raises((TypeError, ValueError, OverflowError), match=named):
            encoder.encode(VllmBatch(1.0, events), 0)
    payload, _, refused = encoder.encode_valid(VllmBatch(1.0, [good[0], bad, good[1]], 5), 0)
    assert payload == engines_bytes(VllmBatch(1.0, good, 5), 0)
    assert [named in each.reason for each in refused] == [True]


LEAST = {"type": "BlockStored", "block_hashes": [1], "token_ids": [7], "block_size": 1}


class LeastStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int


@pytest.mark.parametrize(
    "event",
    [
        *(
            msgspec.Raw(msgspec.msgpack.encode(LEAST | others))
            for others in ({}, {"parent_block_hash": None}, {"lora_id": None})
        ),
        LeastStored([1], None, [7], 1),
    ],
    ids=range(4),
)
def test_fields_that_some_engines_omit_may_be_missing(event: Any) -> None:
    payload = BatchEncoder("native").encode(VllmBatch(1.0, [event]), 0)
    assert BatchDecoder().decode(payload).events == (BlockStored((1,), None, (7,), 1, None),)


def test_an_object_that_is_no_batch_is_refused() -> None:
    with pytest.raises(AttributeError):
        BatchEncoder("native").encode(MovedBlock([1]), 0)  # type: ignore[arg-type]


def test_events_of_this_kit_are_encoded_as_maps_among_them() -> None:
    """The publisher's own clear, and the events of an engine that uses this kit's caches."""
    payload = BatchEncoder("native").encode(
        KVEventBatch(1.0, (AllBlocksCleared(), BlockStored((1,), None, (7,), 1, None))), 0
    )
    assert payload == BatchEncoder("vllm").encode(
        KVEventBatch(1.0, (AllBlocksCleared(), BlockStored((1,), None, (7,), 1, None))), 0
    )


# Histories of native events, unknown fields included.

HASHES = st.sampled_from([1, 2, 3, WIDE, WIDE - 2**64, DIGEST, (5).to_bytes(8, "big"), 5, b"\x06", 6])
MEDIA = st.sampled_from([None, "GPU", "CPU", "STORAGE", "FS", "OBJ", "elsewhere", ""])
LOCALITIES = st.sampled_from([None, None, "LOCAL", "REMOTE"])
OWNERS = st.sampled_from([None, None, "fs", "obj"])
KINDS = st.sampled_from([None, "full_attention", "sliding_window"])
ODDITIES: st.SearchStrategy[Any] = st.sampled_from([None, 1, "x", [1], [1, 2], [1, 2, 3], {"a": [1]}, b"x", 1.5])


@st.composite
def native_stored(draw: st.DrawFn) -> Any:
    hashes = draw(st.lists(HASHES, max_size=4))
    size = draw(st.integers(1, 2))
    tokens = [7 + number for number in range(len(hashes) * size)] if draw(st.integers(0, 3)) else []
    parent, medium = draw(st.none() | HASHES), draw(MEDIA)
    form = draw(st.sampled_from(["vllm", "sglang", "array", "raw"]))
    if form == "sglang":
        return SglangStored(hashes, parent, tokens, size, None, medium, draw(st.sampled_from([None, "a"])))
    if form == "array":
        return ArrayStored(hashes, parent, tokens, size, None, medium)
    event = LaterStored(
        hashes, parent, tokens, size, None, medium, None, draw(st.sampled_from([None, [("a", 1)] * len(hashes)])),
        draw(st.sampled_from([None, 0, 1])), draw(KINDS), None, draw(LOCALITIES), draw(OWNERS), None, None,
        list(range(len(hashes))), [[token] for token in tokens], draw(ODDITIES),
    )  # fmt: skip
    return msgspec.Raw(msgspec.msgpack.encode(event)) if form == "raw" else event


@st.composite
def native_removed(draw: st.DrawFn) -> Any:
    hashes, medium = draw(st.lists(HASHES, max_size=3)), draw(MEDIA)
    if draw(st.booleans()):
        return ArrayRemoved(hashes, medium)
    group = draw(st.sampled_from([None, 0, 1]))
    return LaterRemoved(hashes, medium, group, draw(LOCALITIES), draw(OWNERS), draw(ODDITIES))


NATIVE_EVENTS = native_stored() | native_removed() | st.builds(VllmCleared)
NATIVE_HISTORIES = st.lists(st.lists(NATIVE_EVENTS, max_size=4), max_size=8)


def view_of(payloads: list[bytes]) -> dict[str, object]:
    """Return the final view of a router: by tier, group and location."""
    view, decoder = BlockView(), BatchDecoder()
    for payload in payloads:
        decoded = decoder.decode(payload)
        assert decoded.errors == ()  # a reader accepts everything that was encoded
        view.apply(0, decoded.events)
    seen: dict[str, object] = {tier.name: view.blocks(0, tier) for tier in Tier}
    seen |= {f"{tier.name} {group}": view.blocks(0, tier, group_idx=group) for tier in Tier for group in (0, 1)}
    return seen | {"sites": view.blocks_by_location(0)}


def replayed(sent: list[bytes]) -> list[bytes]:
    """Return the replay of a late reader with a buffer of one batch: snapshot and last batch."""
    stream = EventStream(epoch=bytes(16), max_steps=1, max_bytes=10**9)
    for payload in sent:
        stream.append(payload)
        stream.fold_oldest()
    chunks = [each for each in stream.plan_snapshot() if each is not None]
    parts = stream.encode_chunk(chunks[0][0], BatchEncoder("native"), 0, clear=True)
    buffer = [stream.payload(sequence) for sequence in range(stream.first, stream.next_sequence)]
    return [each for each in parts if each is not None] + buffer


def sent_of(history: list[list[Any]]) -> list[bytes]:
    encoder = BatchEncoder("native")
    return [encoder.encode(VllmBatch(1.0, events), 0) for events in history]


PAIR = VllmStored([5, WIDE], None, [7, 7], 1, None, "GPU", None)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@example(history=[[VllmStored([5], None, [7], 1, None, "GPU", None), VllmRemoved([5], "CPU"), AllBlocksCleared()]])
@example(history=[[VllmRemoved([5], "GPU"), VllmRemoved([6], "GPU", 1), VllmRemoved([7], "GPU", 1, "REMOTE")]])
@example(history=[[VllmRemoved([5], "GPU"), VllmCleared(), VllmRemoved([6], "GPU")]])
@given(history=NATIVE_HISTORIES)
def test_the_changes_of_an_engines_events_equal_those_of_their_payload(
    joined: Callable[[BlockChanges], object], history: list[list[Any]]
) -> None:
    encoder = BatchEncoder("native")
    for events in history:
        payload, changes = encoder.encode_with_changes(VllmBatch(1.0, events), 0)
        assert payload == encoder.encode(VllmBatch(1.0, events), 0)
        if changes is not None:
            assert joined(changes) == joined(PayloadReader().changes(payload))


def test_of_plain_events_of_an_engine_no_payload_is_read() -> None:
    stored = VllmStored([5, -6], None, [7, 7], 1, None, "GPU", None, group_idx=1)
    for events in ([stored], [stored, stored, VllmRemoved([5], "GPU", 1), VllmCleared()], [VllmCleared()]):
        assert BatchEncoder("native").encode_with_changes(VllmBatch(1.0, events), 0)[1] is not None


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@example(history=[[PAIR], [VllmRemoved([-3], "GPU")], []])  # type: ignore[list-item]
@example(history=[[ArrayStored([5, DIGEST], None, [7, 7], 1, None)], [VllmRemoved([5], None)], []])
@example(history=[[PAIR], [VllmRemoved([5], "GPU", None, "REMOTE")], []])  # another worker's copy is removed
@given(history=NATIVE_HISTORIES)
def test_a_late_reader_has_the_view_of_a_live_one(history: list[list[Any]]) -> None:
    sent = sent_of(history)
    assert view_of(replayed(sent)) == view_of(sent)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@example(history=[[PAIR], [VllmRemoved([WIDE], "GPU")]])
@given(history=NATIVE_HISTORIES)
def test_a_collapsed_queue_has_the_effect_of_the_queue(history: list[list[Any]]) -> None:
    merged = merge_batches([VllmBatch(1.0, events, 3) for events in history])  # type: ignore[misc]
    payloads = [] if merged is None else [BatchEncoder("native").encode(merged, 0)]
    assert merged is None or merged.attn_dp_rank == 3
    assert view_of(payloads) == view_of(sent_of(history))


@pytest.mark.parametrize("as_raw", [False, True])
@pytest.mark.parametrize(("sent", "read"), [(1, 1), (WIDE, -3), (DIGEST, -3)], ids=["signed", "unsigned", "bytes"])
def test_an_engines_parent_that_was_stored_again_precedes_its_child(sent: Any, read: int, as_raw: bool) -> None:
    def written_as(event: Any) -> Any:
        return msgspec.Raw(msgspec.msgpack.encode(event)) if as_raw else event

    parent, child = (
        written_as(stored(block_hashes=[sent])),
        written_as(stored(block_hashes=[2], parent_block_hash=sent)),
    )
    history = [[parent, child], [written_as(VllmRemoved([sent], "GPU")), parent]]
    one = merge_batches([VllmBatch(1.0, events) for events in history])  # type: ignore[misc]
    assert one is not None
    found = BatchDecoder().decode(BatchEncoder("native").encode(one, 0))
    assert [event.block_hashes for event in found.events if isinstance(event, BlockStored)] == [(read,), (2,)]
    late = replayed(sent_of([*history, [written_as(stored(block_hashes=[9]))]]))
    snapshot = [event for payload in late for event in BatchDecoder().decode(payload).events]
    assert [event.block_hashes for event in snapshot if isinstance(event, BlockStored)] == [(read,), (2,), (9,)]


def test_nothing_is_left_of_a_queue_that_ends_with_a_clear() -> None:
    merged = merge_batches([VllmBatch(1.0, events) for events in ([PAIR], [VllmRemoved([5], "GPU")], [VllmCleared()])])  # type: ignore[misc]
    assert merged is not None
    assert merged.events == (AllBlocksCleared(),)


def snapshot_events(*batches: list[Any]) -> list[Any]:
    """Return the events of the snapshot after these batches."""
    (clear, *events), *_ = (msgspec.msgpack.decode(each)[1] for each in replayed(sent_of([*batches, []])))
    assert clear == {"type": "AllBlocksCleared"}
    return events


OTHER = bytes(range(32))
LATER = LaterStored(
    [5, WIDE, OTHER], 4, [1, 2, 3, 4, 5, 6], 2, None, "GPU", None, [("a",), None, ("c",)], 0, "full_attention", None,
    None, None, "session", None, ["x", "y", "z"], [11, 12, 13, 14, 15, 16], {"kept": [1, 2]},
)  # fmt: skip


def test_a_whole_run_keeps_its_bytes() -> None:
    assert snapshot_events([LATER]) == [msgspec.msgpack.decode(msgspec.msgpack.encode(LATER))]


def test_a_part_of_a_run_keeps_unknown_fields() -> None:
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(LATER))
    first, last = snapshot_events([LATER], [VllmRemoved([-3], None, 0)])
    assert first == whole | {
        "block_hashes": [5], "token_ids": [1, 2], "extra_keys": [["a"]], "per_block": ["x"], "per_token": [11, 12]
    }  # fmt: skip
    assert last == whole | {
        "block_hashes": [OTHER], "parent_block_hash": WIDE, "token_ids": [5, 6], "extra_keys": [["c"]],
        "per_block": ["z"], "per_token": [15, 16],
    }  # fmt: skip
    assert list(last) == list(whole)


def test_a_part_of_an_array_stays_an_array() -> None:
    event = ArrayStored([5, WIDE], 4, [1, 2], 1, 3, "GPU", "name")
    assert snapshot_events([event], [ArrayRemoved([5])]) == [["BlockStored", [WIDE], 5, [2], 1, 3, "GPU", "name"]]


@pytest.mark.parametrize("as_raw", [False, True], ids=["row", "bytes"])
@pytest.mark.parametrize(
    ("event", "part"),
    [
        ({"type": "BlockRemoved", "block_hashes": [5, 6]}, {"type": "BlockRemoved", "block_hashes": [6]}),
        (["BlockRemoved", [5, 6], "GPU"], ["BlockRemoved", [6], "GPU"]),
        (
            LEAST | {"block_hashes": [5, 6], "token_ids": [7, 8]},
            LEAST | {"block_hashes": [6], "token_ids": [8], "parent_block_hash": 5},
        ),
        (
            ["BlockStored", [5, 6], 4, [7, 8], 1, *[None] * 11, "later", ["x", "y"], []],
            ["BlockStored", [6], 5, [8], 1, *[None] * 11, "later", ["y"], []],
        ),
        (["BlockRemoved", [5, 6], None, None, None, None, "later"], ["BlockRemoved", [6], *[None] * 4, "later"]),
    ],
    ids=range(5),
)
def test_a_part_has_the_fields_of_its_event_and_no_other(event: Any, part: Any, *, as_raw: bool) -> None:
    given = msgspec.Raw(msgspec.msgpack.encode(event)) if as_raw else event
    assert msgspec.msgpack.decode(slice_raw_event(given, 1, 2)) == part


def test_an_event_that_is_too_large_is_cut_with_all_its_fields() -> None:
    encoder = BatchEncoder("native")
    for event in (LATER, LaterRemoved([5, WIDE, OTHER], "GPU", 0, None, None, "kept")):
        parts = split_events((event,))  # type: ignore[arg-type]
        assert parts is not None
        read = [msgspec.msgpack.decode(encoder.encode_event(part[0])) for part in parts]
        whole = msgspec.msgpack.decode(encoder.encode_event(event))  # type: ignore[arg-type]
        assert [*read[0]["block_hashes"], *read[1]["block_hashes"]] == whole["block_hashes"]
        assert [each["whole"] for each in read] == [whole["whole"]] * 2
        assert oversize_reason((event,), encoder) is None  # type: ignore[arg-type]
    huge = stored(token_ids=[2**31] * 10**6, block_size=10**6)
    assert oversize_reason((huge, stored()), encoder) is None  # type: ignore[arg-type]  # each half is asked again
    salted = BlockStored((1, 2), None, (7, 8), 1, None, cache_salt="x" * 300_000)
    assert "2 blocks share" in str(oversize_reason((salted,), encoder))
    assert split_events((VllmRemoved([5], None),)) is None  # type: ignore[arg-type]
    assert split_events((VllmCleared(),)) is None  # type: ignore[arg-type]
    assert "one block" in str(oversize_reason((huge,), encoder))  # type: ignore[arg-type]
