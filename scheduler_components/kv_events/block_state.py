"""Which blocks a stream has left standing: what its events amount to, folded.

Folding is compaction: whoever applies the folded state ends where whoever applied every event ends. A stored event
is kept as one run of blocks for as long as any of them stands, with whatever it was made from (its bytes, or the
event), so that folding costs a dictionary update a run and no copy of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Generic, TypeVar

import msgspec

__all__ = ["BlockState", "Run", "Segment", "Tier", "tier_of"]

T = TypeVar("T")
Tier = tuple[str, int | None]
"""A medium (None and GPU are the same one) and a KV-cache group."""


_DEVICE: Tier = ("GPU", None)


def tier_of(medium: str | None, group_idx: int | None = None) -> Tier:
    """The tier that an event speaks of."""
    return _DEVICE if medium is None and group_idx is None else (medium or "GPU", group_idx)


class Run(msgspec.Struct, Generic[T], gc=False):
    """The blocks of one stored event, in order, each the parent of the next.

    Attributes:
        tier: where they were stored.
        block_hashes: all of them, standing or not.
        parent: hash of the block before the first, None at a root.
        source: what the run was made from.
        serial: its place among all runs of its state, by the time of storing.
        num_standing: how many have been neither removed nor stored again since.
    """

    tier: Tier
    block_hashes: Sequence[int]
    parent: int | None
    source: T
    serial: int
    num_standing: int = 0


class Segment(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """Neighbouring blocks ``first`` to ``stop - 1`` of a run that all stand."""

    run: Run[T]
    first: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.first == len(self.run.block_hashes)

    @property
    def parent(self) -> int | None:
        return self.run.block_hashes[self.first - 1] if self.first else self.run.parent


class BlockState(Generic[T]):
    """The standing blocks by tier and hash. A block belongs to the run that stored it last."""

    __slots__ = ("_num_stored", "_runs", "_tiers")

    def __init__(self) -> None:
        self._tiers: dict[Tier, dict[int, Run[T]]] = {}
        self._runs: dict[int, Run[T]] = {}
        self._num_stored = 0

    def __len__(self) -> int:
        """Standing blocks, over all tiers."""
        return sum(map(len, self._tiers.values()))

    def store(self, tier: Tier, block_hashes: Sequence[int], parent: int | None, source: T) -> None:
        """Fold a stored event."""
        owners = self._tiers.get(tier)
        if owners is None:
            owners = self._tiers[tier] = {}
        serial = self._num_stored = self._num_stored + 1
        run = Run(tier, block_hashes, parent, source, serial)
        if len(block_hashes) == 1:  # most events of a decoding step; what follows costs twice as much
            block_hash = block_hashes[0]
            if block_hash in owners:
                self._discard(owners, block_hashes)
            owners[block_hash] = self._runs[serial] = run
            run.num_standing = 1
            return
        if not owners.keys().isdisjoint(block_hashes):
            self._discard(owners, block_hashes)
        num_before = len(owners)
        owners.update(zip(block_hashes, repeat(run)))
        run.num_standing = len(owners) - num_before
        if run.num_standing:
            self._runs[serial] = run

    def remove(self, tier: Tier, block_hashes: Sequence[int]) -> None:
        """Fold a removed event; blocks that do not stand are nothing to remove."""
        self._discard(self._tiers.get(tier, {}), block_hashes)

    def _discard(self, owners: dict[int, Run[T]], block_hashes: Sequence[int]) -> None:
        for block_hash in block_hashes:
            run = owners.pop(block_hash, None)
            if run is not None:
                run.num_standing -= 1
                if not run.num_standing:
                    del self._runs[run.serial]

    def clear(self) -> None:
        """Fold a cleared event."""
        self._tiers.clear()
        self._runs.clear()

    def hashes(self, tier: Tier) -> set[int]:
        """Hashes standing in one tier."""
        return set(self._tiers.get(tier, ()))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(self._tiers)

    def segments(self) -> Iterator[Segment[T]]:
        """Yield what stands, each block once, a block's parent before it; the state must not change meanwhile.

        Runs come in the order in which they were stored, so that only what is taken out of turn has to be remembered.
        """
        ahead: dict[int, set[int]] = {}
        for run in self._runs.values():
            for segment in self._standing(run):
                yield from self._with_ancestors(segment, run.serial, ahead)
            ahead.pop(run.serial, None)

    def _standing(self, run: Run[T]) -> Iterator[Segment[T]]:
        owners = self._tiers[run.tier]
        if run.num_standing == len(run.block_hashes):
            yield Segment(run, 0, len(run.block_hashes))
            return
        first = None
        for index, block_hash in enumerate(run.block_hashes):
            stands = owners.get(block_hash) is run
            if stands and first is None:
                first = index
            elif not stands and first is not None:
                yield Segment(run, first, index)
                first = None
        if first is not None:
            yield Segment(run, first, len(run.block_hashes))

    def _with_ancestors(self, segment: Segment[T], serial: int, ahead: dict[int, set[int]]) -> Iterator[Segment[T]]:
        """A block that was stored again stands in a younger run than its children: that run comes first.

        ``ahead`` has the segments yielded of the run ``serial``, whose turn it is, and of later ones.
        """
        chain: list[Segment[T]] = []
        wanted: Segment[T] | None = segment
        while wanted is not None and wanted.run.serial >= serial:
            firsts = ahead.setdefault(wanted.run.serial, set())
            if wanted.first in firsts:
                break
            firsts.add(wanted.first)
            chain.append(wanted)
            wanted = self._segment_of(wanted.run.tier, wanted.parent)
        yield from reversed(chain)

    def _segment_of(self, tier: Tier, block_hash: int | None) -> Segment[T] | None:
        run = self._tiers[tier].get(block_hash) if block_hash is not None else None
        if run is None:
            return None
        return next(each for each in self._standing(run) if block_hash in run.block_hashes[each.first : each.stop])
