"""Which blocks each rank holds, on which tier: the state that streams of events add up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.events import FULL_ATTENTION_KINDS, REMOTE, Site, site_of
from scheduler_components.kv_events import Tier, tier_of

__all__ = ["BlockView", "CountingView", "ViewCounters"]


# What counts for whom.
#
# A block is a hash at a site: medium, KV-cache group, remote or here, and which of several tiers there owns it. Two
# events of one site speak of the same blocks; of two sites, never. What is remote is not this rank's, and is left out.
#
# A hybrid model has several groups of layers. A router asks how long a prefix can be used, so it asks for the groups
# that attend to all of it; a sliding window holds the end of a prefix alone, and would answer with holes. An event says
# what its group attends to (``kv_cache_spec_kind``); where it says nothing, it is all. Blocks of other groups are kept
# apart, and are told to whoever asks for their group by number. A block that is stored once more is what the last event
# said, as in the publisher's base.

_SiteKey = str | None | tuple[str | None, ...]
"""What an event says of its site: its medium alone where it says no more, for a tuple takes longer to look up."""

_OpenSite = tuple[set[int], dict[Site, set[int]], dict[int, int]]
"""The hashes at one site, all sites of its tier, and the tier's map of hash to holders."""


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


@dataclass(slots=True)
class _RankBlocks:
    """What one rank holds: its bit in the masks, and for each tier one set of hashes per site.

    A tier may have several sites. A block that is removed from one is still in the others. ``partial`` are the blocks
    of groups that do not attend to a whole prefix; they are in no mask. ``opened`` saves each event the search for its
    site; it is emptied whenever ``held`` loses sites.
    """

    bit: int
    held: tuple[dict[Site, set[int]], ...] = field(default_factory=lambda: tuple({} for _ in Tier))
    partial: dict[Site, set[int]] = field(default_factory=dict)
    opened: dict[_SiteKey, _OpenSite] = field(default_factory=dict)
    counters: ViewCounters = field(default_factory=ViewCounters)

    def on_tier(self, tier: Tier) -> Set[int]:
        """The hashes on one tier, wherever there; not to be changed."""
        sites = self.held[tier]
        return next(iter(sites.values())) if len(sites) == 1 else set().union(*sites.values())

    def of_group(self, tier: Tier, group_idx: int) -> Set[int]:
        """The hashes of one group on one tier, whatever the group attends to."""
        own = [held for site, held in self.held[tier].items() if site[1] == group_idx]
        own += [held for site, held in self.partial.items() if site[1] == group_idx and tier_of(site[0]) == tier]
        return set().union(*own)


@dataclass(slots=True)
class _Prepared:
    """A replacement that needs only to be put in place: each tier's holders and, of one rank, its sites."""

    rank: int
    other: BlockView
    holders: list[dict[int, int]] = field(default_factory=list)
    held: list[dict[Site, set[int]]] = field(default_factory=list)
    partial: dict[Site, set[int]] = field(default_factory=dict)


class BlockView:
    """The blocks of many ranks, by hash.

    Each tier keeps one map of hash to a bit mask of ranks, which answers "who holds this?" with one lookup, and one
    set per rank, so that a clear costs what that rank holds. Hashes are signed 64-bit integers, as decoded events
    have them. A rank is any integer that its caller uses for one stream; streams of several workers need distinct
    ones. Blocks are keyed by hash and site: to store a block twice is to store it once.

    Not locked: one thread applies; a reader in another thread takes its owner's lock.
    """

    __slots__ = ("_holders", "_prepared", "_rank_of_bit", "_ranks")

    def __init__(self) -> None:
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._ranks: dict[int, _RankBlocks] = {}
        self._rank_of_bit: dict[int, int] = {}
        self._prepared: _Prepared | None = None

    def __repr__(self) -> str:
        return f"<BlockView blocks by rank: { {rank: self.block_count(rank) for rank in self._ranks} }>"

    # --- changes ---

    def apply(self, rank: int, events: Iterable[KVCacheEvent]) -> None:
        """Apply one rank's events in order."""
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        self._prepared = None
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
                site = opened.get(key) or self._open_site(blocks, event, key)
                if site:
                    _store(blocks, site, event.block_hashes)
                    if partial:
                        _drop_partial(blocks, event)
            elif isinstance(event, BlockRemoved):
                key = event.medium
                if not (event.group_idx is None and event.locality is None and event.ownership is None):
                    key = (key, event.group_idx, event.locality, event.ownership)  # type: ignore[assignment]
                site = opened.get(key) or self._open_site(blocks, event, key)
                num_partial = _drop_partial(blocks, event) if partial else 0
                if site:
                    _remove(blocks, site, event.block_hashes)
                    blocks.counters.unknown_removals -= num_partial
            elif isinstance(event, AllBlocksCleared):
                self.clear(rank)

    def _open_site(self, blocks: _RankBlocks, event: BlockStored | BlockRemoved, key: _SiteKey) -> _OpenSite | None:
        """The site of an event; None, and counted, where there is nothing more to change."""
        tier, counters = tier_of(event.medium), blocks.counters
        if event.locality == REMOTE:
            counters.remote_events += 1
            return None
        if tier is None:
            counters.unknown_media += 1
            return None
        sites, site = blocks.held[tier], _site_of(event)
        if isinstance(event, BlockStored) and event.kv_cache_spec_kind not in FULL_ATTENTION_KINDS:
            self._store_partial(blocks, tier, event)
            return None
        if site not in sites:
            if isinstance(event, BlockRemoved):
                partial = blocks.partial.get(site, ())
                counters.unknown_removals += sum(each not in partial for each in event.block_hashes)
                return None
            sites[site] = set()
        blocks.opened[key] = opened = (sites[site], sites, self._holders[tier])
        return opened

    def _store_partial(self, blocks: _RankBlocks, tier: Tier, event: BlockStored) -> None:
        """Store blocks of a group that does not attend to a whole prefix."""
        site, counters = _site_of(event), blocks.counters
        held = blocks.partial.setdefault(site, set())
        counters.stored_blocks += len(event.block_hashes)
        counters.duplicate_stores += len(event.block_hashes) + len(held)
        held.update(event.block_hashes)
        counters.duplicate_stores -= len(held)
        sites = blocks.held[tier]
        for block_hash in event.block_hashes:
            if block_hash in sites.get(site, ()):  # it was said to attend to all
                sites[site].remove(block_hash)
                if not any(block_hash in other for other in sites.values()):
                    _drop_bit(self._holders[tier], block_hash, blocks.bit)

    def new_staging(self) -> BlockView:
        """An empty view of the same kind, for a snapshot that is to replace this one's blocks."""
        return type(self)()

    def clear(self, rank: int) -> None:
        """Forget all blocks of one rank, on every tier; costs what that rank holds."""
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        blocks.counters.clears += 1
        self._prepared = None
        for tier, holders in zip(Tier, self._holders, strict=True):
            for block_hash in blocks.on_tier(tier):
                _drop_bit(holders, block_hash, blocks.bit)
            blocks.held[tier].clear()
        blocks.partial.clear()
        blocks.opened.clear()

    def preparing(self, rank: int, other: BlockView) -> Iterator[None]:
        """Do beforehand, in slices, what makes a ``replace`` with these arguments long.

        Whoever asks between two slices gets the view as it was. Neither view may change until ``replace``: a change of
        this one makes the preparation useless, one of ``other`` is not noticed.
        """
        self._prepared = None
        blocks = self._ranks.get(rank) or self._add_rank(rank)
        fresh = other._ranks.get(rank) or _RankBlocks(0)
        prepared = _Prepared(rank, other)
        for tier, holders in zip(Tier, self._holders, strict=True):
            yield None
            prepared.holders.append(dict(holders))
            yield from _change_holder(prepared.holders[-1], blocks.bit, blocks.on_tier(tier), fresh.on_tier(tier))
            prepared.held.append({site: set(held) for site, held in fresh.held[tier].items()})
        prepared.partial = {site: set(held) for site, held in fresh.partial.items()}
        self._prepared = prepared

    def replace(self, rank: int, other: BlockView) -> None:
        """Let ``rank`` hold what it holds in ``other``, at once; costs what all ranks hold if not prepared."""
        prepared = self._prepared
        if prepared is None or prepared.rank != rank or prepared.other is not other:
            for _ in self.preparing(rank, other):
                pass
            prepared = self._prepared
        assert prepared is not None
        self._prepared = None
        self._holders = tuple(prepared.holders)
        blocks = self._ranks[rank]
        blocks.held = tuple(prepared.held)
        blocks.partial = prepared.partial
        for each in self._ranks.values():
            each.opened.clear()
        if rank in other._ranks:
            blocks.counters.add(other._ranks[rank].counters)

    def _add_rank(self, rank: int) -> _RankBlocks:
        bit = 1 << len(self._ranks)
        self._rank_of_bit[bit] = rank
        blocks = self._ranks[rank] = _RankBlocks(bit)
        return blocks

    # --- queries ---

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that was ever applied or cleared, in the order of its first event."""
        return tuple(self._ranks)

    def deepest_prefix(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> dict[int, int]:
        """How many of a prompt's leading blocks each rank holds on ``tier``.

        Args:
            hashes: the prompt's block hashes, root first.
            tier: where to look.
            group_idx: the KV-cache group to ask for; None for those that attend to a whole prefix. One group's answer
                costs a walk over all ranks.

        Returns:
            rank to depth in blocks, for ranks that hold at least the first block.
        """
        if group_idx is not None:
            return self._depths_of_group(tuple(hashes), tier, group_idx)
        masks = self._holders[tier].get
        rank_of_bit = self._rank_of_bit.get
        depths: dict[int, int] = {}
        alive = -1
        depth = 0
        for block_hash in hashes:
            mask = masks(block_hash, 0)
            if mask != alive:
                still = mask & alive
                if depth and still != alive:
                    gone = alive ^ still
                    rank = rank_of_bit(gone)  # as a rule one rank ends: no walk over bits
                    if rank is None:
                        self._note_depth(gone, depth, depths)
                    else:
                        depths[rank] = depth
                alive = still
                if not alive:
                    return depths
            depth += 1
        if depth:
            self._note_depth(alive, depth, depths)
        return depths

    def _depths_of_group(self, hashes: Sequence[int], tier: Tier, group_idx: int) -> dict[int, int]:
        depths = {}
        for rank, blocks in self._ranks.items():
            held = blocks.of_group(tier, group_idx)
            depths[rank] = next((depth for depth, each in enumerate(hashes) if each not in held), len(hashes))
        return {rank: depth for rank, depth in depths.items() if depth}

    def _note_depth(self, mask: int, depth: int, depths: dict[int, int]) -> None:
        rank_of_bit = self._rank_of_bit
        while mask:
            bit = mask & -mask
            depths[rank_of_bit[bit]] = depth
            mask ^= bit

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """The ranks that hold one block on ``tier`` in full attention, in the order in which they were first seen."""
        holders: dict[int, int] = {}
        self._note_depth(self._holders[tier].get(block_hash, 0), 1, holders)
        return tuple(holders)

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE, *, group_idx: int | None = None) -> Set[int]:
        """A copy of the hashes that a rank holds on ``tier``; empty for a rank that was never seen.

        ``group_idx`` asks for one KV-cache group; None for all that attend to a whole prefix.
        """
        known = self._ranks.get(rank)
        if known is None:
            return frozenset()
        return frozenset(known.on_tier(tier) if group_idx is None else known.of_group(tier, group_idx))

    def blocks_by_site(self, rank: int) -> dict[Site, Set[int]]:
        """A copy of all that a rank holds, by medium, group, locality and owner; partial groups included."""
        known = self._ranks.get(rank)
        if known is None:
            return {}
        held: dict[Site, set[int]] = {}
        for sites in (*known.held, known.partial):
            for site, hashes in sites.items():
                if hashes:
                    held.setdefault(site, set()).update(hashes)
        return dict(held)

    def block_count(self, rank: int) -> int:
        """How many blocks a rank holds in full attention, over all tiers."""
        known = self._ranks.get(rank)
        return sum(len(known.on_tier(tier)) for tier in Tier) if known else 0

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
            elif tier_of(event.medium) is None:  # type: ignore[attr-defined]
                counters.unknown_media += 1
            elif isinstance(event, BlockStored):
                counters.stored_blocks += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                counters.removed_blocks += len(event.block_hashes)


def _site_of(event: BlockStored | BlockRemoved) -> Site:
    return site_of(event.medium, event.group_idx, event.locality, event.ownership)


def _drop_partial(blocks: _RankBlocks, event: BlockStored | BlockRemoved) -> int:
    """Take what an event speaks of out of its site's partial group; says how many blocks were in it."""
    held = blocks.partial.get(_site_of(event))
    if not held:
        return 0
    num_before = len(held)
    held.difference_update(event.block_hashes)
    if isinstance(event, BlockRemoved):
        blocks.counters.removed_blocks += num_before - len(held)
    return num_before - len(held)


# Events of one block are common, so neither loop makes a call that it can avoid.


def _store(blocks: _RankBlocks, site: _OpenSite, hashes: Sequence[int]) -> None:
    held, _, holders = site
    counters = blocks.counters
    counters.stored_blocks += len(hashes)
    bit = blocks.bit
    for block_hash in hashes:
        if block_hash in held:
            counters.duplicate_stores += 1
        else:
            held.add(block_hash)
            if block_hash in holders:
                holders[block_hash] |= bit
            else:
                holders[block_hash] = bit


def _remove(blocks: _RankBlocks, site: _OpenSite, hashes: Sequence[int]) -> None:
    held, sites, holders = site
    is_alone = len(sites) == 1
    counters = blocks.counters
    bit = blocks.bit
    for block_hash in hashes:
        if block_hash not in held:
            counters.unknown_removals += 1
            continue
        held.remove(block_hash)
        counters.removed_blocks += 1
        if not is_alone and any(block_hash in other for other in sites.values()):
            continue
        if holders[block_hash] == bit:
            del holders[block_hash]
        else:
            holders[block_hash] &= ~bit


_SLICE = 4_096
"""Blocks: a quarter of a millisecond."""


def _change_holder(holders: dict[int, int], bit: int, before: Set[int], after: Set[int]) -> Iterator[None]:
    """Let the rank of ``bit`` hold ``after`` in place of ``before``, a slice at a time."""
    for number, block_hash in enumerate(before):
        if block_hash not in after:
            _drop_bit(holders, block_hash, bit)
        if not number % _SLICE:
            yield None
    for number, block_hash in enumerate(after):
        holders[block_hash] = holders.get(block_hash, 0) | bit
        if not number % _SLICE:
            yield None


def _drop_bit(holders: dict[int, int], block_hash: int, bit: int) -> None:
    rest = holders[block_hash] & ~bit
    if rest:
        holders[block_hash] = rest
    else:
        del holders[block_hash]
