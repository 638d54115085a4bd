"""PublishedBlocks: what a cache's events add up to, kept beside the cache, for a checker that compares the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_components.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    MediumGroup,
    medium_group,
)
from scheduler_components.ports import KvEventSource

__all__ = ["PublishedBlocks"]


@dataclass(slots=True, kw_only=True)
class PublishedBlocks:
    """A ``KvEventSource`` between a cache and its publisher, and the ``HeldBlocksSource`` of what went through.

    Costs a set operation per block, and 60 bytes per block that stands.

    Attributes:
        source: the cache.
    """

    source: KvEventSource
    _blocks: dict[MediumGroup, set[int]] = field(default_factory=dict, init=False, repr=False)

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the cache's events since the last call, and apply them."""
        events = self.source.take_events()
        for event in events:
            if isinstance(event, BlockStored):
                self._blocks.setdefault(medium_group(event.medium, event.group_idx), set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._blocks.setdefault(medium_group(event.medium, event.group_idx), set()).difference_update(
                    event.block_hashes
                )
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()
        return events

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """The blocks that a reader who missed nothing knows of."""
        return self._blocks
