"""Sets of ranks as bit masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import reduce
from itertools import compress
from operator import xor

__all__ = ["RankSet", "depths_in", "ranks_in", "record_depth"]

_TRUTH = bytes.maketrans(b"01", b"\0\1")


class RankSet(Set[int]):
    """An immutable set of ranks from a query. It keeps a bit mask, and computes the ranks only when iterated."""

    __slots__ = ("_mask", "_ranks")

    def __init__(self, mask: int = 0, ranks: Sequence[int] = ()) -> None:
        self._mask = mask
        self._ranks = ranks

    @classmethod
    def _from_iterable(cls, ranks: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        """Build the result of ``&`` and the other set operators."""
        return frozenset(ranks)

    def __contains__(self, rank: object) -> bool:
        return any(rank == each for each in self)

    def __iter__(self) -> Iterator[int]:
        return iter(ranks_in(self._mask, self._ranks))

    def __len__(self) -> int:
        return self._mask.bit_count()

    def __repr__(self) -> str:
        return f"<RankSet {sorted(self)}>"


def ranks_in(mask: int, rank_at: Sequence[int]) -> Iterable[int]:
    """Return the rank of each bit in ``mask``; ``rank_at`` has the rank at each bit position."""
    if _is_dense(mask, rank_at):
        return compress(rank_at, format(mask, "b").encode()[::-1].translate(_TRUTH))
    ranks = []
    while mask:
        position = mask.bit_length() - 1
        ranks.append(rank_at[position])
        mask ^= 1 << position
    return ranks


def record_depth(mask: int, rank_at: Sequence[int], depth: int, depths: dict[int, int]) -> None:
    """Set ``depths`` of every rank in ``mask`` to ``depth``."""
    if _is_dense(mask, rank_at):
        depths.update(dict.fromkeys(ranks_in(mask, rank_at), depth))
        return
    while mask:
        position = mask.bit_length() - 1
        depths[rank_at[position]] = depth
        mask ^= 1 << position


# The depths of many ranks
# ========================
#
# A query passes from one set of ranks to the next smaller one. Taking 1,000 ranks out of these masks one by one takes
# 0.15 us each. So the sets that contain a rank are counted, for all ranks together, in a third of the time.
#
# Bit k of a count n is the parity of n // 2**k. The sets are nested, so a rank that is in n of them is in the sets 1
# to n, and n // 2**k of these have a number that 2**k divides. The exclusive or of every 2**k-th set is therefore the
# mask of the ranks whose count has bit k. It is that of bit k + 1 and of the sets whose number only 2**k divides, so
# each set is used once. These few masks are spread to one byte per bit position and added. The result is the count of
# each position.

_MAX_BYTE = 255

_FEW_RANKS = 16
"""Up to this number, recording set by set is faster."""


def depths_in(sets: Sequence[int], depths: Sequence[int], rank_at: Sequence[int]) -> dict[int, int]:
    """Return the depth of each rank.

    Args:
        sets: the masks of the ranks that have at least the depth in ``depths``. Each contains the next one.
        depths: ascending.
        rank_at: the rank at each bit position.
    """
    found: dict[int, int] = {}
    if len(sets) < 2 or sets[0].bit_count() <= _FEW_RANKS:
        for mask, deeper, depth in zip(sets, (*sets[1:], 0), depths, strict=False):
            record_depth(mask ^ deeper, rank_at, depth, found)
        return found
    for first in range(0, len(sets), _MAX_BYTE):  # a deeper rank is found again in the next part
        counts = _count_sets(sets[first : first + _MAX_BYTE], len(rank_at))
        depth_of = (0, *depths[first : first + _MAX_BYTE])
        ranks: Iterable[int] = rank_at
        values: Iterable[int]
        if depth_of[-1] <= _MAX_BYTE:
            values = counts.translate(bytes(depth_of).ljust(256))
        else:
            values = map(depth_of.__getitem__, counts)
        if 0 in counts:
            ranks, values = compress(rank_at, counts), compress(values, counts)
        found.update(zip(ranks, values, strict=True))
    return found


def _count_sets(sets: Sequence[int], num_positions: int) -> bytes:
    """Return how many of the nested ``sets`` contain each position."""
    ones, counts = int.from_bytes(b"\1" * num_positions, "big"), 0
    mask = 0
    for bit in reversed(range(len(sets).bit_length())):
        mask = reduce(xor, sets[(1 << bit) - 1 :: 2 << bit], mask)
        digits = format(mask, "b").encode()  # one byte per position: 0x30 or 0x31
        counts |= (int.from_bytes(digits, "big") & ones) << bit
    return counts.to_bytes(num_positions, "little")


def _is_dense(mask: int, rank_at: Sequence[int]) -> bool:
    """Return True when iterating over all bit positions is faster than searching for each bit."""
    return 6 * mask.bit_count() > len(rank_at) + 48
