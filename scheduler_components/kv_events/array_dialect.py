"""The array dialect: ``["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium?, lora_name?, ...]``.

Trailing None are trimmed. Reading is more forgiving than writing: hashes may be unsigned or bytes, positions that
are not known yet are skipped, and SGLang's short-lived ``BlockStoredWithMetadata`` (an array whose position 7 is a
map) is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

__all__ = ["STORED_POSITIONS", "array_event_fields", "lower_to_arrays"]

STORED_POSITIONS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "cache_salt",
    "session_id",
)
"""Positions after the tag. The first seven are fixed by released peers; the rest were only ever appended."""

_REMOVED_POSITIONS = ("block_hashes", "medium", "group_idx")
_METADATA_POSITION = 6
_decode = msgspec.msgpack.Decoder().decode


def lower_to_arrays(events: Iterable[KVCacheEvent]) -> list[tuple[Any, ...]]:
    """Write events as the arrays that go on the wire: all in one loop, which is half of what encoding small ones costs.

    Raises:
        TypeError: one is none of the three events; an unknown tag would cost some readers the whole batch.
        ValueError: tokens that do not fill the blocks, which readers drop.
    """
    lowered: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, BlockStored):
            hashes, tokens, size = event.block_hashes, event.token_ids, event.block_size
            if len(tokens) != len(hashes) * size:
                raise ValueError("tokens do not fill the blocks")
            fixed = ("BlockStored", hashes, event.parent_block_hash, tokens, size, event.lora_id)
            # Looks at fields cost less than a tuple of them and its comparison, and most events have no option.
            if (
                event.medium is None
                and event.lora_name is None
                and event.extra_keys is None
                and event.group_idx is None
                and event.cache_salt is None
                and event.session_id is None
            ):
                lowered.append(fixed)
            else:
                lowered.append(fixed + _options_of(event))
        elif isinstance(event, BlockRemoved):
            lowered.append(("BlockRemoved", event.block_hashes, *_trimmed((event.medium, event.group_idx))))
        elif isinstance(event, AllBlocksCleared):
            lowered.append(("AllBlocksCleared",))
        else:
            raise TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")
    return lowered


def _options_of(event: BlockStored) -> tuple[Any, ...]:
    return _trimmed(
        (event.medium, event.lora_name, event.extra_keys, event.group_idx, event.cache_salt, event.session_id)
    )


def _trimmed(options: tuple[Any, ...]) -> tuple[Any, ...]:
    while options and options[-1] is None:
        options = options[:-1]
    return options


def array_event_fields(raw: bytes | msgspec.Raw) -> tuple[str, dict[str, Any]]:
    """Read one array event into (tag, field values by name); unknown trailing positions are skipped.

    Raises:
        DecodeError: not an array that starts with a text tag.
    """
    try:
        items = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"event is not msgpack: {error}") from error
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise DecodeError("event is not an array that starts with a tag")
    tag, values = items[0], items[1:]
    if tag == "BlockStoredWithMetadata":
        fields = dict(zip(STORED_POSITIONS, values[:_METADATA_POSITION], strict=False))
        metadata = values[_METADATA_POSITION] if len(values) > _METADATA_POSITION else None
        return "BlockStored", fields | (metadata if isinstance(metadata, dict) else {})
    positions = _REMOVED_POSITIONS if tag == "BlockRemoved" else STORED_POSITIONS
    return tag, dict(zip(positions, values, strict=False))
