"""The holders of each block as one integer per hash, with one bit per holder."""

# How bits are retired
# ====================
#
# A holder is a rank between two of its clears. When the rank is cleared, its bit is *retired*: queries mask the bit out
# from then on, and the rank continues under a new bit. So a clear takes constant time, and no query sees a stale block.
# A sweep removes retired bits from the masks one slice of hashes at a time. Then the bits can be allocated again.
#
# A sweep iterates over a dict that is used between two slices. A dict can be iterated while values change, but not
# while keys come or go. So a table keeps its keys during an iteration: a hash without holders stays with the mask 0,
# and a new hash goes to ``_young``. After the iteration the table deletes the empty hashes and moves the young ones
# over, in slices too. A hash is always in at most one of the two dicts. The iteration ends, because its dict does not
# grow.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from scheduler_components.events import BlockLocation, Tier

__all__ = ["HolderTables", "MaskTable", "SWEEP_SLICE_HASHES"]

SWEEP_SLICE_HASHES = 256
"""Hashes per slice: 30 us of a sweep."""


class MaskTable:
    """Maps a hash to a mask. Outside a sweep it is one dict, with one entry per hash.

    Attributes:
        masks: the table without the hashes added during a sweep. A mask of 0 has no holder.
        is_moving: a sweep is in progress: ``masks`` is incomplete, and must not be written to.
        lookup: returns the mask of a hash, or a default; valid until the table changes.
        num_users: ranks that have opened the location of this table.
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
        """Return True when the holder of ``bit`` holds a block."""
        return bool(self._get(block_hash) & bit)

    def holding(self, bit: int) -> Iterator[int]:
        """Yield the hashes that the holder of ``bit`` holds. The call iterates over the whole table."""
        return (block_hash for block_hash, mask in chain(self.masks.items(), self._young.items()) if mask & bit)

    # Events of one block are common, so neither loop makes an avoidable call (benchmarks, view: "apply stored, events
    # of 1 block"). Hashes with one holder share the integer that is its bit.

    def add(self, bit: int, hashes: Sequence[int]) -> int:
        """Add the holder of ``bit`` to ``hashes``; return how many it did not hold before."""
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
        """Remove the holder of ``bit`` from ``hashes``; return how many it held."""
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
        """Remove the bits in ``gone`` from every mask, one slice between two yields."""
        masks, young, unheld = self.masks, self._young, self._unheld
        keep, last = ~gone, 0
        self.is_moving = self._is_walked = True
        self.lookup = self._get
        entries = iter(masks.items())
        while entries_in_slice := list(islice(entries, SWEEP_SLICE_HASHES)):
            for block_hash, mask in entries_in_slice:
                if mask & gone:
                    left = mask & keep
                    if left != last:
                        last = left
                    masks[block_hash] = last  # neighbours with the same holders share one integer
                    if not left:
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
            masks.clear()  # releases the memory of the grown dict


class HolderTables:
    """All tables of a view and the bits in them. A view and its staging views share one object.

    Attributes:
        tiers: by tier, the holders of a block in full attention, at any location.
        away: by tier, those of them that do not hold it at their main location.
        further: by location, the holders of a block at a location other than their main one.
        partial: by location, the holders of a block of a group that does not attend to a whole prefix.
        is_swept: no retired bit is left in a mask.
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
        """Return the table of a location. ``tables`` are those of all ranks, ``used`` those of one rank."""
        if location not in used:
            used[location] = table = tables.setdefault(location, MaskTable())
            table.num_users += 1
        return used[location]

    def close_sites(self, tables: dict[BlockLocation, MaskTable], used: dict[BlockLocation, MaskTable]) -> None:
        """Close the locations of a rank without blocks. A location without users is deleted, now or after a sweep."""
        for location, table in used.items():
            table.num_users -= 1
            _drop_unused(tables, location)
        used.clear()

    def allocate_bit(self) -> int:
        """Return the lowest unused bit, which keeps the masks short."""
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        return bit

    def release_bit(self, bit: int) -> None:
        """Free a bit that is in no mask."""
        self._used ^= bit

    def retire_bit(self, bit: int) -> None:
        """Schedule ``bit`` for the sweep. Queries must mask it out from now on."""
        self._retired |= bit
        if self.is_swept:
            self.is_swept = False
            self._sweep = self._sweeping()

    def sweep(self, num_slices: int) -> None:
        """Continue the sweep for ``num_slices`` slices, or to its end."""
        for _ in islice(self._sweep, num_slices):
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
