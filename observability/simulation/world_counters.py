"""WorldCounters: what happened in a simulated world."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["WorldCounters"]


@dataclass(slots=True)
class WorldCounters:
    """What happened in a world, over all its parts.

    Attributes:
        faults: by kind.
        counts: other events, by kind: batches published and delivered, requests, snapshots, and so on.
        max_age_s: oldest batch that a reader did not have, while the world was calm and the reader had arrived.
        max_pending: most pending batches of a publisher that could send.
        max_until_live_s: longest time from the last fault of a reader to LIVE.
    """

    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    max_age_s: float = 0.0
    max_pending: int = 0
    max_until_live_s: float = 0.0
