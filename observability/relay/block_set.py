"""A set of block hashes that takes some ten bytes for each: a relay keeps one more copy of every block's hash."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

__all__ = ["BlockSet"]

_SPLIT = 512
"""Hashes in an array before it is cut in two: to insert moves half of 4 KiB, less than it costs to find the place."""


class BlockSet:
    """Signed 64-bit integers, each once, in sorted arrays of up to 512.

    A Python integer and its place in a dictionary take 90 bytes. Whatever the hashes are, adding one costs about half a
    microsecond, and never more than a move of some kilobytes: there is no table to grow.
    """

    __slots__ = ("_arrays", "_highest", "_num")

    def __init__(self) -> None:
        self._arrays: list[array[int]] = []
        self._highest: list[int] = []  # of each array, so that the right one is found by bisection
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        """Each hash, in order of its number."""
        for each in self._arrays:
            yield from each

    def __contains__(self, block_hash: int) -> bool:
        at = bisect_left(self._highest, block_hash)
        if at == len(self._highest):
            return False
        hashes = self._arrays[at]
        return hashes[bisect_left(hashes, block_hash)] == block_hash

    def update(self, block_hashes: Iterable[int]) -> None:
        """Add each that is not there."""
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
            place = bisect_left(hashes, block_hash)
            if place < len(hashes) and hashes[place] == block_hash:
                continue
            hashes.insert(place, block_hash)
            self._num += 1
            if len(hashes) == _SPLIT:
                self._split(at)

    def difference_update(self, block_hashes: Iterable[int]) -> None:
        """Take out each that is there."""
        arrays, highest = self._arrays, self._highest
        for block_hash in block_hashes:
            at = bisect_left(highest, block_hash)
            if at == len(highest):
                continue
            hashes = arrays[at]
            place = bisect_left(hashes, block_hash)
            if hashes[place] != block_hash:
                continue
            del hashes[place]
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
