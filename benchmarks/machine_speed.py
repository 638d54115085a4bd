"""How slow the machine of a run is, compared with the machine for which the goals were set.

Goals in microseconds hold for one speed. The machines of this project are shared, and the same processor took twice as
long for the same work in some runs. A goal in units of time is therefore multiplied by the slowdown, and a goal in
units of a rate is divided by it. Goals that are ratios to another value of the same run need no correction.
"""

from __future__ import annotations

import time
from statistics import median

REFERENCE_S = 0.0012
"""Time of ``_work`` on the machine of the goals. It is derived, because that machine is not available any more: while
``_work`` took 2.4 ms, the limits of 138 rows took 1.99 times (median) what they took in the run of 0.3."""

_REPEATS = 200


def measure_slowdown() -> float:
    """Return the time of a fixed piece of Python relative to the reference machine; at least 1."""
    return max(1.0, median(_time_work() for _ in range(_REPEATS)) / REFERENCE_S)


def _time_work() -> float:
    begun = time.perf_counter()
    _work()
    return time.perf_counter() - begun


def _work() -> int:
    table: dict[int, tuple[int, str]] = {}
    for number in range(10_000):
        table[number * 7919] = (number, str(number))
    return sum(entry[0] for entry in table.values())
