"""DeliveryReport: what happened in a simulated world, and which promise was broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

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
        max_age_s: oldest batch that a reader did not have, while the world was calm and the reader had arrived.
        max_pending: most pending batches of a publisher that could send.
        max_until_live_s: longest time from the last fault of a reader to LIVE.
        violation: the first broken promise, which ends the world; None if all were kept.
    """

    seed: int
    kind: str
    duration_s: float
    num_events: int
    history: str
    faults: dict[str, int]
    counts: dict[str, int]
    max_age_s: float
    max_pending: int
    max_until_live_s: float
    violation: Violation | None


class DeliverySummary(msgspec.Struct, frozen=True):
    """The results of several worlds.

    Attributes:
        num_worlds: worlds that ended.
        duration_s: virtual time of all of them.
        faults, counts, max_age_s, max_pending, max_until_live_s: over all of them, as in ``DeliveryReport``.
        violations: of the seeds that broke a promise, by seed.
    """

    num_worlds: int
    duration_s: float
    faults: dict[str, int]
    counts: dict[str, int]
    max_age_s: float
    max_pending: int
    max_until_live_s: float
    violations: dict[int, Violation]


def summarize_deliveries(reports: Iterable[DeliveryReport]) -> DeliverySummary:
    """Return the results of several worlds as one."""
    faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    violations: dict[int, Violation] = {}
    num_worlds, duration_s, max_age_s, max_pending, max_until_live_s = 0, 0.0, 0.0, 0, 0.0
    for report in reports:
        num_worlds += 1
        duration_s += report.duration_s
        faults.update(report.faults)
        counts.update(report.counts)
        max_age_s = max(max_age_s, report.max_age_s)
        max_pending = max(max_pending, report.max_pending)
        max_until_live_s = max(max_until_live_s, report.max_until_live_s)
        if report.violation is not None:
            violations[report.seed] = report.violation
    return DeliverySummary(
        num_worlds=num_worlds,
        duration_s=duration_s,
        faults=dict(sorted(faults.items())),
        counts=dict(sorted(counts.items())),
        max_age_s=max_age_s,
        max_pending=max_pending,
        max_until_live_s=max_until_live_s,
        violations=violations,
    )


def encode_delivery_report(report: DeliveryReport) -> bytes:
    """Return a report as one line of JSON without its end. Equal reports give equal bytes."""
    return msgspec.json.encode(report)
