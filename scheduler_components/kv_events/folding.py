"""Folding events into a block state, and writing a block state as events again.

Two users: the stream folds payloads that leave its window, keeping each stored event's bytes; the publisher
collapses batches that wait too long into the one batch that they amount to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.block_state import BlockState, Segment, Tier, tier_of
from scheduler_components.kv_events.event_reader import read_event
from scheduler_components.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
)

__all__ = ["collapse", "fold_payload", "segment_event"]


class _StoredHead(msgspec.Struct, frozen=True, gc=False):
    """What folding needs of a stored event. Token ids, the bulk of it, are skipped and not made into integers."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw | None = None
    group_idx: int | None = None

    def fold_into(self, state: BlockState[bytes], raw: bytes) -> None:
        state.store(tier_of(self.medium, self.group_idx), self.block_hashes, self.parent_block_hash, raw)


class _RemovedHead(msgspec.Struct, frozen=True, gc=False):
    block_hashes: tuple[int, ...]
    medium: str | None = None
    group_idx: int | None = None

    def fold_into(self, state: BlockState[bytes], raw: bytes) -> None:  # noqa: ARG002 - nothing of it is kept
        state.remove(tier_of(self.medium, self.group_idx), self.block_hashes)


class _ClearedHead(msgspec.Struct, frozen=True, gc=False):
    def fold_into(self, state: BlockState[bytes], raw: bytes) -> None:  # noqa: ARG002 - nothing of it is kept
        state.clear()


class _ArrayStored(_StoredHead, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _ArrayRemoved(_RemovedHead, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ArrayCleared(_ClearedHead, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _MapStored(_StoredHead, frozen=True, tag_field="type", tag="BlockStored"):
    pass


class _MapRemoved(_RemovedHead, frozen=True, tag_field="type", tag="BlockRemoved"):
    pass


class _MapCleared(_ClearedHead, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


_Raw = msgspec.Raw
_Head = _StoredHead | _RemovedHead | _ClearedHead
_events = msgspec.msgpack.Decoder(tuple[_Raw, list[_Raw], _Raw]).decode
_array_heads = msgspec.msgpack.Decoder(tuple[_Raw, list[_ArrayStored | _ArrayRemoved | _ArrayCleared], _Raw]).decode
_map_heads = msgspec.msgpack.Decoder(tuple[_Raw, list[_MapStored | _MapRemoved | _MapCleared], _Raw]).decode
_ARRAY_FIRST_BYTES = frozenset(range(0x90, 0xA0)) | {0xDC, 0xDD}
_HEADER_BYTES = 11
"""An array of three, eight bytes of time behind their tag, and the length of a list of up to fifteen events."""
_LIST_OF_ONE = 0x91
_ANY_RANK = b"\x00"


def fold_payload(state: BlockState[bytes], payload: bytes) -> None:
    """Fold one batch that a ``BatchEncoder`` wrote, in either dialect; a stored run keeps its event's bytes."""
    try:
        if payload[_HEADER_BYTES - 1] == _LIST_OF_ONE:
            # Its bytes, which may be all of a large payload, are found without reading through them again.
            _, heads, rank = _heads_decoder(payload[_HEADER_BYTES])(payload)
            heads[0].fold_into(state, payload[_HEADER_BYTES : len(payload) - len(bytes(rank))])
            return
        events = [bytes(event) for event in _events(payload)[1]]
        if events:
            for head, event in zip(_heads_decoder(events[0][0])(payload)[1], events, strict=True):
                head.fold_into(state, event)
    except msgspec.ValidationError:
        events = [bytes(event) for event in _events(payload)[1]]
        if len(events) == 1:
            _fold_odd_event(state, events[0])
            return
        for event in events:  # as batches of one, so that only the odd one is read as such
            fold_payload(state, payload[: _HEADER_BYTES - 1] + bytes([_LIST_OF_ONE]) + event + _ANY_RANK)


def _heads_decoder(first_byte: int) -> Callable[[bytes], tuple[_Raw, Sequence[_Head], _Raw]]:
    return _array_heads if first_byte in _ARRAY_FIRST_BYTES else _map_heads


def _fold_odd_event(state: BlockState[bytes], raw: bytes) -> None:
    """A scheduler's odd event was encoded as it was given. What readers make of it is what is folded."""
    try:
        event = read_event(raw)
    except DecodeError:
        return
    if isinstance(event, BlockStored):
        state.store(tier_of(event.medium, event.group_idx), event.block_hashes, event.parent_block_hash, raw)
    elif isinstance(event, BlockRemoved):
        state.remove(tier_of(event.medium, event.group_idx), event.block_hashes)
    else:
        state.clear()


def segment_event(segment: Segment[bytes]) -> BlockStored:
    """The stored event of a segment that is only a part of its run."""
    event = read_event(segment.run.source)
    assert isinstance(event, BlockStored)
    return _part(event, segment)


def _part(event: BlockStored, segment: Segment[Any]) -> BlockStored:
    if segment.is_whole:
        return event
    first, stop, size = segment.first, segment.stop, event.block_size
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[first:stop],
        parent_block_hash=segment.parent,
        token_ids=event.token_ids[first * size : stop * size],
        extra_keys=None if event.extra_keys is None else event.extra_keys[first:stop],
    )


def collapse(batches: Iterable[EventBatch]) -> KVEventBatch | None:
    """The one batch that ``batches`` amount to: cleared, then removed, then stored, parents first.

    Nothing is lost by it, so no consumer has to start over. Of a block that was stored and removed among them only
    the removal is left, 9 bytes on the wire, and a later clear takes that too. None when there were no batches.
    Events that are none of the three are kept, to be refused by name when they are encoded.
    """
    state: BlockState[BlockStored] = BlockState()
    removed: dict[Tier, dict[int, None]] = {}
    others: list[KVCacheEvent] = []
    cleared, last = False, None
    for last in batches:
        for event in last.events:
            if isinstance(event, BlockStored):
                tier = tier_of(event.medium, event.group_idx)
                state.store(tier, event.block_hashes, event.parent_block_hash, event)
            elif isinstance(event, BlockRemoved):
                tier = tier_of(event.medium, event.group_idx)
                state.remove(tier, event.block_hashes)
                removed.setdefault(tier, {}).update(dict.fromkeys(event.block_hashes))
            elif isinstance(event, AllBlocksCleared):
                state.clear()
                removed.clear()
                cleared = True
            else:
                others.append(event)
    if last is None:
        return None
    events = [*([AllBlocksCleared()] if cleared else []), *others, *_removals(removed)]
    events += [_part(segment.run.source, segment) for segment in state.segments()]
    return KVEventBatch(ts=last.ts, events=tuple(events), attn_dp_rank=last.attn_dp_rank)


def _removals(removed: dict[Tier, dict[int, None]]) -> Iterator[BlockRemoved]:
    for (medium, group_idx), hashes in removed.items():
        if hashes:
            yield BlockRemoved(tuple(hashes), None if medium == "GPU" else medium, group_idx)
