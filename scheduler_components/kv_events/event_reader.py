"""Reading one event of either dialect, forgiving what peers are known to vary."""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.array_dialect import array_event_fields
from scheduler_components.kv_events.map_dialect import map_event_fields
from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

__all__ = ["WireEvent", "check_event", "read_event", "signed_hash"]

WireEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""What a reader knows; a peer's other events are errors, each of its own."""

_INT64_LIMIT = 1 << 63
_UINT64 = 1 << 64


def check_event(event: KVCacheEvent) -> None:
    """Refuse an event whose tokens do not fill its blocks; ranges of single fields are part of their types.

    Raises:
        DecodeError: with the numbers that do not agree.
    """
    if isinstance(event, BlockStored) and len(event.token_ids) != len(event.block_hashes) * event.block_size:
        raise DecodeError(
            f"{len(event.token_ids)} tokens do not fill {len(event.block_hashes)} blocks of {event.block_size}"
        )


_EVENT_TYPES: dict[str, Any] = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}


def read_event(raw: bytes) -> WireEvent:
    """Read one event.

    Raises:
        DecodeError: not one of the three, or a field of it is wrong.
    """
    is_map = raw[0] & 0xF0 == 0x80 or raw[0] in (0xDE, 0xDF)
    tag, fields = map_event_fields(raw) if is_map else array_event_fields(raw)
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    if tag not in _EVENT_TYPES:
        raise DecodeError(f"unknown event {tag!r:.60}")
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise DecodeError("block_hashes is not an array")
    fields["block_hashes"] = [signed_hash(value) for value in hashes]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = signed_hash(fields["parent_block_hash"])
    if tag == "BlockStored":
        fields.setdefault("parent_block_hash", None)
        fields.setdefault("lora_id", None)
    event = _convert(_EVENT_TYPES[tag], fields)
    check_event(event)
    return event


def _convert(kind: Any, fields: dict[str, Any]) -> BlockStored | BlockRemoved:
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    for name in _FORGIVEN:
        if name in known and not isinstance(known[name], str | int | list | None):
            del known[name]
    try:
        values = msgspec.convert(known, _FIELD_TYPES[kind])
    except (msgspec.ValidationError, RecursionError) as error:
        raise DecodeError(str(error)) from error
    event: BlockStored | BlockRemoved = kind(**{name: getattr(values, name) for name in kind.__struct_fields__})
    return event


def _map_twin(kind: Any) -> Any:
    """The same fields as ``kind``, read by name: msgspec reads an array-like struct from arrays only."""
    fields = []
    for field in msgspec.structs.fields(kind):
        fields.append((field.name, field.type) if field.required else (field.name, field.type, field.default))
    return msgspec.defstruct(f"{kind.__name__}Fields", fields, frozen=True)


_FIELD_TYPES = {kind: _map_twin(kind) for kind in _EVENT_TYPES.values()}
_FORGIVEN = ("medium", "lora_name", "extra_keys", "group_idx", "cache_salt", "session_id")


def signed_hash(value: object) -> int:
    """Fold a peer's block hash to a signed 64-bit integer.

    Unsigned integers (vLLM) wrap; bytes (newer vLLM) give their last 8, big-endian, as the smg gateway folds them.

    Raises:
        DecodeError: neither an integer of 64 bits nor bytes.
    """
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big", signed=len(value) >= 8)
    if isinstance(value, int) and not isinstance(value, bool):
        return value - _UINT64 if value >= _INT64_LIMIT else value
    raise DecodeError(f"a hash is {type(value).__name__}, not an integer")
