"""Publish each block of vLLM's pool once: a store with its first copy, and a removal with its last.

vLLM does not merge blocks of equal content: two requests that compute one prompt concurrently leave two copies of each
block under one hash, and vLLM publishes the store and the removal of each copy. A reader that keeps a set of hashes
(this kit's view, gateways) then loses the block with the removal of its first copy. A reader that counts copies
(Dynamo, llm-d) is correct until it reads a snapshot, which has each block once, or until a request asks for full
reports (``kv_cache_report_mode``), which repeat stored blocks and look like further copies.

So no reader can count copies from events alone. The pool has the number of copies:
``patch_removed_events_to_last_copy`` publishes a removal only if the pool's table has no copy left, and
``VllmPublishedBlocks`` drops the stores of published blocks. Then both kinds of readers hold the blocks of the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar

from msgspec.structs import replace

from scheduler_components.errors import ConfigError
from scheduler_components.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, true_runs

__all__ = ["ONCE_PER_BLOCK", "VllmPublishedBlocks", "patch_removed_events_to_last_copy"]

ONCE_PER_BLOCK = "once_per_block"
"""The switch of the plugin for this module. It is on by default."""

_STORED, _REMOVED, _CLEARED = (kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared))

_Batch = TypeVar("_Batch", bound=Any)


class VllmPublishedBlocks:
    """The published blocks of one stream by KV-cache group. It does no I/O and is not thread-safe.

    It accepts vLLM's events. Events of other media do not belong to the pool and pass unchanged.

    Attributes:
        num_repeated: stores of published blocks that were dropped since the start.
    """

    __slots__ = ("_groups", "num_repeated")

    def __init__(self) -> None:
        self._groups: dict[int | None, set[int | bytes]] = {}
        self.num_repeated = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def drop_published(self, batch: _Batch) -> _Batch | None:
        """Return the batch without the stores of published blocks; None if no event is left."""
        kept: list[Any] | None = None  # Most batches stay as they are.
        for number, event in enumerate(batch.events):
            try:
                parts = self._changed(event)
            except (AttributeError, TypeError):
                parts = None  # It is no event of vLLM: the encoder raises an error that names it.
            if parts is not None and kept is None:
                kept = batch.events[:number]
            if kept is not None:
                kept += (event,) if parts is None else parts
        if kept is None:
            return batch
        return replace(batch, events=kept) if kept else None

    def _changed(self, event: Any) -> Sequence[Any] | None:
        """Return what is published instead of the event; None for the event itself."""
        tag = event.__struct_config__.tag
        if tag == _REMOVED:
            if event.medium == MEDIUM_GPU:
                self._published(event).difference_update(event.block_hashes)
        elif tag == _STORED:
            if event.medium == MEDIUM_GPU:
                published = self._published(event)
                if not published.isdisjoint(event.block_hashes):
                    return self._new_parts(event, published)
                published.update(event.block_hashes)
        elif tag == _CLEARED:
            self._groups.clear()
        return None

    def _published(self, event: Any) -> set[int | bytes]:
        published = self._groups.get(event.group_idx)
        if published is None:
            published = self._groups[event.group_idx] = set()
        return published

    def _new_parts(self, event: Any, published: set[int | bytes]) -> Sequence[Any] | None:
        """Return the new blocks of a stored event as runs of consecutive blocks."""
        hashes = event.block_hashes
        is_new = [block_hash not in published for block_hash in hashes]
        self.num_repeated += is_new.count(False)
        published.update(hashes)
        if True in is_new and len(event.token_ids) != len(hashes) * event.block_size:
            return None  # A group that skips blocks: the tokens cannot be assigned to its blocks.
        return [_blocks(event, first, stop) for first, stop in true_runs(is_new)]


def _blocks(event: Any, first: int, stop: int) -> Any:
    """Return the blocks ``first`` to ``stop - 1`` of a stored event, with their parts of lists per block or token."""
    num_blocks, size = len(event.block_hashes), event.block_size
    changes: dict[str, Any] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if not isinstance(value, list | tuple):
            continue
        if len(value) == num_blocks:
            changes[name] = value[first:stop]
        elif len(value) == num_blocks * size:
            changes[name] = value[first * size : stop * size]
    if first:
        changes["parent_block_hash"] = event.block_hashes[first - 1]
    return replace(event, **changes)


def patch_removed_events_to_last_copy() -> None:
    """Patch vLLM's block pool in this process to publish a removal only with the last copy; safe to call again.

    Raises:
        ConfigError: the block pool of this vLLM does not have the patched functions.
    """
    try:
        module: Any = import_module("vllm.v1.core.block_pool")
        pool, has_copy = module.BlockPool, module.BlockHashToBlockMap.get_one_block
        publish = pool._emit_block_removed_events
    except (ImportError, AttributeError) as error:
        problem = f"does not support this version of vLLM ({error})"
        raise ConfigError(ONCE_PER_BLOCK, True, problem, "give false, or upgrade scheduler-components") from None
    if publish.__module__ == __name__:
        return

    @functools.wraps(publish, assigned=())
    def publish_last_copies(self: Any, block_hashes: Sequence[Any]) -> None:
        left = self.cached_block_hash_to_block
        publish(self, [each for each in block_hashes if has_copy(left, each) is None])

    pool._emit_block_removed_events = publish_last_copies
