"""Timeline: the clock, the heap, the random numbers and the history of one simulated world.

Everything that happens is an action on the heap, and every draw comes from one seeded generator. So a seed is a
history.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias

from scheduler_components._internal.virtual_clock import nanoseconds
from scheduler_components.testing import VirtualClock
from scheduler_engine.simulation import EventHeap

_NUM_LAST_EVENTS = 24
"""Lines of history that a violation shows."""


class BrokenPromise(AssertionError):
    """A part of a simulated world did what it must never do.

    Args:
        promise: the promise, as in docs/explanation/delivery.md.
        detail: who broke it, and how.
    """

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise
        self.detail = detail


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Virtual time of one world.

    Attributes:
        seed: of every draw.
        clock: the present; ``Timeline`` advances it.
        random: the only source of chance.
        num_events: actions carried out.
    """

    seed: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    random: random.Random = field(init=False)
    num_events: int = field(default=0, init=False)
    _heap: EventHeap = field(default_factory=EventHeap, init=False)
    _last_events: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_LAST_EVENTS), init=False)
    _digest: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._digest = blake2b(b"%d" % self.seed, digest_size=8).digest()

    @property
    def now_s(self) -> float:
        """The present in seconds since the start."""
        return self.clock()

    @property
    def digest(self) -> str:
        """Digest of the history so far, in hexadecimal digits."""
        return self._digest.hex()

    @property
    def last_events(self) -> tuple[str, ...]:
        """The newest lines of the history, the oldest first."""
        return tuple(self._last_events)

    def after(self, delay_s: float, action: Callable[[], None]) -> float:
        """Let ``action`` happen in ``delay_s`` seconds. Return the exact time, in seconds."""
        time_ns = self.clock.now_ns + nanoseconds(delay_s)
        self._heap.push(time_ns, action)
        return time_ns / 1e9

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Let ``action`` happen at ``time_s``, rounded to nanoseconds, or now if that is past."""
        self._heap.push(nanoseconds(time_s), action)

    def run_until(self, until_s: float) -> None:
        """Carry out every action up to ``until_s``, then let the time be ``until_s``."""
        until_ns = nanoseconds(until_s)
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = True

        self._heap.push(until_ns, end, order=1)
        while not is_over:
            action = self._heap.pop()
            self.clock.now_ns = self._heap.now_ns
            action()
            self.num_events += 1

    def record(self, what: str) -> None:
        """Add one line to the history."""
        line = f"{self.now_s:.6f} {what}"
        self._last_events.append(line)
        self._digest = blake2b(self._digest + line.encode(), digest_size=8).digest()

    def happens(self, probability: float) -> bool:
        """Draw whether something happens. A probability of 0 draws nothing."""
        return probability > 0.0 and self.random.random() < probability


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
