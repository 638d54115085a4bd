"""The map dialect: ``{"type": "BlockStored", "block_hashes": ..., ...}`` of SGLang >= 0.5.2x and vLLM >= 0.2x.

Fields that are None are left out. vLLM's own typed decoder asks for ``medium`` and ``lora_name`` in every stored
event and ``medium`` in every removed one; the ``vllm`` flavour writes them as nil.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.events import BlockStored, KVCacheEvent

__all__ = ["event_fields", "lower"]

_ALWAYS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}
_ALWAYS_FOR_VLLM = {"BlockStored": ("medium", "lora_name"), "BlockRemoved": ("medium",), "AllBlocksCleared": ()}
_decode = msgspec.msgpack.Decoder().decode


def lower(event: KVCacheEvent, *, vllm: bool) -> dict[str, Any]:
    """Write ``event`` as the map that goes on the wire.

    Raises:
        TypeError: not one of the three events; an unknown tag would cost some readers the whole batch.
        ValueError: tokens that do not fill the blocks, which readers drop.
    """
    tag = type(event).__name__
    if tag not in _ALWAYS:
        raise TypeError(f"{tag} is not a KV-cache event of the wire")
    if isinstance(event, BlockStored) and len(event.token_ids) != len(event.block_hashes) * event.block_size:
        raise ValueError("tokens do not fill the blocks")
    kept = _ALWAYS[tag] + (_ALWAYS_FOR_VLLM[tag] if vllm else ())
    fields: dict[str, Any] = {"type": tag}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None or name in kept:
            fields[name] = value
    return fields


def event_fields(raw: bytes | msgspec.Raw) -> tuple[str, dict[str, Any]]:
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
