"""Sets of ranks as bit masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import compress

__all__ = ["RankSet", "ranks_in", "record_depth"]

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


def _is_dense(mask: int, rank_at: Sequence[int]) -> bool:
    """Return True when iterating over all bit positions is faster than searching for each bit."""
    return 6 * mask.bit_count() > len(rank_at) + 48
