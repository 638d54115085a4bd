"""Encoding beside a bare encoder that makes the same bytes; decoding beside one typed decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.measure import Goal, Measurement, Scale, measure_in_turns
from benchmarks.subjects import PeerEvents
from benchmarks.workloads import SHAPES
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder

NAME = "codec"
_CASES = {"1 block": 20_000, "64 events": 2_000, "8,192 tokens": 1_000}


class TypedMap(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """A stored event of the map dialect, for a reader that trusts its peer and knows no other event."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None


class TypedMapBatch(msgspec.Struct, array_like=True):
    """A batch of them."""

    ts: float
    events: list[TypedMap]
    attn_dp_rank: int | None = None


class TypedBatch(msgspec.Struct, array_like=True):
    """What a reader that trusts its peer decodes into."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Time both directions for each shape, and the dialect that needs the way event by event."""
    rows = []
    for shape, number in _CASES.items():
        events = tuple(BlockStored(**fields) for fields in SHAPES[shape].fields(1))
        batch = KVEventBatch(1.5, events, 0)
        bare_batch = (1.5, [_bare(event) for event in events], 0)
        encode, bare_encode = BatchEncoder("array").encode, msgspec.msgpack.Encoder().encode
        payload = encode(batch, 0)
        assert payload == bare_encode(bare_batch)
        map_payload = BatchEncoder("map").encode(batch, 0)
        decode, typed_decode = BatchDecoder().decode, msgspec.msgpack.Decoder(TypedBatch).decode
        encoding = {"ours": _call(encode, batch, 0), "limit": _call(bare_encode, bare_batch)}
        encoding |= {peer: _call(bare_encode, _batch_of(peer, shape)) for peer in peers}
        decoding = {
            "ours": _call(decode, payload),
            "map": _call(decode, map_payload),
            "limit": _call(typed_decode, payload),
            "map limit": _call(msgspec.msgpack.Decoder(TypedMapBatch).decode, map_payload),
        }
        spent = _in_us(encoding, scale, number)
        ours = spent.pop("ours")
        rows.append(Measurement(NAME, f"encode, {shape}", "us", ours, spent, Goal(1.05, "limit")))
        spent = _in_us(decoding, scale, number // 4)
        for what, timed, bare in (("decode", "ours", "limit"), ("decode of the map dialect", "map", "map limit")):
            beside = {"limit": spent[bare]}
            rows.append(Measurement(NAME, f"{what}, {shape}", "us", spent[timed], beside, Goal(1.3, "limit")))
    return rows


def _batch_of(peer: str, shape: str) -> Any:
    """The same step in a peer's classes, which it encodes as maps."""
    subject = PeerEvents(peer, SHAPES[shape])
    return subject.make_batch(subject.make_events(1), 1.5)


def _bare(event: BlockStored) -> tuple[Any, ...]:
    return (
        "BlockStored",
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        event.lora_id,
    )


def _call(function: Any, *arguments: Any) -> Any:
    return lambda: function(*arguments)


def _in_us(calls: dict[str, Any], scale: Scale, number: int) -> dict[str, list[float]]:
    found = measure_in_turns(calls, turns=2 * scale.turns, number=scale.of(number))
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
