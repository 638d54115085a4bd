"""WorldCounters: what happened in a simulated world, and what was measured there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Measure", "WorldCounters"]

Measure: TypeAlias = Literal["until_live_s", "age_s", "pending", "joining_bytes"]
"""What a world measures, if the promise applies to its kind:

until_live_s: longest time from the last fault of a reader to LIVE.
age_s: oldest batch that a reader did not have, while the world was calm and the reader had arrived.
pending: most batches that waited at a publisher or writer that could send.
joining_bytes: most payload bytes that a reader received until it was LIVE, if it joined in a calm.
"""


@dataclass(slots=True)
class WorldCounters:
    """What happened in a world, over all its parts.

    Attributes:
        faults: by kind.
        counts: other events, by kind: batches published and delivered, requests, snapshots, and so on.
        measured: the greatest value of each measure.
    """

    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    measured: dict[Measure, float] = field(default_factory=dict)

    def measure(self, name: Measure, value: float) -> None:
        """Keep ``value`` if it is the greatest so far."""
        self.measured[name] = max(value, self.measured.get(name, value))
