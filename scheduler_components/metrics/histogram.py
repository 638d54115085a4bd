"""A histogram of times that is cheap to feed and cheap to hand on."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from scheduler_components.errors import ConfigError

__all__ = ["Histogram", "HistogramSnapshot"]


class HistogramSnapshot(msgspec.Struct, frozen=True, gc=False):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds of the buckets, rising; a value equal to a bound is in its bucket, as in Prometheus.
        counts: values in each bucket, and in one more for those above the last bound. Not cumulative.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)


class Histogram:
    """Counts values in buckets that are fixed when it is made.

    Raises:
        ConfigError: there is no bound, or they do not rise, or one is not finite.
    """

    __slots__ = ("_bounds", "_counts", "_snapshot", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        rising = all(low < high for low, high in pairwise(bounds))
        if not bounds or not rising or not all(map(math.isfinite, bounds)):
            raise ConfigError(
                "bounds", tuple(bounds), "are not rising numbers", "give at least one, each above the last"
            )
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._snapshot: HistogramSnapshot | None = None

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times. Below 0 counts as 0; what is not finite, or not even once, not at all."""
        if times > 0 and -math.inf < value < math.inf:
            if value < 0.0:
                value = 0.0
            self._counts[bisect_left(self._bounds, value)] += times
            self._total += value * times
            self._snapshot = None

    def snapshot(self) -> HistogramSnapshot:
        """Return the counts of this moment; the same object as the last one while nothing new was observed."""
        if self._snapshot is None:
            self._snapshot = HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
        return self._snapshot

    def __repr__(self) -> str:
        return f"<Histogram: {sum(self._counts)} values in {len(self._counts)} buckets>"
