"""Write ``docs/benchmark-results.md`` and a page per section below ``docs/benchmark-results/`` from
``benchmarks/results.json``: ``python -m benchmarks.tables``.

``make bench BENCH_ARGS='--json benchmarks/results.json'`` writes that file, whole or section by section. All figures of
the pages come from it. A missed goal needs a reason in ``REASONS``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from benchmarks.missed_goals import REASONS
from benchmarks.report import JsonReport, JsonRow, number_text, read_json

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[1] / "docs" / "benchmark-results.md"
SECTION_PAGES = PAGE.with_suffix("")
_NUM_WORST = 10


class Area(msgspec.Struct, frozen=True):
    """What one screen of the page shows.

    Attributes:
        title: the heading.
        gain: what a user gains, and next to whom it was measured.
        sections: sections of the benchmark, each with a page of its own.
        rows: selected rows: the section, and the first words of the row.
    """

    title: str
    gain: str
    sections: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]


AREAS = (
    Area(
        "Publishing KV events",
        "Readers get events within milliseconds, and a late reader or a replay does not slow the others; next to the "
        "publishers of SGLang and vLLM. A loop that never calls `idle()` pays for it in its steps.",
        (
            "publish",
            "saturated",
            "traffic",
            "throughput",
            "parts",
            "replay",
            "late_readers",
            "idle",
            "codec",
            "native",
            "subscribers",
            "start",
        ),
        (
            ("publish", "publish() p50, 64 events, idle() called"),
            ("publish", "publish() p50, 64 events, no idle()"),
            ("publish", "CPU of publishing per step, all threads, replay buffer full, 64 events, idle() called"),
            ("saturated", "delivery p99, 64 events"),
            ("replay", "live p99 while replaying, loop that also waits"),
            ("replay", "first answer of an idle publisher"),
        ),
    ),
    Area(
        "Cache and hierarchical cache",
        "A request of a recorded trace costs a quarter of the time of SGLang's radix cache, and the costs do not grow "
        "with the cache.",
        ("cache", "trace", "hicache_step"),
        (("trace", "a request of a trace, pages of 16, no events"),),
    ),
    Area(
        "Scheduling and agreement",
        "Policies order thousands of waiting requests within the step; next to the schedulers of SGLang and vLLM.",
        ("batching", "policies", "agreement", "decision_log", "quiesce", "intake", "step"),
        (("policies", "order and admission, fcfs, 128 waiting"),),
    ),
    Area(
        "Load and metrics",
        "A load report costs a microsecond however long the queue is, next to a walk over the queue.",
        ("load", "metrics", "forward_pass"),
        (
            ("load", "get_loads(), 10,000 waiting"),
            ("step", "emit(), 64 running, publisher attached, in process"),
        ),
    ),
    Area(
        "Following, routing and relaying",
        "One process follows hundreds of ranks and answers which of them holds a prefix; next to Dynamo's indexer and "
        "selector.",
        ("view", "routing", "relay", "jetstream"),
        (
            ("view", "match lengths of 128 blocks, 256 ranks of one depth"),
            ("relay", "added delay p50, 2,000 batches/s of 1 block"),
        ),
    ),
    Area(
        "Engine, simulation and refactoring",
        "Hours of a trace are simulated in minutes, next to Dynamo's offline replay. A real model runs behind the "
        "scheduler.",
        ("simulation", "model", "shadow"),
        (),
    ),
)


def areas(report: JsonReport) -> str:
    """Return one screen per area: the gain, selected rows, and the worst missed goals with a sentence each."""
    screens = []
    for area in AREAS:
        measured = [section for section in area.sections if section in report.machines]
        links = ", ".join(f"[{section}](benchmark-results/{section}.md)" for section in measured)
        rows = [row for row in report.rows if row.section in area.sections]
        goals = [row for row in rows if row.reached is not None]
        reached = sum(row.reached is True for row in goals)
        parts = [f"## {area.title}", area.gain, _selected(report, area)]
        parts.append(f"{reached} of {len(goals)} goals are reached. All rows: {links}.")
        if missed := worst_misses(rows):
            parts.append("\n".join(("The worst misses:", "", *missed)))
        screens.append("\n\n".join(part for part in parts if part))
    return "\n\n".join(screens)


def _selected(report: JsonReport, area: Area) -> str:
    found = [
        row
        for section, what in area.rows
        for row in report.rows
        if row.section == section and row.what.startswith(what)
    ]
    if not found:
        return ""
    lines = ["| what | this kit | compared with (ours / theirs) |", "| --- | --- | --- |"]
    lines += [f"| {row.what} | {_figure(row)} | {_all_comparisons(row, without=('limit', 'kit'))} |" for row in found]
    return "\n".join(lines)


def worst_misses(rows: Iterable[JsonRow]) -> list[str]:
    """Return the goals that are missed by the largest factors, one per reason, with the reason's first sentence."""
    missed = sorted((row for row in rows if row.reached is False), key=_factor, reverse=True)
    worst: dict[str, JsonRow] = {}
    for row in missed:
        worst.setdefault(next((text for pattern, text in REASONS if re.match(pattern, _name(row))), ""), row)
    lines = []
    for reason, row in list(worst.items())[:_NUM_WORST]:
        sentence = re.split(r"(?<=[.!?]) (?=[A-Z`])", reason)[0]
        lines.append(f"- {row.section}, {row.what}: {_got(row)}, goal {row.goal}. {sentence}".rstrip())
    return lines


def _factor(row: JsonRow) -> float:
    """Return by which factor a goal is missed."""
    bound = float(row.goal.split()[1])
    _, _, peer = row.goal.partition(" x ")
    got = row.ratios.get(peer, row.value or 0.0)
    return bound / got if row.goal.startswith(">=") and got else got / bound if bound else got


def section_pages(report: JsonReport) -> dict[str, str]:
    """Return the text of each section's page: every row, the facts of the machine, and the reasons of missed goals."""
    pages = {}
    for section, rows in groupby(report.rows, lambda row: row.section):
        facts = ", ".join(f"{name} {value}" for name, value in report.machines[section].items())
        whole = list(rows)
        parts = [
            f"# Benchmark: {section}",
            f"Generated from `benchmarks/results.json`. Machine: {facts}.",
            _table(whole),
        ]
        if reasons := _reasons(whole):
            parts += ["## Missed goals", reasons]
        pages[section] = "\n\n".join(parts) + "\n"
    return pages


def _reasons(rows: Sequence[JsonRow]) -> str:
    lines = []
    for pattern, reason in REASONS:
        missed = [row for row in rows if row.reached is False and re.match(pattern, _name(row))]
        if missed:
            lines += [f"- {reason}", *(f"    - {row.what}: {_got(row)}, goal {row.goal}" for row in missed)]
    return "\n".join(lines)


def unexplained(report: JsonReport) -> list[str]:
    """Return the missed goals that do not have exactly one reason."""
    return [
        _name(row)
        for row in _missed(report)
        if sum(re.match(pattern, _name(row)) is not None for pattern, _ in REASONS) != 1
    ]


def with_areas(page: str, report: JsonReport) -> str:
    """Return ``page`` with new text between its marks."""
    pattern = r"(?s)(<!-- areas -->\n).*?(<!-- /areas -->)"
    return re.sub(pattern, lambda found: f"{found[1]}\n{areas(report)}\n\n{found[2]}", page)


def _missed(report: JsonReport) -> Iterator[JsonRow]:
    return (row for row in report.rows if row.reached is False)


def _name(row: JsonRow) -> str:
    return f"{row.section}: {row.what}"


def _got(row: JsonRow) -> str:
    _, _, peer = row.goal.partition(" x ")
    return f"{row.ratios[peer]:.2f}x" if peer in row.ratios else _figure(row)


def _figure(row: JsonRow) -> str:
    return "not measured" if row.value is None else f"{number_text(row.value)} {row.unit}".rstrip()


def _table(rows: Iterable[JsonRow]) -> str:
    lines = ["| what | figure | compared with (ours / theirs) | goal |", "| --- | --- | --- | --- |"]
    for row in rows:
        compared = _all_comparisons(row)
        mark = {True: " reached", False: " **missed**", None: ""}[row.reached]
        lines.append(f"| {row.what} | {_figure(row)} | {compared} | {row.goal}{mark} |")
    return "\n".join(lines)


def _all_comparisons(row: JsonRow, without: tuple[str, ...] = ()) -> str:
    names = (name for name in row.samples if name != "ours" and not name.startswith(without))
    return ", ".join(_comparison(row, name, row.samples[name]) for name in names)


def _comparison(row: JsonRow, name: str, samples: Sequence[float | None]) -> str:
    measured = sorted(value for value in samples if value is not None)
    if not measured:
        return f"{name}: not measured"
    return f"{name} {number_text(measured[len(measured) // 2])}" + (
        f" ({row.ratios[name]:.2f}x)" if name in row.ratios else ""
    )


def main() -> None:
    report = read_json(RESULTS.read_bytes())
    PAGE.write_text(with_areas(PAGE.read_text(), report))
    SECTION_PAGES.mkdir(exist_ok=True)
    for section, text in section_pages(report).items():
        (SECTION_PAGES / f"{section}.md").write_text(text)
    for name in unexplained(report):
        print(f"missed, without a reason of its own in benchmarks/missed_goals.py: {name}")


if __name__ == "__main__":
    main()
