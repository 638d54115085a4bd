"""Which blocks each rank holds, on which tier: the state that streams of events add up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.kv_events import Place, Tier, place_of, tier_of

__all__ = ["BlockView", "CountingView", "ViewCounters"]


_PlaceKey = str | None | tuple[str | None, int | None]
"""What an event says of its place: its medium alone where it names no group, for a tuple takes longer to look up."""

_OpenPlace = tuple[set[int], dict[Place, set[int]], dict[int, int]]
"""The hashes in one place, all places of its tier, and the tier's map of hash to holders."""


@dataclass(slots=True)
class ViewCounters:
    """What one rank's events did to the view; each only ever grows.

    ``duplicate_stores`` and ``unknown_removals`` are harmless: the view is a set. ``unknown_media`` counts events
    whose medium the field does not know; they change nothing.
    """

    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    duplicate_stores: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0

    def add(self, other: ViewCounters) -> None:
        """Count what was done in another view, too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class _RankBlocks:
    """What one rank holds: its bit in the masks, and for each tier one set of hashes per place.

    A tier may have several places (media, KV-cache groups). A block that is removed from one is still in the others.
    ``opened`` saves each event the search for its place; it is emptied whenever ``held`` loses places.
    """

    bit: int
    held: tuple[dict[Place, set[int]], ...] = field(default_factory=lambda: tuple({} for _ in Tier))
    opened: dict[_PlaceKey, _OpenPlace] = field(default_factory=dict)
    counters: ViewCounters = field(default_factory=ViewCounters)

    def on_tier(self, tier: Tier) -> Set[int]:
        """The hashes on one tier, wherever there; not to be changed."""
        places = self.held[tier]
        return next(iter(places.values())) if len(places) == 1 else set().union(*places.values())


@dataclass(slots=True)
class _Prepared:
    """A replacement that needs only to be put in place: each tier's holders and, of one rank, its places."""

    rank: int
    other: BlockView
    holders: list[dict[int, int]] = field(default_factory=list)
    held: list[dict[Place, set[int]]] = field(default_factory=list)


class BlockView:
    """The blocks of many ranks, by hash.

    Each tier keeps one map of hash to a bit mask of ranks, which answers "who holds this?" with one lookup, and one
    set per rank, so that a clear costs what that rank holds. Hashes are signed 64-bit integers, as decoded events
    have them. A rank is any integer that its caller uses for one stream; streams of several workers need distinct
    ones. Blocks are keyed by hash, medium and KV-cache group: to store a block twice is to store it once.

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
        opened = blocks.opened
        for event in events:
            if isinstance(event, BlockStored):
                key = event.medium if event.group_idx is None else (event.medium, event.group_idx)
                place = opened.get(key) or self._open_place(blocks, event, key)
                if place:
                    _store(blocks, place, event.block_hashes)
            elif isinstance(event, BlockRemoved):
                key = event.medium if event.group_idx is None else (event.medium, event.group_idx)
                place = opened.get(key) or self._open_place(blocks, event, key)
                if place:
                    _remove(blocks, place, event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.clear(rank)

    def _open_place(self, blocks: _RankBlocks, event: BlockStored | BlockRemoved, key: _PlaceKey) -> _OpenPlace | None:
        """The place of an event; None, and counted, where there is nothing to change."""
        tier = tier_of(event.medium)
        if tier is None:
            blocks.counters.unknown_media += 1
            return None
        places = blocks.held[tier]
        place = place_of(event.medium, event.group_idx)
        if place not in places:
            if isinstance(event, BlockRemoved):
                blocks.counters.unknown_removals += len(event.block_hashes)
                return None
            places[place] = set()
        blocks.opened[key] = opened = (places[place], places, self._holders[tier])
        return opened

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
            prepared.held.append({place: set(held) for place, held in fresh.held[tier].items()})
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

    def deepest_prefix(self, hashes: Iterable[int], tier: Tier = Tier.DEVICE) -> dict[int, int]:
        """How many of a prompt's leading blocks each rank holds on ``tier``.

        Args:
            hashes: the prompt's block hashes, root first.

        Returns:
            rank to depth in blocks, for ranks that hold at least the first block.
        """
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

    def _note_depth(self, mask: int, depth: int, depths: dict[int, int]) -> None:
        rank_of_bit = self._rank_of_bit
        while mask:
            bit = mask & -mask
            depths[rank_of_bit[bit]] = depth
            mask ^= bit

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """The ranks that hold one block on ``tier``, in the order in which they were first seen."""
        holders: dict[int, int] = {}
        self._note_depth(self._holders[tier].get(block_hash, 0), 1, holders)
        return tuple(holders)

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE) -> Set[int]:
        """A copy of the hashes that a rank holds on ``tier``; empty for a rank that was never seen."""
        known = self._ranks.get(rank)
        return frozenset(known.on_tier(tier)) if known else frozenset()

    def block_count(self, rank: int) -> int:
        """How many blocks a rank holds, over all tiers."""
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


# Events of one block are common, so neither loop makes a call that it can avoid.


def _store(blocks: _RankBlocks, place: _OpenPlace, hashes: Sequence[int]) -> None:
    held, _, holders = place
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


def _remove(blocks: _RankBlocks, place: _OpenPlace, hashes: Sequence[int]) -> None:
    held, places, holders = place
    is_alone = len(places) == 1
    counters = blocks.counters
    bit = blocks.bit
    for block_hash in hashes:
        if block_hash not in held:
            counters.unknown_removals += 1
            continue
        held.remove(block_hash)
        counters.removed_blocks += 1
        if not is_alone and any(block_hash in other for other in places.values()):
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
