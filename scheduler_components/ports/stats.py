"""Sources of statistics."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["StatsSource"]

Stats_co = TypeVar("Stats_co", covariant=True)


class StatsSource(Protocol[Stats_co]):
    """A component that reports statistics. ``MetricsEmitter`` and the Prometheus collectors read it."""

    def stats(self) -> Stats_co:
        """Return the statistics of this moment as a value that does not change afterwards."""
        ...
