"""A simple history of events that breaks no rule: a chain of blocks that grows, is evicted from its end, and grows."""

from __future__ import annotations

from scheduler_components.cache.block_hash import hash_pages
from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

__all__ = ["BLOCK_SIZE", "ChainHistory"]

BLOCK_SIZE = 2


class ChainHistory:
    """Makes one event after the other, for checks that want real content without a cache.

    Attributes:
        standing: the hashes that whoever applied all events so far holds, root first.
    """

    def __init__(self) -> None:
        self.standing: list[int] = []
        self._tokens: list[int] = []

    def store(self, *tokens: int) -> BlockStored:
        """Append one block of ``BLOCK_SIZE`` tokens to the chain; the tokens default to the block's depth."""
        depth = len(self.standing)
        page = tokens or (depth, depth + 1)
        parent = self.standing[-1] if self.standing else None
        self._tokens += page
        self.standing.append(hash_pages(self._tokens, BLOCK_SIZE)[-1])
        return BlockStored((self.standing[-1],), parent, page, BLOCK_SIZE, None)

    def remove(self) -> BlockRemoved:
        """Remove the chain's last block."""
        del self._tokens[-BLOCK_SIZE:]
        return BlockRemoved((self.standing.pop(),))

    def clear(self) -> AllBlocksCleared:
        """Remove everything."""
        self.standing.clear()
        self._tokens.clear()
        return AllBlocksCleared()

    def next(self, number: int) -> KVCacheEvent:
        """Event ``number`` of a mixed run: mostly stores, every fifth a removal, every fortieth a clear."""
        if number % 40 == 39:
            return self.clear()
        if number % 5 == 4 and self.standing:
            return self.remove()
        return self.store()
