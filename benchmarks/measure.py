"""Time calls in turns, and compare a measurement with its limit, its peers and its goal.

A machine's speed changes from minute to minute, so absolute numbers are for orientation only. Compared values are
measured in one run in turns (A B A B), and a ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec

Samples = Sequence[float]
"""One value per turn. The turns of compared measurements belong together."""


_TIMES = ("ns", "us", "ms", "s")


class Scale(msgspec.Struct, frozen=True):
    """The size of a run: ``turns`` per measurement, each with ``share`` of the full number of steps."""

    turns: int = 5
    share: float = 1.0

    def of(self, count: int) -> int:
        """Return this run's share of a full count."""
        return max(1, int(count * self.share))


class Goal(msgspec.Struct, frozen=True):
    """The goal of a measurement: a bound on its value, or on its ratio to another measurement.

    Attributes:
        bound: the value in the measurement's unit; a ratio if ``beside`` is given.
        beside: ``"limit"``, or a peer's name.
        at_least: whether the bound is a lower bound.
    """

    bound: float
    beside: str = ""
    at_least: bool = False

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.bound:g}" + (f" x {self.beside}" if self.beside else "")


class Measurement(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        section: name of the benchmark.
        what: the measurement.
        unit: unit of all values of this row.
        ours: one value per turn.
        beside: the peers' values by name, and ``"limit"`` for the limit of the hardware or libraries.
        goal: the goal; None for a value that is for orientation.
    """

    section: str
    what: str
    unit: str
    ours: Samples
    beside: Mapping[str, Samples] = {}
    goal: Goal | None = None

    @property
    def value(self) -> float:
        return median(self.ours)

    def ratio(self, name: str) -> float | None:
        """Return ours / theirs, the median over turns; None if ``name`` was not measured."""
        return ratio_of(self.ours, self.beside[name]) if name in self.beside else None

    def reached(self, slowdown: float = 1.0) -> bool | None:
        """Return whether the goal is met; None without a goal, or if its reference was not measured.

        Args:
            slowdown: time of this machine relative to the one of the goals. It changes goals in times and rates, not
                ratios and sizes.
        """
        if self.goal is None:
            return None
        value = self.ratio(self.goal.beside) if self.goal.beside else self.value
        if value is None or math.isnan(value):
            return None
        if self.goal.at_least:
            return value >= self.goal.bound / (slowdown if self._is_rate else 1.0)
        return value <= self.goal.bound * (slowdown if self._is_time else 1.0)

    @property
    def _is_time(self) -> bool:
        return self.goal is not None and not self.goal.beside and self.unit in _TIMES

    @property
    def _is_rate(self) -> bool:
        return self.goal is not None and not self.goal.beside and self.unit.endswith("/s")


def ratio_of(ours: Samples, theirs: Samples) -> float:
    """Return the median of the turns' ratios; infinite if theirs is zero, NaN if both are."""
    ratios = []
    for mine, other in zip(ours, theirs, strict=True):
        ratios.append(mine / other if other else (math.inf if mine else math.nan))
    return median(ratios)


def count_argument(text: str) -> int:
    """Return a count of at least 1 for an argument parser.

    Raises:
        ValueError: it is none.
    """
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that ``percent`` of ``values`` do not exceed; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * percent / 100) - 1)]


def measure_interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    turns: int,
    number: int,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, list[float]]:
    """Time each call ``number`` times per turn; returns nanoseconds per call, one value per turn, by name."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    gc.collect()
    for _ in range(turns):
        for name, call in calls.items():
            samples[name].append(_time(call, number, clock_ns))
    return samples


def _time(call: Callable[[], object], number: int, clock_ns: Callable[[], int]) -> float:
    repeats = range(number)
    begun = clock_ns()
    for _ in repeats:
        call()
    return (clock_ns() - begun) / number
