"""A set of block hashes with ten bytes per hash, because a relay keeps one more copy of every block's hash."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

__all__ = ["BlockSet"]

_SPLIT = 512
"""Length at which an array is split. An insertion moves half of 4 KiB on average, less than finding the index costs."""


class BlockSet:
    """A set of signed 64-bit integers in sorted arrays of up to 512.

    A Python integer and its dictionary entry take 90 bytes. Adding a hash takes half a microsecond, and at most a move
    of some kilobytes, because no table has to grow.
    """

    __slots__ = ("_arrays", "_highest", "_num")

    def __init__(self) -> None:
        self._arrays: list[array[int]] = []
        self._highest: list[int] = []  # of each array, for bisection
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        """Yield the hashes in ascending order."""
        for each in self._arrays:
            yield from each

    def __contains__(self, block_hash: int) -> bool:
        at = bisect_left(self._highest, block_hash)
        if at == len(self._highest):
            return False
        hashes = self._arrays[at]
        return hashes[bisect_left(hashes, block_hash)] == block_hash

    def update(self, block_hashes: Iterable[int]) -> None:
        """Add hashes."""
        arrays, highest = self._arrays, self._highest
        for block_hash in block_hashes:
            at = bisect_left(highest, block_hash)
            if at == len(highest):
                if not highest:
                    arrays.append(array("q"))
                    highest.append(block_hash)
                else:
                    at -= 1
                    highest[at] = block_hash
            hashes = arrays[at]
            index = bisect_left(hashes, block_hash)
            if index < len(hashes) and hashes[index] == block_hash:
                continue
            hashes.insert(index, block_hash)
            self._num += 1
            if len(hashes) == _SPLIT:
                self._split(at)

    def difference_update(self, block_hashes: Iterable[int]) -> None:
        """Remove hashes; ignore those that are not in the set."""
        arrays, highest = self._arrays, self._highest
        for block_hash in block_hashes:
            at = bisect_left(highest, block_hash)
            if at == len(highest):
                continue
            hashes = arrays[at]
            index = bisect_left(hashes, block_hash)
            if hashes[index] != block_hash:
                continue
            del hashes[index]
            self._num -= 1
            if not hashes:
                del arrays[at], highest[at]
            elif block_hash == highest[at]:
                highest[at] = hashes[-1]

    def _split(self, at: int) -> None:
        hashes = self._arrays[at]
        lower = hashes[: _SPLIT // 2]
        self._arrays[at : at + 1] = [lower, hashes[_SPLIT // 2 :]]
        self._highest.insert(at, lower[-1])
