"""Which blocks each rank holds, on which tier: the state that streams of events add up to."""

# What the view keeps
# ===================
#
# A block is a hash at a location: medium, KV-cache group, remote or local, and the tier that owns it there. Two events
# of one location describe the same blocks; two events of different locations never do. Remote blocks do not belong to
# the rank, and are left out.
#
# A hybrid model has several groups of layers. A router needs the length of the usable prefix, so its queries cover the
# groups that attend to the whole prefix. A sliding window holds only the end of a prefix, and would leave holes. An
# event names the attention of its group (``kv_cache_spec_kind``); without it the group attends to the whole prefix.
# Blocks of other (partial) groups are kept apart, and a query reads them by group number. If a block is stored twice,
# the last event applies, as in the publisher's snapshot.
#
# The holders of a block are a bit mask (``holder_tables``); there is no set per rank. One table per tier answers for
# all locations there. Nearly always a rank has one location on a tier, its main location, and only that table is
# needed. Only further locations and partial groups have tables of their own.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import islice

from observability.kv_stream.holder_tables import SWEEP_SLICE_HASHES, HolderTables, MaskTable
from observability.kv_stream.rank_set import RankSet, depths_in, ranks_in, record_depth
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.events import FULL_ATTENTION_KINDS, REMOTE, BlockLocation, Tier, block_location, medium_tier

__all__ = ["BlockView", "CountingView", "ViewCounters", "location_of"]

_SLICES_PER_BATCH = 2
"""Slices of a sweep per applied batch: 60 us."""

_SLICES_PER_SWEEP = 8
"""Slices of a sweep per large clear, and per call of ``sweep``: half a millisecond."""

LocationKey = str | None | tuple[str | None, ...]
"""The location fields of an event: only its medium where the others are unset, because a tuple takes longer to hash."""

_MAX_EARLY_HASHES = 256
"""Hashes kept in a list, so that clearing a rank with few blocks removes them and does not retire a bit."""

_FEW_RANKS = 128
"""Up to this number of ranks, a query records the depth of each rank when it ends."""

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


@dataclass(slots=True)
class _Prepared:
    """A copy, in a staging view, of the blocks of ``rank`` in ``other``."""

    rank: int
    other: BlockView
    staging: BlockView
    is_done: bool = False

    def is_of(self, rank: int, other: BlockView) -> bool:
        return self.is_done and self.rank == rank and self.other is other


class BlockView:
    """The blocks of many ranks, by hash.

    Each tier maps a hash to a bit mask of ranks, so that one lookup finds every holder. Hashes are signed 64-bit
    integers, as in decoded events. A rank is any integer that the caller uses for one stream; streams of several
    workers need distinct ranks. Blocks are keyed by hash and location, and storing a block twice has no effect.

    A clear takes the same time however many blocks the rank holds. Queries ignore the cleared blocks immediately. The
    view sweeps them out of memory in slices: with each applied batch, or by ``sweep`` when no batches come.

    The view has no lock: one thread applies, and a reader in another thread takes its owner's lock.
    """

    __slots__ = ("_holders", "_live", "_prepared", "_rank_of_place", "_rank_of_bit", "_ranks")

    def __init__(self) -> None:
        self._holders = HolderTables()
        self._ranks: dict[int, RankBlocks] = {}
        self._live = 0
        self._rank_of_place: tuple[int, ...] | None = None  # this and the next are built again after a bit has changed
        self._rank_of_bit: dict[int, int] = {}
        self._prepared: _Prepared | None = None

    def __repr__(self) -> str:
        return f"<BlockView blocks by rank: { {rank: self.block_count(rank) for rank in self._ranks} }>"

    # --- changes ---

    def apply(self, rank: int, events: Iterable[KVCacheEvent]) -> None:
        """Apply one rank's events in order."""
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        sites, partial = blocks.sites, blocks.partial
        for event in events:
            if isinstance(event, BlockStored):
                key: LocationKey = event.medium
                if not (
                    event.group_idx is None
                    and event.kv_cache_spec_kind is None
                    and event.locality is None
                    and event.ownership is None
                ):
                    key = (key, event.group_idx, event.locality, event.ownership, event.kv_cache_spec_kind)  # type: ignore[assignment]
                site = sites.get(key) or self._open_site_of(blocks, event, key)
                if site:
                    store(blocks, site, event.block_hashes)
                    if partial and not site.is_partial:
                        drop_partial(blocks, event)
            elif isinstance(event, BlockRemoved):
                key = event.medium
                if not (event.group_idx is None and event.locality is None and event.ownership is None):
                    key = (key, event.group_idx, event.locality, event.ownership)  # type: ignore[assignment]
                site = sites.get(key) or self._open_site_of(blocks, event, key)
                num_gone = drop_partial(blocks, event) if partial else 0
                if site:
                    num_gone += remove(blocks, site, event.block_hashes)
                    num_unknown = len(event.block_hashes) - num_gone
                    if num_unknown:
                        blocks.counters.unknown_removals += num_unknown
                blocks.counters.removed_blocks += num_gone
            elif isinstance(event, AllBlocksCleared):
                self.clear(rank)
        if not self._holders.is_swept:
            self._holders.sweep(_SLICES_PER_BATCH)

    def _open_site_of(self, blocks: RankBlocks, event: BlockStored | BlockRemoved, key: LocationKey) -> Site | None:
        """Return the site of an event's blocks. Count an event that changes nothing, and return None."""
        tier_number, counters = medium_tier(event.medium), blocks.counters
        if event.locality == REMOTE:
            counters.remote_events += 1
            return None
        if tier_number is None:
            counters.unknown_media += 1
            return None
        tier, location = blocks.tiers[tier_number], location_of(event)
        if isinstance(event, BlockStored):
            if event.kv_cache_spec_kind in FULL_ATTENTION_KINDS:
                own, is_partial = self._open_site(blocks, tier, location), False
            else:
                own, is_partial = self._holders.open_site(self._holders.partial, blocks.partial, location), True
            site = Site(tier, location, own, is_partial)
        elif location == tier.main or location in tier.further:
            site = Site(tier, location, tier.further.get(location))
        else:
            return Site(tier, location, MaskTable())  # no block is there, but one may be stored later
        blocks.sites[key] = site
        return site

    def _open_site(self, blocks: RankBlocks, tier: TierBlocks, location: BlockLocation) -> MaskTable | None:
        """Return the table of a location in full attention; None for the main location.

        A rank without blocks on the tier makes ``location`` its main one.
        """
        if not tier.num_blocks:
            tier.main = location
            self._holders.close_sites(self._holders.further, tier.further)
            blocks.sites.clear()
        return None if location == tier.main else self._holders.open_site(self._holders.further, tier.further, location)

    def create_staging(self) -> BlockView:
        """Return an empty view of the same kind, for a snapshot that will replace this view's blocks.

        It shares this view's tables, so that ``replace`` takes constant time. Pass an unused one to
        ``discard_staging``.
        """
        staging = type(self)()
        staging._holders = self._holders
        return staging

    def discard_staging(self, staging: BlockView) -> None:
        """Remove every block of a staging view."""
        for rank, blocks in staging._ranks.items():
            staging._empty(rank)
            staging._holders.release_bit(blocks.bit)
        staging._ranks.clear()
        staging._live, staging._rank_of_place = 0, None

    def clear(self, rank: int) -> None:
        """Remove all blocks of one rank on every tier. Their memory is swept out later."""
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        blocks.counters.clears += 1
        self._empty(rank)

    def _empty(self, rank: int) -> None:
        blocks, holders = self._ranks[rank], self._holders
        if blocks.early is None:
            bit, blocks.bit = blocks.bit, holders.allocate_bit()
            self._live ^= bit | blocks.bit
            self._rank_of_place = None
            holders.retire_bit(bit)
            holders.sweep(_SLICES_PER_SWEEP)
        elif blocks.early:
            for table in (*holders.tiers, *holders.away, *blocks.own_tables()):
                table.drop(blocks.bit, blocks.early)
        blocks.early = []
        for tier in blocks.tiers:
            tier.num_blocks = 0
            tier.main = None
            holders.close_sites(holders.further, tier.further)
        holders.close_sites(holders.partial, blocks.partial)
        blocks.sites.clear()

    @property
    def is_swept(self) -> bool:
        """True when no cleared block is left in memory."""
        return self._holders.is_swept

    def sweep(self) -> bool:
        """Sweep out some of the cleared blocks for half a millisecond; return True while there are more.

        Applied batches sweep too, so call this when none come. It changes memory only, never an answer.
        """
        self._holders.sweep(_SLICES_PER_SWEEP)
        return not self._holders.is_swept

    def prepare_replace(self, rank: int, other: BlockView) -> Iterator[None]:
        """Do the long part of a ``replace`` with these arguments in slices.

        A staging view of this view needs none. Any other view is copied, and must not change until ``replace``. Queries
        between two slices see the view unchanged.
        """
        self._discard_prepared()
        if other._holders is self._holders:
            return
        self._prepared = prepared = _Prepared(rank, other, self.create_staging())
        known = other._ranks.get(rank)
        if known is not None:
            fresh = prepared.staging._add_rank(rank)
            for event in stored_events(known):
                prepared.staging.apply(rank, (event,))
                yield None
            fresh.counters = ViewCounters()
            fresh.counters.add(known.counters)
        prepared.is_done = True

    def replace(self, rank: int, other: BlockView) -> None:
        """Replace the blocks of ``rank`` by those that it holds in ``other``, in one step.

        A staging view of this view is empty afterwards. Any other view keeps its blocks; without ``prepare_replace``
        the call copies them.
        """
        if other._holders is not self._holders:
            prepared = self._prepared
            if prepared is None or not prepared.is_of(rank, other):
                for _ in self.prepare_replace(rank, other):
                    pass
                prepared = self._prepared
            assert prepared is not None
            other, self._prepared = prepared.staging, None
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        self._empty(rank)
        fresh = other._ranks.pop(rank, None)
        if fresh is not None:
            fresh.counters.add(blocks.counters)
            self._live ^= blocks.bit | fresh.bit
            other._live ^= fresh.bit
            self._rank_of_place = other._rank_of_place = None
            self._holders.release_bit(blocks.bit)
            self._ranks[rank] = fresh

    def _discard_prepared(self) -> None:
        if self._prepared is not None:
            self.discard_staging(self._prepared.staging)
            self._prepared = None

    def _add_rank(self, rank: int) -> RankBlocks:
        holders = self._holders
        tiers = tuple(TierBlocks(*tables) for tables in zip(holders.tiers, holders.away, strict=True))
        blocks = self._ranks[rank] = RankBlocks(holders.allocate_bit(), tiers)
        self._live |= blocks.bit
        self._rank_of_place = None
        return blocks

    # --- queries ---

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that was ever applied or cleared, in the order of their first events."""
        return tuple(self._ranks)

    def match_lengths(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> dict[int, int]:
        """Return how many of a prompt's leading blocks each rank holds on ``tier``.

        Args:
            hashes: the prompt's block hashes, root first.
            tier: of the blocks.
            group_idx: the KV-cache group; None for all groups that attend to a whole prefix.

        Returns:
            rank to depth in blocks, for ranks that hold at least the first block.
        """
        rank_at = self._rank_of_place or self._index()
        rank_of_bit = self._rank_of_bit
        are_few = len(rank_of_bit) <= _FEW_RANKS
        found: dict[int, int] = {}
        sets: list[int] = []
        depths: list[int] = []
        alive, depth = self._live, 0
        masks = self._holders.tiers[tier].lookup if group_idx is None else self._lookup_in_group(tier, group_idx)
        for block_hash in hashes:
            mask = masks(block_hash, 0)
            if mask != alive:
                still = mask & alive
                if still != alive:
                    if depth and are_few:
                        gone = alive ^ still
                        rank = rank_of_bit.get(gone)  # usually one rank ends here
                        if rank is None:
                            record_depth(gone, rank_at, depth, found)
                        else:
                            found[rank] = depth
                    elif depth:
                        sets.append(alive)
                        depths.append(depth)
                    alive = still
                if not alive:
                    break
            depth += 1
        if not are_few:
            if depth and alive:
                sets.append(alive)
                depths.append(depth)
            return depths_in(sets, depths, rank_at)
        if depth:
            record_depth(alive, rank_at, depth, found)
        return found

    def best_ranks(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> tuple[int, RankSet]:
        """Return the longest prefix of a prompt that any rank holds on ``tier``, and the ranks that hold it.

        The arguments are those of ``match_lengths``, and the result is the maximum of its result. It costs little more
        than one lookup per hash, however many ranks there are. The set does not change with the view.

        Returns:
            depth in blocks and the ranks with that depth; 0 and an empty set if no rank holds the first block.
        """
        alive, depth = self._live, 0
        if not alive:
            return 0, RankSet()
        masks = self._holders.tiers[tier].lookup if group_idx is None else self._lookup_in_group(tier, group_idx)
        for block_hash in hashes:
            mask = masks(block_hash, 0)
            if mask != alive:
                still = mask & alive
                if not still:
                    break
                alive = still
            depth += 1
        return depth, RankSet(alive if depth else 0, self._rank_of_place or self._index())

    def _index(self) -> tuple[int, ...]:
        """Build the rank of each bit position; -1 for a position without a rank."""
        self._rank_of_bit = {blocks.bit: rank for rank, blocks in self._ranks.items()}
        places = [-1] * self._live.bit_length()
        for bit, rank in self._rank_of_bit.items():
            places[bit.bit_length() - 1] = rank
        self._rank_of_place = tuple(places)
        return self._rank_of_place

    def _lookup_in_group(self, tier: Tier, group_idx: int) -> Callable[[int, int], int]:
        """Return a lookup of the holders of a hash in one group."""
        whole = self._holders.tiers[tier].lookup
        away = self._holders.away[tier].lookup
        own = [
            table.lookup
            for tables in (self._holders.further, self._holders.partial)
            for location, table in tables.items()
            if location[1] == group_idx and medium_tier(location[0]) == tier
        ]
        at_main = 0
        for blocks in self._ranks.values():
            main = blocks.tiers[tier].main
            if main is not None and main[1] == group_idx:
                at_main |= blocks.bit

        def in_group(block_hash: int, default: int) -> int:
            mask = whole(block_hash, 0) & at_main & ~away(block_hash, 0)
            for lookup in own:
                mask |= lookup(block_hash, default)
            return mask

        return in_group

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """Return the ranks that hold one block on ``tier`` in full attention, in the order of ``ranks``."""
        mask = self._holders.tiers[tier].lookup(block_hash, 0) & self._live
        holding = ranks_in(mask, self._rank_of_place or self._index())
        if mask & (mask - 1):
            return tuple(filter(set(holding).__contains__, self._ranks))
        return tuple(holding)

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE, *, group_idx: int | None = None) -> Set[int]:
        """Return a copy of the hashes that a rank holds on ``tier``; empty for an unknown rank.

        ``group_idx`` selects one KV-cache group; None selects all groups that attend to a whole prefix. The call
        iterates over the blocks of all ranks on the tier: it is meant for operators and tests, not for a router.
        """
        known = self._ranks.get(rank)
        if known is None:
            return frozenset()
        if group_idx is None:
            return frozenset(known.tiers[tier].table.holding(known.bit))
        return frozenset().union(
            *(
                hashes
                for location, hashes in self.blocks_by_location(rank).items()
                if location[1] == group_idx and medium_tier(location[0]) == tier
            )
        )

    def blocks_by_location(self, rank: int) -> dict[BlockLocation, Set[int]]:
        """Return a copy of all hashes of a rank by location, including partial groups.

        The call iterates over the blocks of all ranks.
        """
        known = self._ranks.get(rank)
        if known is None:
            return {}
        held: dict[BlockLocation, set[int]] = {}
        for location, _, hashes in known.by_location():
            held.setdefault(location, set()).update(hashes)
        return {location: hashes for location, hashes in held.items() if hashes}

    def has_blocks(self, tier: Tier) -> bool:
        """Return False if no rank holds a block on ``tier`` in full attention, in constant time.

        While cleared blocks are swept, it may return True for a tier without blocks.
        """
        return not self._holders.tiers[tier].is_empty

    def block_count(self, rank: int) -> int:
        """Return the number of blocks that a rank holds in full attention, over all tiers, in constant time."""
        known = self._ranks.get(rank)
        return sum(tier.num_blocks for tier in known.tiers) if known else 0

    def counters(self, rank: int) -> ViewCounters:
        """Return the counters of one rank; zeros for an unknown rank."""
        known = self._ranks.get(rank)
        return known.counters if known else ViewCounters()


class CountingView(BlockView):
    """Counts events and keeps no blocks, for a listener that keeps them itself, such as a relay."""

    __slots__ = ()

    def apply(self, rank: int, events: Iterable[KVCacheEvent]) -> None:
        """Count one rank's events."""
        counters = (self._ranks.get(rank) or self._add_rank(rank)).counters
        for event in events:
            if isinstance(event, AllBlocksCleared):
                counters.clears += 1
            elif medium_tier(event.medium) is None:  # type: ignore[attr-defined]
                counters.unknown_media += 1
            elif isinstance(event, BlockStored):
                counters.stored_blocks += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                counters.removed_blocks += len(event.block_hashes)


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
