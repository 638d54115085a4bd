"""DeliveryReport: what happened in a simulated world, and which promise was broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from worlds.world_counters import Measure

__all__ = ["DeliveryReport", "DeliverySummary", "Violation", "encode_delivery_report", "summarize_deliveries"]


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
