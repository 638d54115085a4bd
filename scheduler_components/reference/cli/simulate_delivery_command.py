"""The command ``simulate delivery``: publishers, readers and faults in virtual time, one history per seed."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from observability.simulation import (
    DeliveryReport,
    DeliverySummary,
    Measure,
    Violation,
    WorldKind,
    encode_delivery_report,
    run_world,
    summarize_deliveries,
)
from scheduler_components.reference.cli.progress_line import ProgressLine
from scheduler_components.reference.cli.run_reporter import print_lines

__all__ = ["format_summary", "format_violation", "simulate_delivery"]

_NUM_SEEDS = 100
_MEASURES: dict[Measure, str] = {
    "until_live_s": "longest time from a reader's last fault to LIVE: {:.3f} s",
    "age_s": "oldest batch that a reader lacked in a calm: {:.3f} s",
    "pending": "most batches that waited at a publisher that could send: {:.0f}",
    "joining_bytes": "most bytes that a reader received until it was LIVE, after it joined in a calm: {:,.0f}",
}

_NUM_VIOLATIONS = 5
"""Violations that are printed whole; of further ones the seed suffices."""


def simulate_delivery(
    *,
    seeds: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Worlds. Default: 100, or 1 with --seed.")
    ] = None,
    seed: Annotated[int | None, Parameter(validator=Number(gte=0), help="First seed. Default: 0.")] = None,
    kind: Annotated[
        WorldKind | None, Parameter(help="What each world consists of. Without it, the seed chooses.")
    ] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", show_default=False, help="Print each world's report as one line of JSON.")
    ] = False,
) -> int:
    """Publish events to readers over networks, disks and processes that fail, in virtual time, and judge promises.

    A seed is a history: it draws the publishers, the readers, the traffic and the faults, and gives the same report on
    every run. The exit code is 1 if a promise was broken. ``--seed`` with the printed seed repeats that history.
    """
    first = seed or 0
    count = seeds or (_NUM_SEEDS if seed is None else 1)
    progress = ProgressLine(out=sys.stderr)
    reports: list[DeliveryReport] = []
    num_violations = 0
    processor_s = time.process_time()
    for number in range(first, first + count):
        with _without_logs():
            report = run_world(number, kind=kind)
        reports.append(report)
        if as_json:
            print_lines((encode_delivery_report(report).decode(),))
        elif report.violation is not None and num_violations < _NUM_VIOLATIONS:
            progress.clear()
            print_lines(format_violation(report, report.violation))
        num_violations += report.violation is not None
        progress.show(f"{len(reports):,} of {count:,} worlds, {num_violations:,} violations")
    progress.clear()
    processor_s = time.process_time() - processor_s
    summary = summarize_deliveries(reports)
    if as_json:
        sys.stderr.write(f"{_speed(summary, processor_s)}\n")
    else:
        print_lines(format_summary(summary, processor_s))
    return int(bool(summary.violations))


@contextmanager
def _without_logs() -> Iterator[None]:
    """Hide the logs of simulated publishers, which would be those of a hundred processes."""
    log = logging.getLogger("scheduler_components.kv_events")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def format_violation(report: DeliveryReport, violation: Violation) -> Iterator[str]:
    """Yield the lines about a broken promise."""
    yield f"seed {report.seed} breaks a promise at {violation.time_s:.6f} s, in a {violation.phase}"
    yield f"  promise: {violation.promise}"
    yield f"  {violation.detail}"
    yield "  the last events:"
    yield from (f"    {line}" for line in violation.last_events)
    yield f"  repeat it: scheduler-components simulate delivery --seed {report.seed} --kind {report.kind}"


def format_summary(summary: DeliverySummary, processor_s: float) -> Iterator[str]:
    """Yield the lines that summarize all worlds."""
    yield f"{summary.num_worlds:,} worlds, {summary.duration_s:,.0f} s of virtual time"
    for name, count in summary.counts.items():
        yield f"  {name}: {count:,}"
    yield f"  faults: {sum(summary.faults.values()):,}"
    for name, count in summary.faults.items():
        yield f"    {name}: {count:,}"
    for kind, measured in summary.measured.items():
        yield f"  measured in worlds of the kind {kind}:"
        yield from (f"    {_MEASURES[name].format(value)}" for name, value in measured.items())
    yield f"  {_speed(summary, processor_s)}"
    if summary.violations:
        seeds = ", ".join(map(str, summary.violations))
        yield f"{len(summary.violations):,} of {summary.num_worlds:,} worlds broke a promise: seeds {seeds}"
    else:
        yield "every promise that is judged was kept"


def _speed(summary: DeliverySummary, processor_s: float) -> str:
    return f"simulated in {processor_s:.1f} s of processor time, {summary.duration_s / processor_s:,.0f} s per second"
