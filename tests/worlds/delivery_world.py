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
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeAlias

import msgspec

from worlds.jetstream_world import JetStreamPart
from worlds.plain_world import PlainPart
from worlds.relay_world import RelayPart
from worlds.stream_world import StreamPart, draw_stream_shape
from worlds.timeline import BrokenPromise, Measure, Timeline, WorldCounters

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


class Violation(msgspec.Struct, frozen=True):
    """A broken promise.

    Attributes:
        time_s: virtual time.
        phase: of the world: storm, calm or quiet.
        promise: the promise.
        detail: who broke it, and how.
        last_events: the newest lines of the history, the oldest first.
    """

    time_s: float
    phase: str
    promise: str
    detail: str
    last_events: tuple[str, ...]


class DeliveryReport(msgspec.Struct, frozen=True):
    """The result of one world. A seed gives the same report on every machine with the same Python.

    Attributes:
        seed: of the world.
        kind: of the world, such as ``stream``.
        duration_s: virtual time.
        num_events: actions on the time line.
        history: digest of the history.
        faults: by kind.
        counts: what else happened, by kind.
        measured: the greatest value of each ``Measure`` that was taken.
        violation: the first broken promise, which ends the world; None if all were kept.
    """

    seed: int
    kind: str
    duration_s: float
    num_events: int
    history: str
    faults: dict[str, int]
    counts: dict[str, int]
    measured: dict[Measure, float]
    violation: Violation | None


class DeliverySummary(msgspec.Struct, frozen=True):
    """The results of several worlds.

    Attributes:
        num_worlds: worlds that ended.
        duration_s: virtual time of all of them.
        faults, counts: over all of them, as in ``DeliveryReport``.
        measured: over all worlds of a kind, by kind.
        violations: of the seeds that broke a promise, by seed.
    """

    num_worlds: int
    duration_s: float
    faults: dict[str, int]
    counts: dict[str, int]
    measured: dict[str, dict[Measure, float]]
    violations: dict[int, Violation]


def summarize_deliveries(reports: Iterable[DeliveryReport]) -> DeliverySummary:
    """Return the results of several worlds as one."""
    faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    violations: dict[int, Violation] = {}
    measured: dict[str, dict[Measure, float]] = {}
    num_worlds, duration_s = 0, 0.0
    for report in reports:
        num_worlds += 1
        duration_s += report.duration_s
        faults.update(report.faults)
        counts.update(report.counts)
        of_kind = measured.setdefault(report.kind, {})
        for name, value in report.measured.items():
            of_kind[name] = max(value, of_kind.get(name, value))
        if report.violation is not None:
            violations[report.seed] = report.violation
    return DeliverySummary(
        num_worlds=num_worlds,
        duration_s=duration_s,
        faults=dict(sorted(faults.items())),
        counts=dict(sorted(counts.items())),
        measured=dict(sorted(measured.items())),
        violations=violations,
    )


def encode_delivery_report(report: DeliveryReport) -> bytes:
    """Return a report as one line of JSON without its end. Equal reports give equal bytes."""
    return msgspec.json.encode(report)
