"""The command ``make worlds``: publishers, readers and faults in virtual time, one history per seed."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from scheduler_engine.cli.progress_line import ProgressLine
from scheduler_engine.cli.run_reporter import print_lines
from worlds import (
    WORLD_KINDS,
    DeliveryReport,
    DeliverySummary,
    Measure,
    Violation,
    encode_delivery_report,
    run_world,
    summarize_deliveries,
)

_NUM_SEEDS = 100
_MEASURES: dict[Measure, str] = {
    "until_live_s": "longest time from a reader's last fault to LIVE: {:.3f} s",
    "age_s": "oldest batch that a reader lacked in a calm: {:.3f} s",
    "pending": "most batches that waited at a publisher that could send: {:.0f}",
    "joining_bytes": "most bytes that a reader received until it was LIVE, after it joined in a calm: {:,.0f}",
}

_NUM_VIOLATIONS = 5
"""Violations that are printed whole; of further ones the seed suffices."""


def main(arguments: Sequence[str]) -> int:
    """Publish events to readers over networks, disks and processes that fail, in virtual time, and verify promises.

    A seed is a history: it draws the publishers, the readers, the traffic and the faults, and gives the same report on
    every run. The exit code is 1 if a promise was broken, and 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="make worlds", description="Verify the delivery cores in simulated worlds.")
    parser.add_argument("--seeds", type=int, help="worlds (default: 100, or 1 with --seed)")
    parser.add_argument("--seed", type=int, help="first seed (default: 0)")
    parser.add_argument("--kind", choices=WORLD_KINDS, help="what each world consists of (default: the seed chooses)")
    parser.add_argument("--json", action="store_true", help="print each world's report as one line of JSON")
    options = parser.parse_args(arguments)
    seed, seeds, kind, as_json = options.seed, options.seeds, options.kind, options.json
    if (seeds is not None and seeds < 1) or (seed is not None and seed < 0):
        parser.error("--seeds must be >= 1 and --seed >= 0")
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
    yield f"  repeat it: make worlds WORLDS='--seed {report.seed} --kind {report.kind}'"


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
