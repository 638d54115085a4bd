"""Reading a whole batch of the map dialect in one typed decode: what today's SGLang and vLLM send.

msgspec reads maps into structs of their own, since ``BlockStored`` and its like are read from arrays. What does not
fit at once is an error here, and the caller reads the batch event by event.
"""

from __future__ import annotations

import msgspec

from scheduler_components.kv_events.event_reader import WireEvent, signed_hash
from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockSize, BlockStored, TokenId

__all__ = ["read_map_batch"]

_PeersHash = int | bytes
_INT64_LIMIT = 1 << 63


class _Map(msgspec.Struct, frozen=True, gc=False, tag_field="type"):
    """Fields that are not known are skipped."""


class _Stored(_Map, frozen=True, tag="BlockStored"):
    block_hashes: tuple[_PeersHash, ...]
    token_ids: tuple[TokenId, ...]
    block_size: BlockSize
    parent_block_hash: _PeersHash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[str | int, ...] | None, ...] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class _Removed(_Map, frozen=True, tag="BlockRemoved"):
    block_hashes: tuple[_PeersHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(_Map, frozen=True, tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    attn_dp_rank: int | None = None


_decode = msgspec.msgpack.Decoder(_MapBatch).decode


def read_map_batch(payload: bytes) -> tuple[float, tuple[WireEvent, ...], int | None]:
    """Read ``[ts, events, rank]`` of maps; whether tokens fill their blocks is for the caller to check.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError, DecodeError: something is not as expected.
    """
    batch = _decode(payload)
    return batch.ts, tuple([_event(fields) for fields in batch.events]), batch.attn_dp_rank


def _event(fields: _Stored | _Removed | _Cleared) -> WireEvent:
    if type(fields) is _Stored:
        parent = fields.parent_block_hash
        return BlockStored(
            _signed(fields.block_hashes),
            None if parent is None else signed_hash(parent),
            fields.token_ids,
            fields.block_size,
            fields.lora_id,
            fields.medium,
            fields.lora_name,
            fields.extra_keys,
            fields.group_idx,
            fields.cache_salt,
            fields.session_id,
        )
    if type(fields) is _Removed:
        return BlockRemoved(_signed(fields.block_hashes), fields.medium, fields.group_idx)
    return AllBlocksCleared()


def _signed(hashes: tuple[_PeersHash, ...]) -> tuple[int, ...]:
    """Signed 64-bit integers, whatever the peer sent. Whether all are so already is asked at once: most are."""
    try:
        are_signed = not hashes or max(hashes) < _INT64_LIMIT  # type: ignore[operator]
    except TypeError:
        are_signed = False  # bytes
    return hashes if are_signed else tuple(map(signed_hash, hashes))  # type: ignore[return-value]
