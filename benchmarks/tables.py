"""Write the tables of ``docs/benchmark-results.md`` from ``benchmarks/results.json``: ``python -m benchmarks.tables``.

``make bench BENCH_ARGS='--json benchmarks/results.json'`` writes that file, whole or section by section. All figures of
the page come from it. A missed goal needs a reason in ``REASONS``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.missed_goals import REASONS
from benchmarks.report import JsonReport, JsonRow, number_text, read_json

__all__ = ["headline", "missed_goals", "results", "unexplained", "with_tables"]

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[1] / "docs" / "benchmark-results.md"

HEADLINE = (
    ("publish", "publish() p50, 64 events, idle() called"),
    ("publish", "publish() p50, 64 events, no idle()"),
    ("publish", "CPU of publishing per step, all threads, replay buffer full, 64 events, idle() called"),
    ("saturated", "delivery p99, 64 events"),
    ("replay", "live p99 while replaying, loop that also waits"),
    ("replay", "first answer of an idle publisher"),
    ("load", "get_loads(), 10,000 waiting"),
    ("step", "emit(), 64 running, publisher attached, in process"),
    ("trace", "a request of a trace, pages of 16, no events"),
    ("view", "match lengths of 128 blocks, 256 ranks of one depth"),
    ("relay", "added delay p50, 2,000 batches/s of 1 block"),
)
"""Selected rows: section, and the first words of the row."""


def results(report: JsonReport) -> str:
    """Return one table per section, with every row and the facts of the machine that measured it."""
    tables = []
    for section, rows in groupby(report.rows, lambda row: row.section):
        facts = ", ".join(f"{name} {value}" for name, value in report.machines[section].items())
        tables.append(f"#### {section}\n\nMachine: {facts}.\n\n" + _table(rows))
    return "\n\n".join(tables)


def headline(report: JsonReport) -> str:
    """Return the table of the selected rows."""
    found = [
        next(row for row in report.rows if row.section == section and row.what.startswith(what))
        for section, what in HEADLINE
    ]
    lines = ["| what | this kit | compared with (ours / theirs) |", "| --- | --- | --- |"]
    lines += [f"| {row.what} | {_figure(row)} | {_all_comparisons(row, without=('limit', 'kit'))} |" for row in found]
    return "\n".join(lines)


def missed_goals(report: JsonReport) -> str:
    """Return each reason with the rows that it explains."""
    lines = []
    for pattern, reason in REASONS:
        rows = [row for row in _missed(report) if re.match(pattern, _name(row))]
        if rows:
            lines.append(f"- {reason}")
            lines += [f"    - {_name(row)}: {_got(row)}, goal {row.goal}" for row in rows]
    return "\n".join(lines)


def unexplained(report: JsonReport) -> list[str]:
    """Return the missed goals that do not have exactly one reason."""
    return [
        _name(row)
        for row in _missed(report)
        if sum(re.match(pattern, _name(row)) is not None for pattern, _ in REASONS) != 1
    ]


def with_tables(page: str, report: JsonReport) -> str:
    """Return ``page`` with new text between its marks (``<!-- results -->`` to ``<!-- /results -->``)."""
    for mark, write in {"results": results, "headline": headline, "missed": missed_goals}.items():
        pattern = rf"(?s)(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
        if re.search(pattern, page):
            text = write(report)
            page = re.sub(pattern, lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)
    return page


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
    PAGE.write_text(with_tables(PAGE.read_text(), report))
    for name in unexplained(report):
        print(f"missed, without a reason of its own in benchmarks/missed_goals.py: {name}")


if __name__ == "__main__":
    main()
