"""The page of results shows the kept run, with every missed goal."""

from __future__ import annotations

import math

import pytest

from benchmarks import tables
from benchmarks.measure import Goal, Measurement
from benchmarks.report import JsonReport, as_json, read_json, with_section

ROWS = (
    Measurement("codec", "encode", "us", (2.0, 4.0, 3.0), {"limit": (1.0, 2.0, 1.5)}, Goal(1.5, "limit")),
    Measurement("codec", "decode", "us", (2.0, 2.0, 2.0), {}, Goal(2.5)),
    Measurement("view", "apply", "blocks/s", (1_500_000.0,), {"Dynamo": (math.nan,)}, Goal(2.0, "Dynamo")),
    Measurement("view", "bytes a block", "", (143.0,)),
)


@pytest.fixture
def report() -> JsonReport:
    measured = JsonReport({}, [])
    for section in ("codec", "view"):
        measured = with_section(measured, section, [row for row in ROWS if row.section == section])
    return read_json(as_json(measured))


def test_each_section_is_a_page_with_every_row(report: JsonReport) -> None:
    pages = tables.section_pages(report)
    assert list(pages) == ["codec", "view"]
    assert "| encode | 3 us | limit 1.5 (2.00x) | <= 1.5 x limit **missed** |" in pages["codec"]
    assert "| decode | 2 us |  | <= 2.5 reached |" in pages["codec"]
    assert "| apply | 1,500,000 blocks/s | Dynamo: not measured | <= 2 x Dynamo |" in pages["view"]
    assert "| bytes a block | 143 |  |  |" in pages["view"]


def test_a_section_that_is_measured_again_replaces_its_rows_and_its_machine_only(report: JsonReport) -> None:
    again = with_section(report, "codec", [Measurement("codec", "encode", "us", (5.0,))], slowdown=2.0)
    assert [(row.what, row.value) for row in again.rows] == [
        ("encode", 5.0),
        ("apply", 1_500_000.0),
        ("bytes a block", 143.0),
    ]
    assert again.machines["codec"]["slowdown"] == "2.00"
    assert again.machines["view"] == report.machines["view"]


def test_a_missed_goal_without_a_reason_is_named(report: JsonReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "REASONS", ())
    assert tables.unexplained(report) == ["codec: encode"]
    monkeypatch.setattr(tables, "REASONS", (("codec: enc", "Tuples."), ("codec", "Others.")))
    assert tables.unexplained(report) == ["codec: encode"]
    monkeypatch.setattr(tables, "REASONS", (("codec: enc", "Tuples."), ("view", "Others.")))
    assert tables.unexplained(report) == []
    assert "- Tuples.\n    - encode: 2.00x, goal <= 1.5 x limit\n" in tables.section_pages(report)["codec"]
    assert tables.worst_misses(report.rows) == ["- codec, encode: 2.00x, goal <= 1.5 x limit. Tuples."]


def test_a_slow_machine_changes_goals_in_times_and_rates_only() -> None:
    def verdicts(unit: str, goal: Goal) -> list[bool | None]:
        row = Measurement("codec", "encode", unit, (3.0,), {"limit": (1.0,)}, goal)
        return [row.reached(slowdown) for slowdown in (1.0, 2.0)]

    assert verdicts("us", Goal(2.0)) == [False, True]
    assert verdicts("batches/s", Goal(5.0, at_least=True)) == [False, True]
    assert verdicts("us", Goal(2.0, "limit")) == [False, False]
    assert verdicts("bytes a block", Goal(2.0)) == [False, False]


def test_only_text_between_marks_is_replaced(report: JsonReport) -> None:
    page = "above\n<!-- areas -->\nold\n<!-- /areas -->\nbelow\n"
    assert tables.with_areas(page, report) == (
        f"above\n<!-- areas -->\n\n{tables.areas(report)}\n\n<!-- /areas -->\nbelow\n"
    )


@pytest.fixture(scope="module")
def kept() -> JsonReport:
    return read_json(tables.RESULTS.read_bytes())


def test_the_pages_show_the_kept_run(kept: JsonReport) -> None:
    page = tables.PAGE.read_text()
    assert tables.with_areas(page, kept) == page, "run `python -m benchmarks.tables`"
    pages = {path.stem: path.read_text() for path in tables.SECTION_PAGES.glob("*.md")}
    assert pages == tables.section_pages(kept), "run `python -m benchmarks.tables`"


def test_every_section_belongs_to_one_area_and_every_selected_row_exists(kept: JsonReport) -> None:
    assert sorted(section for area in tables.AREAS for section in area.sections) == sorted(kept.machines)
    for section, what in [row for area in tables.AREAS for row in area.rows]:
        assert [row for row in kept.rows if row.section == section and row.what.startswith(what)], what


def test_every_goal_that_the_kept_run_missed_has_its_reason(kept: JsonReport) -> None:
    assert tables.unexplained(kept) == []
