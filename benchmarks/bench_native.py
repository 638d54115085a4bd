"""Measure the dialect native: encode an engine's events next to its own encoder, and relay bytes unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.measure import Measurement, Scale, measure_interleaved
from benchmarks.publishers import PeerEvents
from benchmarks.workloads import SHAPES
from observability.relay.passthrough import PassthroughDecoder, SourceEncoding
from scheduler_components import KVEventBatch
from scheduler_components.events import ValidatedEvents
from scheduler_components.kv_events import BatchDecoder, BatchEncoder

NAME = "native"
_CASES = {"1 block": 10_000, "16 events": 2_000, "8,192 tokens": 500}


class EngineStored(msgspec.Struct, tag="BlockStored", tag_field="type", kw_only=True):
    """A stored event as vLLM 0.32 declares it, for machines without vLLM."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class EngineBatch(msgspec.Struct, array_like=True):
    """A batch of them."""

    ts: float
    events: list[EngineStored]
    data_parallel_rank: int | None = None


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Time `encode` of an engine's batch, and a relay from payload to payload."""
    return [row for shape, number in _CASES.items() for row in _rows(shape, number, scale, peers)]


def _rows(shape: str, number: int, scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    batch, encode = _engines_batch(shape, peers), BatchEncoder("native").encode
    bare = msgspec.msgpack.Encoder().encode
    payload = bare(batch)
    assert encode(batch, 0) == payload
    relay, decode = _Relay(), BatchDecoder().decode
    encode_again = BatchEncoder("vllm").encode
    assert relay.passes_on(payload) == payload
    calls = {
        "ours": lambda: encode(batch, 0),
        "limit": lambda: bare(batch),
        "passed on": lambda: relay.passes_on(payload),
        "again": lambda: encode_again(_checked(decode(payload).events), 0),
    }
    found = measure_interleaved(calls, turns=2 * scale.turns, number=scale.of(number))
    spent = {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
    own = "vLLM's own encoder" if "vLLM" in peers else "the engine's own encoder"
    return [
        Measurement(NAME, f"encode, {shape}", "us", spent["ours"], {own: spent["limit"]}),
        Measurement(
            NAME, f"relay, bytes to bytes, {shape}", "us", spent["passed on"], {"encoded again": spent["again"]}
        ),
    ]


def _engines_batch(shape: str, peers: Sequence[str]) -> Any:
    if "vLLM" in peers:
        subject = PeerEvents("vLLM", SHAPES[shape])
        batch = subject.make_batch(subject.make_events(1), 1.5)
        batch.data_parallel_rank = 0
        return batch
    return EngineBatch(1.5, [EngineStored(**fields) for fields in SHAPES[shape].fields(1)], 0)


def _checked(events: Sequence[Any]) -> KVEventBatch:
    return KVEventBatch(1.5, ValidatedEvents(events), 0)


class _Relay:
    """A relay from payload to payload, without merger and sockets."""

    def __init__(self) -> None:
        self._decode, self._encode = PassthroughDecoder().decode, BatchEncoder("native").encode
        self._form = SourceEncoding()

    def passes_on(self, payload: bytes) -> bytes:
        return self._encode(_checked(self._form.rows(self._decode(payload).events)), 0)
