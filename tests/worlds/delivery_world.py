"""DeliveryWorld: one seed, one history of publishers, readers and faults, judged while it runs.

A world alternates between storms, in which faults happen, and calms, in which only the traffic goes on. In the end it
becomes quiet: nothing is published any more. What must hold when:

==========  ===========================================================================================
always      a LIVE view is never wrong, requests and memory are bounded, no loss goes unreported
calm        soon every reader is LIVE, and has every batch that is older than a few milliseconds
quiet       every view equals the publisher's blocks, and is proved where it can be
==========  ===========================================================================================
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from worlds.delivery_report import DeliveryReport, Violation
from worlds.jetstream_part import JetStreamPart
from worlds.plain_part import PlainPart
from worlds.relay_part import RelayPart
from worlds.stream_part import StreamPart
from worlds.timeline import BrokenPromise, Timeline
from worlds.world_counters import WorldCounters
from worlds.world_shape import draw_stream_shape

__all__ = ["WORLD_KINDS", "DeliveryWorld", "WorldKind", "WorldPart", "run_world"]

_JUDGE_EVERY_S = 0.05
"""Time between two judgements of what must hold in a calm."""

_NUM_STORMS = 2
_STORM_S = (1.0, 4.0)
_CALM_S = 1.0
"""Time that a calm goes on after every recovery must be over."""


class WorldPart(Protocol):
    """A part of a world. It pushes its own events, and raises ``BrokenPromise``."""

    @property
    def limit_s(self) -> float:
        """How long recovery may take after the last fault."""
        ...

    def begin_storm(self, ends_s: float) -> None:
        """Let faults happen until ``ends_s``."""
        ...

    def begin_calm(self) -> None:
        """Stop the faults. Traffic goes on."""
        ...

    def join(self) -> None:
        """Let another reader join, while the world is calm."""
        ...

    def lose_frame(self) -> None:
        """Let each reader lose one batch, while the world is calm."""
        ...

    def judge(self) -> None:
        """Check what must hold in a calm."""
        ...

    def begin_quiet(self) -> None:
        """Publish nothing any more."""
        ...

    def check_converged(self) -> None:
        """Check what must hold in the end."""
        ...


PartFactory = Callable[[Timeline, WorldCounters], WorldPart]


def _make_stream(timeline: Timeline, counters: WorldCounters) -> WorldPart:
    return StreamPart(timeline, counters, draw_stream_shape(timeline.random))


WorldKind: TypeAlias = Literal["stream", "relay", "jetstream", "plain"]

WORLD_KINDS: dict[WorldKind, PartFactory] = {
    "stream": _make_stream,
    "relay": RelayPart,
    "jetstream": JetStreamPart,
    "plain": PlainPart,
}
"""What a world may consist of. The seed chooses one."""


class DeliveryWorld:
    """One world.

    Args:
        seed: of everything in it.
        kind: a key of ``WORLD_KINDS``; None lets the seed choose.

    Attributes:
        kind: of the world.
        timeline: with the history.
        phase: storm, calm or quiet.
    """

    __slots__ = ("_counters", "kind", "phase", "timeline")

    def __init__(self, seed: int, *, kind: WorldKind | None = None) -> None:
        self.timeline = Timeline(seed=seed)
        self.kind = kind or draw_kind(seed)
        self._counters = WorldCounters()
        self.phase = "calm"

    def run(self) -> DeliveryReport:
        """Run the world to its end, or to the first broken promise."""
        violation: Violation | None = None
        try:
            self._run(WORLD_KINDS[self.kind](self.timeline, self._counters))
        except BrokenPromise as error:
            violation = self._violation(error.promise, error.detail)
        except Exception as error:  # noqa: BLE001  a defect of any part is what this looks for
            violation = self._violation("no part fails", f"{type(error).__name__}: {error}")
        return self._report(violation)

    def _run(self, part: WorldPart) -> None:
        timeline = self.timeline
        for _ in range(_NUM_STORMS):
            ends_s = timeline.now_s + timeline.random.uniform(*_STORM_S)
            self._begin("storm")
            part.begin_storm(ends_s)
            timeline.run_until(ends_s)
            self._begin("calm")
            part.begin_calm()
            part.join()
            self._run_judged(part, part.limit_s)
            part.lose_frame()
            self._run_judged(part, _CALM_S)
        self._begin("quiet")
        part.begin_quiet()
        self._run_judged(part, part.limit_s)
        part.check_converged()

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.timeline.record(f"--- {phase} ---")

    def _run_judged(self, part: WorldPart, duration_s: float) -> None:
        for _ in range(math.ceil(duration_s / _JUDGE_EVERY_S)):
            self.timeline.run_until(self.timeline.now_s + _JUDGE_EVERY_S)
            part.judge()

    def _violation(self, promise: str, detail: str) -> Violation:
        timeline = self.timeline
        return Violation(
            time_s=timeline.now_s,
            phase=self.phase,
            promise=promise,
            detail=detail,
            last_events=timeline.last_events,
        )

    def _report(self, violation: Violation | None) -> DeliveryReport:
        timeline, counters = self.timeline, self._counters
        return DeliveryReport(
            seed=timeline.seed,
            kind=self.kind,
            duration_s=timeline.now_s,
            num_events=timeline.num_events,
            history=timeline.digest,
            faults=dict(sorted(counters.faults.items())),
            counts=dict(sorted(counters.counts.items())),
            measured=dict(sorted(counters.measured.items())),
            violation=violation,
        )


def draw_kind(seed: int) -> WorldKind:
    """Return the kind of the world of a seed. The history of a seed and a kind does not depend on it."""
    return random.Random(f"kind of {seed}").choice(tuple(WORLD_KINDS))


def run_world(seed: int, *, kind: WorldKind | None = None) -> DeliveryReport:
    """Run the world of a seed."""
    return DeliveryWorld(seed, kind=kind).run()
