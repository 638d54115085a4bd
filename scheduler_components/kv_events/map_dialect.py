"""The map dialect: ``{"type": "BlockStored", "block_hashes": ..., ...}`` of SGLang >= 0.5.2x and vLLM >= 0.2x.

Fields that are None are left out. vLLM's own typed decoder asks for ``medium`` and ``lora_name`` in every stored
event and ``medium`` in every removed one; the ``vllm`` flavour writes them as nil.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

__all__ = ["map_event_fields", "lower_to_maps"]

_decode = msgspec.msgpack.Decoder().decode


class _Map(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type"):
    """What goes on the wire: fields with a default are left out where they are None."""


class _Stored(_Map, frozen=True, tag="BlockStored"):
    block_hashes: Any
    parent_block_hash: Any
    token_ids: Any
    block_size: Any
    lora_id: Any
    medium: Any = None
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None
    cache_salt: Any = None
    session_id: Any = None


class _StoredForVllm(_Map, frozen=True, tag="BlockStored"):
    block_hashes: Any
    parent_block_hash: Any
    token_ids: Any
    block_size: Any
    lora_id: Any
    medium: Any
    lora_name: Any
    extra_keys: Any = None
    group_idx: Any = None
    cache_salt: Any = None
    session_id: Any = None


class _Removed(_Map, frozen=True, tag="BlockRemoved"):
    block_hashes: Any
    medium: Any = None
    group_idx: Any = None


class _RemovedForVllm(_Map, frozen=True, tag="BlockRemoved"):
    block_hashes: Any
    medium: Any
    group_idx: Any = None


class _Cleared(_Map, frozen=True, tag="AllBlocksCleared"):
    pass


def lower_to_maps(events: Iterable[KVCacheEvent], *, vllm: bool) -> list[msgspec.Struct]:
    """Write events as what msgspec encodes to the maps that go on the wire.

    Raises:
        TypeError: one is none of the three events; an unknown tag would cost some readers the whole batch.
        ValueError: tokens that do not fill the blocks, which readers drop.
    """
    return [_lower(event, vllm=vllm) for event in events]


def _lower(event: KVCacheEvent, *, vllm: bool) -> msgspec.Struct:
    if isinstance(event, BlockStored):
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            raise ValueError("tokens do not fill the blocks")
        return (_StoredForVllm if vllm else _Stored)(*msgspec.structs.astuple(event))
    if isinstance(event, BlockRemoved):
        return (_RemovedForVllm if vllm else _Removed)(*msgspec.structs.astuple(event))
    if isinstance(event, AllBlocksCleared):
        return _Cleared()
    raise TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")


def map_event_fields(raw: bytes | msgspec.Raw) -> tuple[str, dict[str, Any]]:
    """Read one map event into (tag, field values by name).

    Raises:
        DecodeError: not a map with a text ``type``.
    """
    try:
        fields = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"event is not msgpack: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise DecodeError('event is not a map with a "type"')
    return fields.pop("type"), fields
