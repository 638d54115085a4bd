"""Which blocks each rank holds, on which tier: the state that streams of events add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import compress, islice

from observability.kv_stream.holder_tables import SWEEP_SLICE_HASHES, HolderTables, MaskTable
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.events import FULL_ATTENTION_KINDS, REMOTE, BlockLocation, Tier, block_location, medium_tier

__all__ = ["BlockView", "CountingView", "RankSet", "ViewCounters"]


# What counts for whom.
#
# A block is a hash at a location: medium, KV-cache group, remote or here, and which of several tiers there owns it. Two
# events of one location speak of the same blocks; of two sites, never. What is remote is not this rank's, and is left
# out.
#
# A hybrid model has several groups of layers. A router asks how long a prefix can be used, so it asks for the groups
# that attend to all of it; a sliding window holds the end of a prefix alone, and would answer with holes. An event says
# what its group attends to (``kv_cache_spec_kind``); where it says nothing, it is all. Blocks of other groups are kept
# apart, and are told to whoever asks for their group by number. A block that is stored once more is what the last event
# said, as in the publisher's base.
#
# Who holds a block is kept as masks of bits (``holders.py``), with no set per rank. One table per tier answers for all
# sites there. Nearly always a rank has one location on a tier, its main one, and is looked up in that table alone. Only
# of
# further sites, and of groups that do not attend to all, is it written down where a block is.

_SiteKey = str | None | tuple[str | None, ...]
"""What an event says of its location: its medium alone where it says no more, for a tuple takes longer to look up."""

_MOST_EARLY = 256
"""Blocks that are remembered one by one, so that a clear of a few takes out these few, and no bit is retired."""

_STRIDES_PER_BATCH = 2
"""Of a sweep, with each batch that is applied: 60 us."""

_STRIDES_AT_ONCE = 8
"""Of a sweep, with each large clear and where nothing else waits: half a millisecond."""

_PARTIAL_KIND = "sliding_window"
"""Any kind that does not attend to a whole prefix."""

_TRUTH = bytes.maketrans(b"01", b"\0\1")


@dataclass(slots=True)
class ViewCounters:
    """What one rank's events did to the view; each only ever grows.

    ``duplicate_stores`` and ``unknown_removals`` are harmless: the view is a set. ``unknown_media`` counts events
    whose medium the field does not know, and ``remote_events`` those of blocks that are not the rank's own; both change
    nothing.
    """

    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    duplicate_stores: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0
    remote_events: int = 0

    def add(self, other: ViewCounters) -> None:
        """Count what was done in another view, too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class RankSet(Set[int]):
    """Ranks, as the view had them when it was asked: costs nothing until it is walked."""

    __slots__ = ("_mask", "_ranks")

    def __init__(self, mask: int = 0, ranks: Sequence[int] = ()) -> None:
        self._mask = mask
        self._ranks = ranks

    @classmethod
    def _from_iterable(cls, ranks: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        """What ``&`` and the other operators of sets return."""
        return frozenset(ranks)

    def __contains__(self, rank: object) -> bool:
        return any(rank == each for each in self)

    def __iter__(self) -> Iterator[int]:
        return iter(_ranks_in(self._mask, self._ranks))

    def __len__(self) -> int:
        return self._mask.bit_count()

    def __repr__(self) -> str:
        return f"<RankSet {sorted(self)}>"


def _ranks_in(mask: int, rank_at: Sequence[int]) -> Iterable[int]:
    """The rank of each bit in ``mask``; ``rank_at`` has the rank at each place."""
    if _is_dense(mask, rank_at):
        return compress(rank_at, format(mask, "b").encode()[::-1].translate(_TRUTH))
    ranks = []
    while mask:
        place = mask.bit_length() - 1
        ranks.append(rank_at[place])
        mask ^= 1 << place
    return ranks


def _note_depth(mask: int, rank_at: Sequence[int], depth: int, depths: dict[int, int]) -> None:
    if _is_dense(mask, rank_at):
        depths.update(dict.fromkeys(_ranks_in(mask, rank_at), depth))
        return
    while mask:
        place = mask.bit_length() - 1
        depths[rank_at[place]] = depth
        mask ^= 1 << place


def _is_dense(mask: int, rank_at: Sequence[int]) -> bool:
    """Whether to walk over all places is faster than to search for each bit."""
    return 6 * mask.bit_count() > len(rank_at) + 48


@dataclass(slots=True)
class _OnTier:
    """What one rank holds on one tier.

    Attributes:
        table, away: the tier's tables of ``HolderTables``.
        main: the location that was stored to first; its blocks are in ``table``, and those in ``away`` are not its.
        further: its other sites. What is there is in ``table`` too.
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

    def is_further(self, bit: int, block_hash: int) -> bool:
        return any(table.has(bit, block_hash) for table in self.further.values())


@dataclass(slots=True)
class _Place:
    """Where blocks go. ``own`` is the table of a further location or of a partial group; None at the main location."""

    tier: _OnTier
    location: BlockLocation
    own: MaskTable | None = None
    is_partial: bool = False


@dataclass(slots=True)
class _RankBlocks:
    """What one rank holds.

    Attributes:
        bit: its own in every mask, until it is cleared.
        tiers: by tier, the blocks in full attention.
        partial: by location, the tables of groups that do not attend to a whole prefix.
        opened: saves each event the search for its place.
        early: the hashes stored since the rank began; None when they are too many.
    """

    bit: int
    tiers: tuple[_OnTier, ...]
    partial: dict[BlockLocation, MaskTable] = field(default_factory=dict)
    opened: dict[_SiteKey, _Place] = field(default_factory=dict)
    early: list[int] | None = field(default_factory=list)
    counters: ViewCounters = field(default_factory=ViewCounters)

    def own_tables(self) -> Iterator[MaskTable]:
        """The tables of its further sites and partial groups."""
        for tier in self.tiers:
            yield from tier.further.values()
        yield from self.partial.values()

    def by_site(self) -> Iterator[tuple[BlockLocation, str | None, Iterator[int]]]:
        """Each location, what it attends to in an event's words, and the hashes there; costs a walk over the tables."""
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
    """What ``other`` holds of ``rank``, in a staging view."""

    rank: int
    other: BlockView
    staging: BlockView
    is_done: bool = False

    def is_of(self, rank: int, other: BlockView) -> bool:
        return self.is_done and self.rank == rank and self.other is other


class BlockView:
    """The blocks of many ranks, by hash.

    Each tier keeps one map of hash to a bit mask of ranks, which answers "who holds this?" with one lookup. Hashes are
    signed 64-bit integers, as decoded events have them. A rank is any integer that its caller uses for one stream;
    streams of several workers need distinct ones. Blocks are keyed by hash and location: to store a block twice is to
    store
    it once.

    A clear costs the same whatever the rank holds. What it leaves behind is never seen again, and is swept out of
    memory in slices: with each batch that is applied, or by ``sweep`` where none comes.

    Not locked: one thread applies; a reader in another thread takes its owner's lock.
    """

    __slots__ = ("_holders", "_live", "_prepared", "_rank_at", "_rank_of_bit", "_ranks")

    def __init__(self) -> None:
        self._holders = HolderTables()
        self._ranks: dict[int, _RankBlocks] = {}
        self._live = 0
        self._rank_at: tuple[int, ...] | None = None  # with the next, made anew when a bit has changed
        self._rank_of_bit: dict[int, int] = {}
        self._prepared: _Prepared | None = None

    def __repr__(self) -> str:
        return f"<BlockView blocks by rank: { {rank: self.block_count(rank) for rank in self._ranks} }>"

    # --- changes ---

    def apply(self, rank: int, events: Iterable[KVCacheEvent]) -> None:
        """Apply one rank's events in order."""
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        opened, partial = blocks.opened, blocks.partial
        for event in events:
            if isinstance(event, BlockStored):
                key: _SiteKey = event.medium
                if not (
                    event.group_idx is None
                    and event.kv_cache_spec_kind is None
                    and event.locality is None
                    and event.ownership is None
                ):
                    key = (key, event.group_idx, event.locality, event.ownership, event.kv_cache_spec_kind)  # type: ignore[assignment]
                place = opened.get(key) or self._open_place(blocks, event, key)
                if place:
                    _store(blocks, place, event.block_hashes)
                    if partial and not place.is_partial:
                        _drop_partial(blocks, event)
            elif isinstance(event, BlockRemoved):
                key = event.medium
                if not (event.group_idx is None and event.locality is None and event.ownership is None):
                    key = (key, event.group_idx, event.locality, event.ownership)  # type: ignore[assignment]
                place = opened.get(key) or self._open_place(blocks, event, key)
                num_gone = _drop_partial(blocks, event) if partial else 0
                if place:
                    num_gone += _remove(blocks, place, event.block_hashes)
                    num_unknown = len(event.block_hashes) - num_gone
                    if num_unknown:
                        blocks.counters.unknown_removals += num_unknown
                blocks.counters.removed_blocks += num_gone
            elif isinstance(event, AllBlocksCleared):
                self.clear(rank)
        if not self._holders.is_swept:
            self._holders.sweep(_STRIDES_PER_BATCH)

    def _open_place(self, blocks: _RankBlocks, event: BlockStored | BlockRemoved, key: _SiteKey) -> _Place | None:
        """Where an event's blocks go; None, and counted, where there is nothing to change."""
        tier_number, counters = medium_tier(event.medium), blocks.counters
        if event.locality == REMOTE:
            counters.remote_events += 1
            return None
        if tier_number is None:
            counters.unknown_media += 1
            return None
        tier, location = blocks.tiers[tier_number], _site_of(event)
        if isinstance(event, BlockStored):
            if event.kv_cache_spec_kind in FULL_ATTENTION_KINDS:
                own, is_partial = self._open_site(blocks, tier, location), False
            else:
                own, is_partial = self._holders.open_site(self._holders.partial, blocks.partial, location), True
            place = _Place(tier, location, own, is_partial)
        elif location == tier.main or location in tier.further:
            place = _Place(tier, location, tier.further.get(location))
        else:
            return _Place(tier, location, MaskTable())  # nothing is there; it may be stored later
        blocks.opened[key] = place
        return place

    def _open_site(self, blocks: _RankBlocks, tier: _OnTier, location: BlockLocation) -> MaskTable | None:
        """The table of a location in full attention; None for the main one, which a rank without blocks chooses
        anew.
        """
        if not tier.num_blocks:
            tier.main = location
            self._holders.close_sites(self._holders.further, tier.further)
            blocks.opened.clear()
        return None if location == tier.main else self._holders.open_site(self._holders.further, tier.further, location)

    def create_staging(self) -> BlockView:
        """An empty view of the same kind, for a snapshot that is to replace this one's blocks.

        It uses this view's tables, so that to ``replace`` by it costs nothing. One that is not used any more is given
        to ``discard_staging``.
        """
        staging = type(self)()
        staging._holders = self._holders
        return staging

    def discard_staging(self, staging: BlockView) -> None:
        """Let go of what a staging view holds; it is empty then."""
        for rank, blocks in staging._ranks.items():
            staging._empty(rank)
            staging._holders.release_bit(blocks.bit)
        staging._ranks.clear()
        staging._live, staging._rank_at = 0, None

    def clear(self, rank: int) -> None:
        """Forget all blocks of one rank, on every tier, at once; what they leave in memory is swept out later."""
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        blocks.counters.clears += 1
        self._empty(rank)

    def _empty(self, rank: int) -> None:
        blocks, holders = self._ranks[rank], self._holders
        if blocks.early is None:
            bit, blocks.bit = blocks.bit, holders.allocate_bit()
            self._live ^= bit | blocks.bit
            self._rank_at = None
            holders.retire_bit(bit)
            holders.sweep(_STRIDES_AT_ONCE)
        elif blocks.early:
            for table in (*holders.tiers, *holders.away, *blocks.own_tables()):
                table.drop(blocks.bit, blocks.early)
        blocks.early = []
        for tier in blocks.tiers:
            tier.num_blocks = 0
            tier.main = None
            holders.close_sites(holders.further, tier.further)
        holders.close_sites(holders.partial, blocks.partial)
        blocks.opened.clear()

    @property
    def is_swept(self) -> bool:
        """Whether nothing that was cleared is left in memory."""
        return self._holders.is_swept

    def sweep(self) -> bool:
        """Sweep out a slice of what was cleared, half a millisecond's work; True while there is more.

        For where no batches come, which do it too. Nobody sees a difference but in memory.
        """
        self._holders.sweep(_STRIDES_AT_ONCE)
        return not self._holders.is_swept

    def prepare_replace(self, rank: int, other: BlockView) -> Iterator[None]:
        """Do beforehand, in slices, what makes a ``replace`` with these arguments long.

        That is nothing where ``other`` is a staging view of this one. Another view is copied, and must not change until
        ``replace``. Whoever asks between two slices gets the view as it was.
        """
        self._forget_prepared()
        if other._holders is self._holders:
            return
        self._prepared = prepared = _Prepared(rank, other, self.create_staging())
        known = other._ranks.get(rank)
        if known is not None:
            fresh = prepared.staging._add_rank(rank)
            for event in _stored_in(known):
                prepared.staging.apply(rank, (event,))
                yield None
            fresh.counters = ViewCounters()
            fresh.counters.add(known.counters)
        prepared.is_done = True

    def replace(self, rank: int, other: BlockView) -> None:
        """Let ``rank`` hold what it holds in ``other``, at once.

        A staging view of this one is empty then. Another keeps its blocks; it costs what it holds, if not prepared.
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
            self._rank_at = other._rank_at = None
            self._holders.release_bit(blocks.bit)
            self._ranks[rank] = fresh

    def _forget_prepared(self) -> None:
        if self._prepared is not None:
            self.discard_staging(self._prepared.staging)
            self._prepared = None

    def _add_rank(self, rank: int) -> _RankBlocks:
        holders = self._holders
        tiers = tuple(_OnTier(*tables) for tables in zip(holders.tiers, holders.away, strict=True))
        blocks = self._ranks[rank] = _RankBlocks(holders.allocate_bit(), tiers)
        self._live |= blocks.bit
        self._rank_at = None
        return blocks

    # --- queries ---

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that was ever applied or cleared, in the order of its first event."""
        return tuple(self._ranks)

    def match_lengths(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> dict[int, int]:
        """How many of a prompt's leading blocks each rank holds on ``tier``.

        Args:
            hashes: the prompt's block hashes, root first.
            tier: where to look.
            group_idx: the KV-cache group to ask for; None for those that attend to a whole prefix.

        Returns:
            rank to depth in blocks, for ranks that hold at least the first block.
        """
        rank_at = self._rank_at or self._index()
        rank_of_bit = self._rank_of_bit.get
        depths: dict[int, int] = {}
        alive, depth = self._live, 0
        masks = self._holders.tiers[tier].lookup if group_idx is None else self._lookup_in_group(tier, group_idx)
        for block_hash in hashes:
            mask = masks(block_hash, 0)
            if mask != alive:
                still = mask & alive
                if depth and still != alive:
                    gone = alive ^ still
                    rank = rank_of_bit(gone)  # as a rule one rank ends
                    if rank is None:
                        _note_depth(gone, rank_at, depth, depths)
                    else:
                        depths[rank] = depth
                alive = still
                if not alive:
                    return depths
            depth += 1
        if depth:
            _note_depth(alive, rank_at, depth, depths)
        return depths

    def best_ranks(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> tuple[int, RankSet]:
        """How many of a prompt's leading blocks the best ranks hold on ``tier``, and which these are.

        The arguments are those of ``match_lengths``, of whose answer this is the maximum; it costs little more than
        looking up the hashes, however many ranks there are. The set stays as it is when the view changes.

        Returns:
            depth in blocks and the ranks that hold so many; 0 and none where nobody holds the first block.
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
        return depth, RankSet(alive if depth else 0, self._rank_at or self._index())

    def _index(self) -> tuple[int, ...]:
        """The rank of the bit at each place; -1 where none is alive."""
        self._rank_of_bit = {blocks.bit: rank for rank, blocks in self._ranks.items()}
        places = [-1] * self._live.bit_length()
        for bit, rank in self._rank_of_bit.items():
            places[bit.bit_length() - 1] = rank
        self._rank_at = tuple(places)
        return self._rank_at

    def _lookup_in_group(self, tier: Tier, group_idx: int) -> Callable[[int, int], int]:
        """Hash and default to the mask of those who hold it in one group."""
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
        """The ranks that hold one block on ``tier`` in full attention, in the order in which they were first seen."""
        mask = self._holders.tiers[tier].lookup(block_hash, 0) & self._live
        holding = _ranks_in(mask, self._rank_at or self._index())
        if mask & (mask - 1):
            return tuple(filter(set(holding).__contains__, self._ranks))
        return tuple(holding)

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE, *, group_idx: int | None = None) -> Set[int]:
        """A copy of the hashes that a rank holds on ``tier``; empty for a rank that was never seen.

        It costs a walk over the blocks of all ranks there: it is for people and tests, not for a router.

        ``group_idx`` asks for one KV-cache group; None for all that attend to a whole prefix.
        """
        known = self._ranks.get(rank)
        if known is None:
            return frozenset()
        if group_idx is None:
            return frozenset(known.tiers[tier].table.holding(known.bit))
        by_site = self.blocks_by_site(rank).items()
        return frozenset().union(
            *(hashes for location, hashes in by_site if location[1] == group_idx and medium_tier(location[0]) == tier)
        )

    def blocks_by_site(self, rank: int) -> dict[BlockLocation, Set[int]]:
        """A copy of all that a rank holds, by medium, group, locality and owner; partial groups included.

        It costs a walk over the blocks of all ranks.
        """
        known = self._ranks.get(rank)
        if known is None:
            return {}
        held: dict[BlockLocation, set[int]] = {}
        for location, _, hashes in known.by_site():
            held.setdefault(location, set()).update(hashes)
        return {location: hashes for location, hashes in held.items() if hashes}

    def block_count(self, rank: int) -> int:
        """How many blocks a rank holds in full attention, over all tiers; costs nothing."""
        known = self._ranks.get(rank)
        return sum(tier.num_blocks for tier in known.tiers) if known else 0

    def counters(self, rank: int) -> ViewCounters:
        """What the events of one rank did; zeros for a rank that was never seen."""
        known = self._ranks.get(rank)
        return known.counters if known else ViewCounters()


class CountingView(BlockView):
    """Counts what events do and keeps no block: for a listener that keeps them itself, such as a relay."""

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


def _site_of(event: BlockStored | BlockRemoved) -> BlockLocation:
    return block_location(event.medium, event.group_idx, event.locality, event.ownership)


def _store(blocks: _RankBlocks, place: _Place, hashes: Sequence[int]) -> None:
    tier, counters = place.tier, blocks.counters
    counters.stored_blocks += len(hashes)
    if tier.further or place.is_partial:
        store = _store_partial if place.is_partial else _store_at_sites
        counters.duplicate_stores += len(hashes) - store(blocks, place, hashes)
    else:
        num_new = tier.table.add(blocks.bit, hashes)
        tier.num_blocks += num_new
        if num_new != len(hashes):
            counters.duplicate_stores += len(hashes) - num_new
    if blocks.early is not None:
        blocks.early += hashes
        if len(blocks.early) > _MOST_EARLY:
            blocks.early = None


def _store_at_sites(blocks: _RankBlocks, place: _Place, hashes: Sequence[int]) -> int:
    return sum(_store_at_site(blocks.bit, place, block_hash) for block_hash in hashes)


def _store_partial(blocks: _RankBlocks, place: _Place, hashes: Sequence[int]) -> int:
    """Store blocks of a group that does not attend to a whole prefix; it may have been said to before."""
    tier, location = place.tier, place.location
    if location == tier.main or location in tier.further:
        _remove(blocks, _Place(tier, location, tier.further.get(location)), hashes)
    assert place.own is not None
    return place.own.add(blocks.bit, hashes)


def _store_at_site(bit: int, place: _Place, block_hash: int) -> int:
    """Store a block of a rank with several sites on a tier; 1 if it was not at this location."""
    tier, one = place.tier, (block_hash,)
    if place.own is not None and not place.own.add(bit, one):
        return 0
    is_new = tier.table.add(bit, one)
    tier.num_blocks += is_new
    if place.own is None:
        return is_new or tier.away.drop(bit, one)
    if is_new:
        tier.away.add(bit, one)
    return 1


def _remove(blocks: _RankBlocks, place: _Place, hashes: Sequence[int]) -> int:
    """Take blocks out of full attention; says how many were there."""
    tier = place.tier
    if tier.further or place.own is not None:
        return sum(_remove_at_site(blocks.bit, place, block_hash) for block_hash in hashes)
    num_gone = tier.table.drop(blocks.bit, hashes)
    tier.num_blocks -= num_gone
    return num_gone


def _remove_at_site(bit: int, place: _Place, block_hash: int) -> int:
    """Remove a block of a rank with several sites on a tier; 1 if it was at this location."""
    tier, one = place.tier, (block_hash,)
    if place.own is None:
        if not tier.is_at_main(bit, block_hash):
            return 0
        tier.away.add(bit, one)
    elif not place.own.drop(bit, one):
        return 0
    if tier.away.has(bit, block_hash) and not tier.is_further(bit, block_hash):
        tier.away.drop(bit, one)
        tier.table.drop(bit, one)
        tier.num_blocks -= 1
    return 1


def _drop_partial(blocks: _RankBlocks, event: BlockStored | BlockRemoved) -> int:
    """Take what an event speaks of out of its location's partial group; says how many blocks were in it."""
    table = blocks.partial.get(_site_of(event))
    return table.drop(blocks.bit, event.block_hashes) if table else 0


def _stored_in(blocks: _RankBlocks) -> Iterator[BlockStored]:
    """Events that store what a rank holds."""
    for location, kind, held in blocks.by_site():
        medium, group_idx, locality, ownership = location
        while hashes := tuple(islice(held, SWEEP_SLICE_HASHES)):
            yield BlockStored(
                hashes, None, (), 1, None, medium, group_idx=group_idx, locality=locality, ownership=ownership,
                kv_cache_spec_kind=kind,
            )  # fmt: skip
