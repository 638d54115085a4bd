"""EventsView: what a cache's events add up to, kept beside the cache, for a checker that compares the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_components.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, Place, place_of
from scheduler_components.ports import KvEventSource

__all__ = ["EventsView"]


@dataclass(slots=True, kw_only=True)
class EventsView:
    """A ``KvEventSource`` between a cache and its publisher, and the ``KvPoolOracle`` of what went through.

    Costs a set operation per block, and 60 bytes per block that stands.

    Attributes:
        source: the cache.
    """

    source: KvEventSource
    _blocks: dict[Place, set[int]] = field(default_factory=dict, init=False, repr=False)

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the cache's events since the last call, and apply them."""
        events = self.source.take_events()
        for event in events:
            if isinstance(event, BlockStored):
                self._blocks.setdefault(place_of(event.medium, event.group_idx), set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._blocks.setdefault(place_of(event.medium, event.group_idx), set()).difference_update(
                    event.block_hashes
                )
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()
        return events

    def held_blocks(self) -> Mapping[Place, Collection[int]]:
        """The blocks that a reader who missed nothing knows of."""
        return self._blocks
