"""``python -m benchmarks [section ...] [--quick] [--json FILE] [--plot FILE]``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from benchmarks.machine_speed import measure_slowdown
from benchmarks.measure import Measurement, Scale
from benchmarks.peer_publishers import find_peers
from benchmarks.report import JsonReport, as_json, as_table, machine, read_json, with_section
from benchmarks.scaling_plot import draw_scaling_plot

_SECTIONS = (
    "publish",
    "saturated",
    "traffic",
    "throughput",
    "parts",
    "replay",
    "late_readers",
    "idle",
    "load",
    "metrics",
    "forward_pass",
    "step",
    "intake",
    "quiesce",
    "agreement",
    "decision_log",
    "codec",
    "cache",
    "trace",
    "view",
    "subscribers",
    "native",
    "relay",
    "jetstream",
    "hicache_step",
    "batching",
    "policies",
    "simulation",
    "routing",
    "model",
    "shadow",
    "start",
)
_QUICK = Scale(turns=1, share=0.2)


def main() -> int:
    """Run the requested sections and print a table per section. Always return 0, because a time is no verdict."""
    parser = _parser()
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(_SECTIONS):
        parser.error(f"section {', '.join(sorted(unknown))} is not known: give some of {', '.join(_SECTIONS)}")
    peers, missing = find_peers()
    for line in missing:
        print(line, file=sys.stderr)
    scale = _QUICK if arguments.quick else Scale(turns=arguments.turns)
    kept = arguments.json is not None and arguments.json.exists()
    report = read_json(arguments.json.read_bytes()) if kept else JsonReport({}, [])
    rows: list[Measurement] = []
    verdicts: list[bool | None] = []
    for section in arguments.sections or _SECTIONS:
        slowdown = measure_slowdown()  # of each section: a shared machine changes its speed within a run
        found = _run(section, scale, peers, slowdown)
        rows += found
        verdicts += [row.reached(slowdown) for row in found]
        if arguments.json:  # after each section: a run takes an hour, and a section that fails ends it
            report = with_section(report, section, found, slowdown)
            arguments.json.write_bytes(as_json(report))
    if arguments.plot:
        arguments.plot.write_text(draw_scaling_plot(rows))
    print(f"{len(rows)} measurements, {verdicts.count(True)} goals reached, {verdicts.count(False)} missed")
    return 0


def _run(section: str, scale: Scale, peers: list[str], slowdown: float) -> list[Measurement]:
    begun = time.perf_counter()
    found: list[Measurement] = importlib.import_module(f"benchmarks.bench_{section}").run(scale, peers)
    facts = ", ".join(f"{name} {value}" for name, value in machine(slowdown).items())
    took_s = time.perf_counter() - begun
    print(f"\n{section}, {took_s:.0f} s ({facts})\n{as_table(found, slowdown)}", flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What the kit costs, next to its limits.")
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(_SECTIONS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="one short turn of each: to see that it runs")
    parser.add_argument("--turns", type=int, default=3, help="how often each comparison is repeated (3)")
    parser.add_argument("--json", type=Path, help="write every turn's values there; other sections that it has stay")
    parser.add_argument("--plot", type=Path, help="draw the cache's costs by size there, as SVG")
    return parser


if __name__ == "__main__":
    sys.exit(main())
