"""Worlds of plain publishers reach the high-water mark of a ROUTER, and their readers are judged without a proof."""

from __future__ import annotations

import pytest

from observability.kv_stream.plain_cursor import PlainCursor
from worlds import run_world
from worlds.loss_ledger import LossLedger
from worlds.plain_part import PlainPart
from worlds.reader_judge import ReaderJudge
from worlds.timeline import Timeline
from worlds.world_counters import WorldCounters


@pytest.fixture
def without_the_other_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``ReaderJudge`` find nothing: it would find some of these defects first."""
    monkeypatch.setattr(LossLedger, "check", lambda _: None)
    monkeypatch.setattr(ReaderJudge, "judge", lambda _: None)


def check_found(*promises: str) -> None:
    """Check that one of the first worlds breaks one of these promises."""
    found = set()
    for seed in range(20):
        violation = run_world(seed, kind="plain").violation
        found.add(violation and violation.promise)
        if found & {*promises}:
            return
    pytest.fail(f"found {found}")


def test_an_answer_may_be_larger_than_the_high_water_mark_in_a_storm_and_not_in_a_calm() -> None:
    part = PlainPart(Timeline(seed=1), WorldCounters())
    size = part.stream.process._shape.publisher.window
    for each in part.stream.readers:
        storm, calm = each.storm.replay.capacity, each.calm.replay.capacity
        assert storm is not None and calm is not None
        assert storm <= max(3, size) and calm > size + 1


def test_a_world_is_sound_and_measures_the_age_of_batches() -> None:
    report = run_world(1, kind="plain")
    assert report.violation is None
    assert report.measured["age_s"] < 0.2


@pytest.mark.broken_variants
@pytest.mark.usefixtures("without_the_other_judge")
def test_a_view_that_forgets_that_it_began_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PlainCursor, "_settle", lambda self: self._change_state("live" if self._run.last >= 0 else "partial")
    )
    check_found("a LIVE view is never wrong", "a view is LIVE if its history is complete")


@pytest.mark.broken_variants
@pytest.mark.usefixtures("without_the_other_judge")
def test_a_gap_that_costs_the_whole_history_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainCursor, "_on_first_batch", lambda self, _, seq, payload: self._begin_run(seq, payload))
    check_found("no history is dropped that the publisher has")


@pytest.mark.broken_variants
@pytest.mark.usefixtures("without_the_other_judge")
def test_a_gap_that_is_skipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(self: PlainCursor) -> tuple:
        self._run.last = self._last_live_seq
        return ()

    monkeypatch.setattr(PlainCursor, "_recover_gap", skip)
    check_found("batches are applied in order", "a LIVE view is never wrong")
