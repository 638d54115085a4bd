"""Measure encoding next to a bare encoder of the same bytes, and decoding next to a single typed decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from benchmarks.publishers import PeerEvents
from benchmarks.workloads import SHAPES, Shape
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.events import ValidatedEvents
from scheduler_components.kv_events import BatchDecoder, BatchEncoder

NAME = "codec"
_CASES = {"1 block": 20_000, "64 events": 2_000, "8,192 tokens": 1_000, "128 events of 64 tokens": 500}
_ENCODE_GOALS = {"64 events": Goal(1.5, "SGLang"), "128 events of 64 tokens": Goal(1.3, "SGLang")}
_UNREAD_GOALS = {"64 events": Goal(45.0), "8,192 tokens": Goal(70.0)}
_ALL_FIELDS: dict[str, Any] = {
    "lora_id": 1,
    "lora_name": "adapter",
    "extra_keys": (("key",),),
    "group_idx": 0,
    "cache_salt": "tenant",
    "session_id": "session",
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 0,
    "locality": "LOCAL",
    "ownership": "host",
    "lookahead_token_ids": (7,),
}
"""Optional fields of an event. Every event also has a medium."""


class TypedMap(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """A stored event of the map dialect, for a reader that trusts its peer and expects no other event."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class TypedMapBatch(msgspec.Struct, array_like=True):
    """A batch of them."""

    ts: float
    events: list[TypedMap]
    attn_dp_rank: int | None = None


class TypedBatch(msgspec.Struct, array_like=True):
    """The type that a reader that trusts its peer decodes into."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Time both directions for each shape. Every event has a medium."""
    rows = []
    for shape, number in _CASES.items():
        events = tuple(BlockStored(**fields) for fields in SHAPES[shape].fields(1, tuple))
        rows += _encode_rows(shape, events, scale, number, peers)
        rows += _decode_rows(shape, events, scale, number // 4)
    events = tuple(BlockStored(**fields, **_ALL_FIELDS) for fields in _without_lora(SHAPES["64 events"]))
    return [*rows, *_encode_rows("64 events with all fields", events, scale, 500, ())]


def _without_lora(shape: Shape) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "lora_id"} for each in shape.fields(1, tuple)]


def _encode_rows(
    shape: str, events: tuple[BlockStored, ...], scale: Scale, number: int, peers: Sequence[str]
) -> list[Measurement]:
    """Time hand-made events, whose values are all validated, and events of the kit's caches."""
    bare_encode = msgspec.msgpack.Encoder().encode
    batches = {
        "": KVEventBatch(1.5, events, 0),
        ", from the kit's caches": KVEventBatch(1.5, ValidatedEvents(events), 0),
    }
    bare_batch = (1.5, [_bare(event) for event in events], 0)
    assert BatchEncoder("array").encode(batches[""], 0) == bare_encode(bare_batch)
    timed = {
        f"encode, {dialect}{whose}, {shape}": _call(BatchEncoder(dialect).encode, batch, 0)
        for dialect in ("array", "map")
        for whose, batch in batches.items()
    }
    beside = {"limit": _call(bare_encode, bare_batch)}
    beside |= {peer: _call(bare_encode, _batch_of(peer, shape)) for peer in peers}
    spent = _in_us(timed | beside, scale, number)
    goal = _ENCODE_GOALS.get(shape)
    return [Measurement(NAME, what, "us", spent[what], {name: spent[name] for name in beside}, goal) for what in timed]


def _decode_rows(shape: str, events: tuple[BlockStored, ...], scale: Scale, number: int) -> list[Measurement]:
    batch = KVEventBatch(1.5, events, 0)
    payload, map_payload = (BatchEncoder(dialect).encode(batch, 0) for dialect in ("array", "map"))
    whole, bare, of_maps = BatchDecoder(), BatchDecoder(decode_tokens=False), BatchDecoder()
    spent = _in_us(
        {
            "ours": _call(whole.decode, payload),
            "map": _call(of_maps.decode, map_payload),
            "without tokens": _call(bare.decode, payload),
            "limit": _call(msgspec.msgpack.Decoder(TypedBatch).decode, payload),
            "map limit": _call(msgspec.msgpack.Decoder(TypedMapBatch).decode, map_payload),
        },
        scale,
        number,
    )
    unread = Measurement(
        NAME, f"decode without tokens, {shape}", "us", spent["without tokens"], {}, _UNREAD_GOALS.get(shape)
    )
    return [
        Measurement(NAME, f"{what}, {shape}", "us", spent[timed], {"limit": spent[limit]}, Goal(1.3, "limit"))
        for what, timed, limit in (("decode", "ours", "limit"), ("decode of the map dialect", "map", "map limit"))
    ] + [unread]


def _batch_of(peer: str, shape: str) -> Any:
    """Make the same step in a peer's classes, which the peer encodes as maps."""
    subject = PeerEvents(peer, SHAPES[shape])
    return subject.make_batch(subject.make_events(1), 1.5)


def _bare(event: BlockStored) -> tuple[Any, ...]:
    values = list(astuple(event))
    while values[-1] is None:
        values.pop()
    return ("BlockStored", *values)


def _call(function: Any, *arguments: Any) -> Any:
    return lambda: function(*arguments)


def _in_us(calls: dict[str, Any], scale: Scale, number: int) -> dict[str, list[float]]:
    found = measure_interleaved(calls, turns=2 * scale.turns, number=scale.of(number))
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
