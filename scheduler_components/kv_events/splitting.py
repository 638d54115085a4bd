"""Cutting events in two, for batches that are too large for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from scheduler_components.kv_events.events import BlockRemoved, BlockStored, KVCacheEvent

__all__ = ["halves"]


def halves(events: Sequence[KVCacheEvent]) -> tuple[tuple[KVCacheEvent, ...], tuple[KVCacheEvent, ...]] | None:
    """``events`` as two runs, to be applied one after the other; None for what is one block or less.

    A single event is cut between its blocks, the second half below the first.
    """
    if len(events) > 1:
        middle = len(events) // 2
        return tuple(events[:middle]), tuple(events[middle:])
    event = events[0]
    if not isinstance(event, BlockStored | BlockRemoved) or len(event.block_hashes) < 2:
        return None
    hashes, middle = event.block_hashes, len(event.block_hashes) // 2
    if isinstance(event, BlockRemoved):
        return (replace(event, block_hashes=hashes[:middle]),), (replace(event, block_hashes=hashes[middle:]),)
    tokens, cut, keys = event.token_ids, middle * event.block_size, event.extra_keys
    first = replace(
        event, block_hashes=hashes[:middle], token_ids=tokens[:cut], extra_keys=None if keys is None else keys[:middle]
    )
    second = replace(
        event,
        block_hashes=hashes[middle:],
        parent_block_hash=hashes[middle - 1],
        token_ids=tokens[cut:],
        extra_keys=None if keys is None else keys[middle:],
    )
    return (first,), (second,)
