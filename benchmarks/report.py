"""Format measurements as a table and as JSON."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version

import msgspec

from benchmarks.measure import Measurement

_LIBRARIES = ("msgspec", "pyzmq", "prometheus-client")


class JsonRow(msgspec.Struct, frozen=True):
    """One measurement. ``samples`` has the values of every turn, ours and by name. Unmeasured values are None."""

    section: str
    what: str
    unit: str
    value: float | None
    ratios: dict[str, float]
    goal: str
    reached: bool | None
    samples: dict[str, list[float | None]]


class JsonReport(msgspec.Struct, frozen=True):
    """The rows of all sections, and by section the facts of the machine that measured it."""

    machines: dict[str, dict[str, str]]
    rows: list[JsonRow]


def machine(slowdown: float = 1.0) -> dict[str, str]:
    """Describe the machine and versions that the figures depend on."""
    return {
        "slowdown": f"{slowdown:.2f}",
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    } | {name: version(name) for name in _LIBRARIES}


def with_section(report: JsonReport, section: str, rows: Iterable[Measurement], slowdown: float = 1.0) -> JsonReport:
    """Return ``report`` with these rows in the place of the section's earlier ones, or at the end."""
    measured = {name: [row for row in report.rows if row.section == name] for name in report.machines}
    measured[section] = [_json_row(row, slowdown) for row in rows]
    facts = report.machines | {section: machine(slowdown)}
    return JsonReport(facts, [row for rows_of_section in measured.values() for row in rows_of_section])


def as_json(report: JsonReport) -> bytes:
    """Encode all rows with the values of every turn, one row per line."""
    head = msgspec.json.encode(JsonReport(report.machines, [])).removesuffix(b"]}")
    return head + b"\n" + b",\n".join(map(msgspec.json.encode, report.rows)) + b"]}\n"


def read_json(text: bytes) -> JsonReport:
    """Decode the output of ``as_json``. Raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(text, type=JsonReport)


def _json_row(row: Measurement, slowdown: float) -> JsonRow:
    found = {name: row.ratio(name) for name in row.beside}
    ratios = {name: ratio for name, ratio in found.items() if ratio is not None and math.isfinite(ratio)}
    samples = {"ours": list(row.ours)} | {name: list(values) for name, values in row.beside.items()}
    goal = str(row.goal) if row.goal else ""
    return JsonRow(row.section, row.what, row.unit, row.value, ratios, goal, row.reached(slowdown), samples)


def as_table(rows: Sequence[Measurement], slowdown: float = 1.0) -> str:
    """Format one line per measurement: value, peers with ours/theirs, goal, and whether it is reached."""
    cells = [("what", "ours", "compared with: theirs (ours/theirs)", "goal", "")]
    cells += [_cells(row, slowdown) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = []
    for what, ours, compared, goal, mark in cells:
        line = f"{what:<{widths[0]}}  {ours:>{widths[1]}}  {compared:<{widths[2]}}  {goal:<{widths[3]}}  {mark}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _cells(row: Measurement, slowdown: float) -> tuple[str, str, str, str, str]:
    compared = []
    for name, values in row.beside.items():
        ratio = row.ratio(name)
        middle = sorted(values)[len(values) // 2]
        ratio_text = "" if ratio is None or not math.isfinite(ratio) else f" ({ratio:.2f}x)"
        compared.append(f"{name} {number_text(middle)}{ratio_text}")
    mark = {True: "reached", False: "MISSED", None: "-" if row.goal else ""}[row.reached(slowdown)]
    unit = f" {row.unit}" if row.unit else ""
    return row.what, number_text(row.value) + unit, ", ".join(compared), str(row.goal or ""), mark


def number_text(value: float) -> str:
    """Format with three significant digits."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
