"""A generator of KV events that break no rule."""

from __future__ import annotations

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.cache import hash_pages
from scheduler_components.testing.interfaces import BLOCK_SIZE

__all__ = ["ChainEventGenerator"]


class ChainEventGenerator:
    """Generates events that break no rule: a chain of blocks that grows, shrinks and grows again.

    Attributes:
        live_hashes: the hashes that a reader of all events holds, root first.
    """

    def __init__(self) -> None:
        self.live_hashes: list[int] = []
        self._tokens: list[int] = []

    def store(self, *tokens: int) -> BlockStored:
        """Append one block of ``BLOCK_SIZE`` tokens; the default tokens are its depth."""
        depth = len(self.live_hashes)
        page = tokens or (depth, depth + 1)
        parent = self.live_hashes[-1] if self.live_hashes else None
        self._tokens += page
        self.live_hashes.append(hash_pages(self._tokens, BLOCK_SIZE)[-1])
        return BlockStored((self.live_hashes[-1],), parent, page, BLOCK_SIZE, None)

    def remove(self) -> BlockRemoved:
        """Remove the chain's last block."""
        del self._tokens[-BLOCK_SIZE:]
        return BlockRemoved((self.live_hashes.pop(),))

    def clear(self) -> AllBlocksCleared:
        """Remove everything."""
        self.live_hashes.clear()
        self._tokens.clear()
        return AllBlocksCleared()

    def next(self, number: int) -> KVCacheEvent:
        """Return event ``number`` of a mixed sequence: a clear every 40, a removal every 5, otherwise a store."""
        if number % 40 == 39:
            return self.clear()
        if number % 5 == 4 and self.live_hashes:
            return self.remove()
        return self.store()
