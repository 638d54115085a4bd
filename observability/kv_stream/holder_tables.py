"""Who holds a block, as one integer per hash: a bit per holder. Bits are given out, retired, and swept out in strides.

A holder is a rank between two of its clears. When it is cleared, its bit is *retired*: who asks masks it out from that
moment on, and the rank goes on under a new bit. So a clear costs the same whatever is held, and nothing stale is ever
seen. What retired bits left behind is taken out a stride of hashes at a time; then they are given out again.
"""

# Strides walk a dict that others use in between. A dict can be walked while values change, not while keys come or go.
# So for the length of a walk a table keeps its keys: a hash that nobody holds stays, with the mask 0, and a new one
# goes to ``_young``. After the walk the empty ones are deleted and the young ones move over, in strides too. A hash is
# always in one of the two dicts at most. The walk ends, since what it walks does not grow.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from scheduler_components.events import BlockLocation, Tier

__all__ = ["HolderTables", "MaskTable", "SWEEP_SLICE_HASHES"]

SWEEP_SLICE_HASHES = 256
"""Hashes: some 30 us of a sweep."""


class MaskTable:
    """Hash to mask. Without a sweep one dict, in which a hash that many hold costs one entry.

    Attributes:
        masks: the table, but for what came during a sweep. A mask of 0 is nobody's.
        is_moving: a sweep is in it: ``masks`` is not all, and not to be written to.
        lookup: hash and default to mask; good until the table changes.
        num_users: ranks that have opened the location that this table is of.
    """

    __slots__ = ("_is_walked", "_unheld", "_young", "is_moving", "lookup", "masks", "num_users")

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.lookup: Callable[[int, int], int] = self.masks.get
        self.is_moving = False
        self.num_users = 0
        self._young: dict[int, int] = {}
        self._unheld: list[int] = []
        self._is_walked = False

    @property
    def is_empty(self) -> bool:
        return not (self.masks or self._young)

    def _get(self, block_hash: int, default: int = 0) -> int:
        mask = self.masks.get(block_hash)
        return self._young.get(block_hash, default) if mask is None else mask

    def _put(self, block_hash: int, mask: int) -> None:
        if block_hash in self.masks:
            if mask or self._is_walked:
                self.masks[block_hash] = mask
                if not mask:
                    self._unheld.append(block_hash)
            else:
                del self.masks[block_hash]
        elif not mask:
            self._young.pop(block_hash, None)
        elif self._is_walked or block_hash in self._young:
            self._young[block_hash] = mask
        else:
            self.masks[block_hash] = mask

    def has(self, bit: int, block_hash: int) -> bool:
        """Whether the holder of ``bit`` holds a block."""
        return bool(self._get(block_hash) & bit)

    def holding(self, bit: int) -> Iterator[int]:
        """The hashes that the holder of ``bit`` holds; costs a walk over the whole table."""
        return (block_hash for block_hash, mask in chain(self.masks.items(), self._young.items()) if mask & bit)

    # Events of one block are common, so neither loop makes a call that it can avoid. What one holder alone holds shares
    # the integer that is its bit.

    def add(self, bit: int, hashes: Sequence[int]) -> int:
        """Let the holder of ``bit`` hold ``hashes``; says how many it did not hold before."""
        num_known = 0
        if self.is_moving:
            for block_hash in hashes:
                mask = self._get(block_hash)
                if mask & bit:
                    num_known += 1
                else:
                    self._put(block_hash, mask | bit if mask else bit)
            return len(hashes) - num_known
        masks = self.masks
        for block_hash in hashes:
            if block_hash not in masks:
                masks[block_hash] = bit
                continue
            mask = masks[block_hash]
            if mask & bit:
                num_known += 1
            else:
                masks[block_hash] = mask | bit if mask else bit
        return len(hashes) - num_known

    def drop(self, bit: int, hashes: Sequence[int]) -> int:
        """Let the holder of ``bit`` hold ``hashes`` no more; says how many it held."""
        num_unknown = 0
        if self.is_moving:
            for block_hash in hashes:
                mask = self._get(block_hash)
                if mask & bit:
                    self._put(block_hash, mask ^ bit)
                else:
                    num_unknown += 1
            return len(hashes) - num_unknown
        masks = self.masks
        for block_hash in hashes:
            mask = masks.get(block_hash, 0)
            if mask == bit:
                del masks[block_hash]
            elif mask & bit:
                masks[block_hash] = mask ^ bit
            else:
                num_unknown += 1
        return len(hashes) - num_unknown

    def sweep_bits(self, gone: int) -> Iterator[None]:
        """Take the bits in ``gone`` out of every mask, a stride between two yields."""
        masks, young, unheld = self.masks, self._young, self._unheld
        keep, last = ~gone, 0
        self.is_moving = self._is_walked = True
        self.lookup = self._get
        entries = iter(masks.items())
        while stride := list(islice(entries, SWEEP_SLICE_HASHES)):
            for block_hash, mask in stride:
                if mask & gone:
                    rest = mask & keep
                    if rest != last:
                        last = rest
                    masks[block_hash] = last  # neighbours, held by the same, share one integer
                    if not rest:
                        unheld.append(block_hash)
            yield None
        self._is_walked = False
        while unheld:
            for block_hash in unheld[-SWEEP_SLICE_HASHES:]:
                if masks.get(block_hash) == 0:
                    del masks[block_hash]
            del unheld[-SWEEP_SLICE_HASHES:]
            yield None
        while young:
            for _ in range(min(SWEEP_SLICE_HASHES, len(young))):
                block_hash, mask = young.popitem()
                masks[block_hash] = mask
            yield None
        self.is_moving = False
        self.lookup = masks.get
        if not masks:
            masks.clear()  # lets go of what it had grown to


class HolderTables:
    """All tables of a view, and the bits in them. A view and its staging views share one.

    Attributes:
        tiers: by tier, who holds a block there in full attention, at any location.
        away: by tier, who of these does not hold it at the location that it uses most.
        further: who holds a block at a location that is not the one that it uses most.
        partial: who holds a block of a group that does not attend to a whole prefix.
        is_swept: nothing of a retired bit is left.
    """

    __slots__ = ("_retired", "_sweep", "_used", "away", "further", "is_swept", "partial", "tiers")

    def __init__(self) -> None:
        self.tiers = tuple(MaskTable() for _ in Tier)
        self.away = tuple(MaskTable() for _ in Tier)
        self.further: dict[BlockLocation, MaskTable] = {}
        self.partial: dict[BlockLocation, MaskTable] = {}
        self._used = 0
        self._retired = 0
        self._sweep: Iterator[None] = iter(())
        self.is_swept = True

    def open_site(
        self, tables: dict[BlockLocation, MaskTable], used: dict[BlockLocation, MaskTable], location: BlockLocation
    ) -> MaskTable:
        """The table of a location; ``used`` are a rank's own of ``tables``, which are all."""
        if location not in used:
            used[location] = table = tables.setdefault(location, MaskTable())
            table.num_users += 1
        return used[location]

    def close_sites(self, tables: dict[BlockLocation, MaskTable], used: dict[BlockLocation, MaskTable]) -> None:
        """A rank holds nothing at its sites any more. A location that nobody uses goes, at once or with a sweep's
        end.
        """
        for location, table in used.items():
            table.num_users -= 1
            _drop_unused(tables, location)
        used.clear()

    def allocate_bit(self) -> int:
        """The lowest bit that is nowhere in use: narrow masks are short."""
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        return bit

    def release_bit(self, bit: int) -> None:
        """``bit`` was given out, and is in no mask."""
        self._used ^= bit

    def retire_bit(self, bit: int) -> None:
        """Nobody asks for ``bit`` any more: let it be swept out."""
        self._retired |= bit
        if self.is_swept:
            self.is_swept = False
            self._sweep = self._sweeping()

    def sweep(self, num_strides: int) -> None:
        """Go on sweep_bits for so many strides, or to the end."""
        for _ in islice(self._sweep, num_strides):
            pass

    def _sweeping(self) -> Iterator[None]:
        while self._retired:
            gone, self._retired = self._retired, 0
            for table in (*self.tiers, *self.away, *self.further.values(), *self.partial.values()):
                yield from table.sweep_bits(gone)
            self._used &= ~gone
            for tables in (self.further, self.partial):
                for location in tuple(tables):
                    _drop_unused(tables, location)
        self.is_swept = True


def _drop_unused(tables: dict[BlockLocation, MaskTable], location: BlockLocation) -> None:
    table = tables[location]
    if not table.num_users and table.is_empty:
        del tables[location]
