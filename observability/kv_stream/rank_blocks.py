"""The blocks of one rank, by tier and location.

The rules are at the top of ``view``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice

from observability.kv_stream.holder_tables import SWEEP_SLICE_HASHES, MaskTable
from scheduler_components import BlockRemoved, BlockStored
from scheduler_components.events import BlockLocation, block_location

__all__ = [
    "LocationKey",
    "RankBlocks",
    "Site",
    "TierBlocks",
    "ViewCounters",
    "drop_partial",
    "location_of",
    "remove",
    "store",
    "stored_events",
]

LocationKey = str | None | tuple[str | None, ...]
"""The location fields of an event: only its medium where the others are unset, because a tuple takes longer to hash."""

_MAX_EARLY_HASHES = 256
"""Hashes kept in a list, so that clearing a rank with few blocks removes them and does not retire a bit."""

_PARTIAL_KIND = "sliding_window"
"""One of the kinds that do not attend to a whole prefix."""


@dataclass(slots=True)
class ViewCounters:
    """Counters of one rank's events. Every counter only grows.

    ``duplicate_stores`` and ``unknown_removals`` are harmless, because the view is a set. ``unknown_media`` counts
    events with an unknown medium, and ``remote_events`` those of blocks on another worker; both change nothing.
    """

    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    duplicate_stores: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0
    remote_events: int = 0

    def add(self, other: ViewCounters) -> None:
        """Add the counters of another view."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class TierBlocks:
    """The blocks of one rank on one tier.

    Attributes:
        table, away: the tier's tables of ``HolderTables``.
        main: the first location that the rank stored to. Its blocks are those in ``table`` without those in ``away``.
        further: the rank's other locations. Their blocks are in ``table`` too.
        num_blocks: hashes in ``table``.
    """

    table: MaskTable
    away: MaskTable
    main: BlockLocation | None = None
    further: dict[BlockLocation, MaskTable] = field(default_factory=dict)
    num_blocks: int = 0

    def is_at_main(self, bit: int, block_hash: int) -> bool:
        return self.table.has(bit, block_hash) and not self.away.has(bit, block_hash)

    def at_main(self, bit: int) -> Iterator[int]:
        return (block_hash for block_hash in self.table.holding(bit) if not self.away.has(bit, block_hash))

    def is_at_further(self, bit: int, block_hash: int) -> bool:
        return any(table.has(bit, block_hash) for table in self.further.values())


@dataclass(slots=True)
class Site:
    """Where an event's blocks are kept. ``own`` is the table of a further location or of a partial group, else None."""

    tier: TierBlocks
    location: BlockLocation
    own: MaskTable | None = None
    is_partial: bool = False


@dataclass(slots=True)
class RankBlocks:
    """The blocks of one rank.

    Attributes:
        bit: the rank's bit in every mask, until the rank is cleared.
        tiers: by tier, the blocks in full attention.
        partial: by location, the tables of groups that do not attend to a whole prefix.
        sites: cache of the sites of events.
        early: the hashes stored since the last clear; None when there are too many.
    """

    bit: int
    tiers: tuple[TierBlocks, ...]
    partial: dict[BlockLocation, MaskTable] = field(default_factory=dict)
    sites: dict[LocationKey, Site] = field(default_factory=dict)
    early: list[int] | None = field(default_factory=list)
    counters: ViewCounters = field(default_factory=ViewCounters)

    def own_tables(self) -> Iterator[MaskTable]:
        """Yield the tables of the further locations and of the partial groups."""
        for tier in self.tiers:
            yield from tier.further.values()
        yield from self.partial.values()

    def by_location(self) -> Iterator[tuple[BlockLocation, str | None, Iterator[int]]]:
        """Yield each location, its attention kind as in events, and its hashes. Costs a pass over the tables."""
        bit = self.bit
        for tier in self.tiers:
            if tier.main is not None:
                yield tier.main, None, tier.at_main(bit)
            for location, table in tier.further.items():
                yield location, None, table.holding(bit)
        for location, table in self.partial.items():
            yield location, _PARTIAL_KIND, table.holding(bit)


def location_of(event: BlockStored | BlockRemoved) -> BlockLocation:
    """Return the location of an event's blocks."""
    return block_location(event.medium, event.group_idx, event.locality, event.ownership)


def store(blocks: RankBlocks, site: Site, hashes: Sequence[int]) -> None:
    """Store ``hashes`` at ``site``."""
    tier, counters = site.tier, blocks.counters
    counters.stored_blocks += len(hashes)
    if tier.further or site.is_partial:
        store_hashes = _store_partial if site.is_partial else _store_at_sites
        counters.duplicate_stores += len(hashes) - store_hashes(blocks, site, hashes)
    else:
        num_new = tier.table.add(blocks.bit, hashes)
        tier.num_blocks += num_new
        if num_new != len(hashes):
            counters.duplicate_stores += len(hashes) - num_new
    if blocks.early is not None:
        blocks.early += hashes
        if len(blocks.early) > _MAX_EARLY_HASHES:
            blocks.early = None


def _store_at_sites(blocks: RankBlocks, site: Site, hashes: Sequence[int]) -> int:
    return sum(_store_at_site(blocks.bit, site, block_hash) for block_hash in hashes)


def _store_partial(blocks: RankBlocks, site: Site, hashes: Sequence[int]) -> int:
    """Store blocks of a partial group. An earlier event may have described the same location as full attention."""
    tier, location = site.tier, site.location
    if location == tier.main or location in tier.further:
        remove(blocks, Site(tier, location, tier.further.get(location)), hashes)
    assert site.own is not None
    return site.own.add(blocks.bit, hashes)


def _store_at_site(bit: int, site: Site, block_hash: int) -> int:
    """Store a block of a rank with several locations on a tier; return 1 if it was not at this location."""
    tier, one = site.tier, (block_hash,)
    if site.own is not None and not site.own.add(bit, one):
        return 0
    is_new = tier.table.add(bit, one)
    tier.num_blocks += is_new
    if site.own is None:
        return is_new or tier.away.drop(bit, one)
    if is_new:
        tier.away.add(bit, one)
    return 1


def remove(blocks: RankBlocks, site: Site, hashes: Sequence[int]) -> int:
    """Remove ``hashes`` from full attention at ``site``; return how many were there."""
    tier = site.tier
    if tier.further or site.own is not None:
        return sum(_remove_at_site(blocks.bit, site, block_hash) for block_hash in hashes)
    num_gone = tier.table.drop(blocks.bit, hashes)
    tier.num_blocks -= num_gone
    return num_gone


def _remove_at_site(bit: int, site: Site, block_hash: int) -> int:
    """Remove a block of a rank with several locations on a tier; return 1 if it was at this location."""
    tier, one = site.tier, (block_hash,)
    if site.own is None:
        if not tier.is_at_main(bit, block_hash):
            return 0
        tier.away.add(bit, one)
    elif not site.own.drop(bit, one):
        return 0
    if tier.away.has(bit, block_hash) and not tier.is_at_further(bit, block_hash):
        tier.away.drop(bit, one)
        tier.table.drop(bit, one)
        tier.num_blocks -= 1
    return 1


def drop_partial(blocks: RankBlocks, event: BlockStored | BlockRemoved) -> int:
    """Remove an event's blocks from the partial group at its location; return how many were there."""
    table = blocks.partial.get(location_of(event))
    return table.drop(blocks.bit, event.block_hashes) if table else 0


def stored_events(blocks: RankBlocks) -> Iterator[BlockStored]:
    """Yield events that store every block of a rank."""
    for location, kind, held in blocks.by_location():
        medium, group_idx, locality, ownership = location
        while hashes := tuple(islice(held, SWEEP_SLICE_HASHES)):
            yield BlockStored(
                hashes, None, (), 1, None, medium, group_idx=group_idx, locality=locality, ownership=ownership,
                kv_cache_spec_kind=kind,
            )  # fmt: skip
