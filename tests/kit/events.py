"""Builders of events, batches and payloads.

A block's tokens follow from its hash, so that a hash never names two different blocks.
"""

from __future__ import annotations

from typing import Any

from scheduler_components import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchEncoder

_MOST_TOKENS = 2**31


class UnknownEvent(KVCacheEvent, frozen=True):
    """An event of a class that no encoder knows. No encoder has a form for its field."""

    x: object = None


MEDIA = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.STORAGE,
    "EXTERNAL": Tier.STORAGE,
    "STORAGE": Tier.STORAGE,
    "TAPE": None,
}
"""Media of events and their tiers. The last one is an unknown medium."""


def stored(
    *hashes: int, parent: int | None = None, medium: str | None = None, block_size: int = 1, **fields: Any
) -> BlockStored:
    """Return an event that stores a run of blocks below ``parent``; ``fields`` are the optional fields."""
    tokens = tuple(each % _MOST_TOKENS for each in hashes for _ in range(block_size))
    return BlockStored(hashes, parent, tokens, block_size, None, medium, **fields)


def stored_run(first: int, count: int, medium: str | None = None, *, block_size: int = 1) -> BlockStored:
    """Return an event that stores the blocks from ``first`` on, below block ``first - 1`` if there is one."""
    parent = first - 1 if first else None
    return stored(*range(first, first + count), parent=parent, medium=medium, block_size=block_size)


def removed_run(first: int, count: int, medium: str | None = None) -> BlockRemoved:
    """Return an event that removes the blocks from ``first`` on."""
    return BlockRemoved(tuple(range(first, first + count)), medium)


def batch(*events: KVCacheEvent, ts: float = 1.0) -> KVEventBatch:
    """Return a batch of events."""
    return KVEventBatch(ts, events)


def numbered_batch(number: int) -> KVEventBatch:
    """Return a batch that a test recognizes by its one removed block."""
    return batch(BlockRemoved((number,)))


def payload(*events: KVCacheEvent, ts: float = 1.0, rank: int = 0) -> bytes:
    """Encode a batch as a publisher of ``rank`` does."""
    return BatchEncoder().encode(batch(*events, ts=ts), rank)
