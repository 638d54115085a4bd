"""Reports of several worlds add up."""

from __future__ import annotations

import msgspec

from worlds import DeliveryReport, Violation, encode_delivery_report, summarize_deliveries

KEPT = DeliveryReport(
    seed=1, kind="stream", duration_s=10.0, num_events=5, history="ab", faults={"pauses": 2}, counts={"requests": 3},
    measured={"age_s": 0.1, "pending": 4}, violation=None,
)  # fmt: skip
BROKEN = msgspec.structs.replace(
    KEPT, seed=7, faults={"pauses": 1, "stalls": 1}, measured={"age_s": 0.2, "until_live_s": 1.0},
    violation=Violation(time_s=1.0, phase="calm", promise="p", detail="d", last_events=("e",)),
)  # fmt: skip


def test_worlds_add_up() -> None:
    summary = summarize_deliveries([KEPT, BROKEN])
    assert (summary.num_worlds, summary.duration_s) == (2, 20.0)
    assert (summary.faults, summary.counts) == ({"pauses": 3, "stalls": 1}, {"requests": 6})
    assert summary.measured == {"stream": {"age_s": 0.2, "pending": 4, "until_live_s": 1.0}}
    assert summary.violations == {7: BROKEN.violation}


def test_no_world_is_an_empty_summary() -> None:
    assert summarize_deliveries([]).num_worlds == 0


def test_a_report_is_one_line_of_json() -> None:
    line = encode_delivery_report(BROKEN)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=DeliveryReport) == BROKEN
