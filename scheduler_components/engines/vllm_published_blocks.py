"""Each block of vLLM's pool told once: stored with its first copy, removed with its last.

vLLM never merges blocks of equal content: two requests that compute one prompt side by side leave two copies of each
block under one hash. It tells the coming and the going of each copy. A reader that keeps a set of hashes (this kit's
view, gateways) then loses the block with its first copy. A reader that counts (Dynamo, llm-d) is right until it reads a
base, which tells each block once, or until a request asks for full reports (``kv_cache_report_mode``): these repeat
blocks that are there, and look like further copies.

So nobody who sees events alone can count copies. The pool knows: a removal is told when no copy is left in its table
(``patch_removed_events_to_last_copy``), and a block that was told is not told again (``PublishedBlocks``). Both kinds
of readers
hold what the pool holds then.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar

from msgspec.structs import replace

from scheduler_components.errors import ConfigError
from scheduler_components.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, true_runs

__all__ = ["ONCE_PER_BLOCK", "PublishedBlocks", "patch_removed_events_to_last_copy"]

ONCE_PER_BLOCK = "once_per_block"
"""The plugin's switch for all of this."""

_STORED, _REMOVED, _CLEARED = (kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared))

_Batch = TypeVar("_Batch", bound=Any)


class PublishedBlocks:
    """Which blocks of the pool were told and are not gone, by KV-cache group. Pure; one per stream, one thread calls.

    Takes vLLM's events as they are. Those of other media are not the pool's: they pass as they come.

    Attributes:
        num_repeated: blocks that were stored while they were there, and so left out, since the start.
    """

    __slots__ = ("_groups", "num_repeated")

    def __init__(self) -> None:
        self._groups: dict[int | None, set[int | bytes]] = {}
        self.num_repeated = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def drop_published(self, batch: _Batch) -> _Batch | None:
        """Return the batch without what was told before; None where nothing is left of it."""
        events: list[Any] = []
        for event in batch.events:
            try:
                events += self._first_told(event)
            except (AttributeError, TypeError):
                events.append(event)  # it is no event of vLLM's: the encoder refuses it by name
        return replace(batch, events=events) if events else None

    def _first_told(self, event: Any) -> Sequence[Any]:
        tag = event.__struct_config__.tag
        if tag == _CLEARED:
            self._groups.clear()
        elif event.medium == MEDIUM_GPU:
            told = self._groups.setdefault(event.group_idx, set())
            if tag == _REMOVED:
                told.difference_update(event.block_hashes)
            elif tag == _STORED:
                if not told.isdisjoint(event.block_hashes):
                    return self._new_parts(event, told)
                told.update(event.block_hashes)
        return (event,)

    def _new_parts(self, event: Any, told: set[int | bytes]) -> Sequence[Any]:
        """What is new of a stored event: runs of neighbouring blocks."""
        hashes = event.block_hashes
        is_new = [block_hash not in told for block_hash in hashes]
        self.num_repeated += is_new.count(False)
        told.update(hashes)
        if True in is_new and len(event.token_ids) != len(hashes) * event.block_size:
            return (event,)  # of a group that skips blocks: its tokens cannot be divided among those it names
        return [_blocks(event, first, stop) for first, stop in true_runs(is_new)]


def _blocks(event: Any, first: int, stop: int) -> Any:
    """The blocks ``first`` to ``stop - 1`` of a stored event; lists of one entry per block or token are cut too."""
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
    """Let vLLM's block pool, in this process, tell a removal when no copy of the block is left. Safe to call again.

    Raises:
        ConfigError: this vLLM has no such place in its block pool.
    """
    try:
        module: Any = import_module("vllm.v1.core.block_pool")
        pool, has_copy = module.BlockPool, module.BlockHashToBlockMap.get_one_block
        tell = pool._emit_block_removed_events
    except (ImportError, AttributeError) as error:
        problem = f"finds no place for itself in this vLLM ({error})"
        raise ConfigError(ONCE_PER_BLOCK, True, problem, "take it out") from None
    if tell.__module__ == __name__:
        return

    def tell_last_copies(self: Any, block_hashes: Sequence[Any]) -> None:
        left = self.cached_block_hash_to_block
        tell(self, [each for each in block_hashes if has_copy(left, each) is None])

    pool._emit_block_removed_events = tell_last_copies
