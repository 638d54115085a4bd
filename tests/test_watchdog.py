"""A stall is reported once and its end once. An idle scheduler never stalls."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_components.watchdog import IDLE_PHASE, StallDetector, StepProgress

AFTER_S = 3.0


@given(st.lists(st.sampled_from(["move", "idle", "look", "look", 0.5, 2.0, 4.0]), max_size=60))
@example(["move", "look", 4.0, "look", "look", 4.0, "look", "move", "look", 4.0, "look", "idle", "look"])
def test_a_stall_is_reported_once(history: list[str | float]) -> None:
    progress = StepProgress()
    detector = StallDetector(progress=progress, rank="tp0", after_s=AFTER_S)
    now_s = seen_at_s = 0.0
    seen_moves, is_reported = -1, False
    for event in history:
        if isinstance(event, float):
            now_s += event
        elif event == "move":
            progress.enter_phase("device", "r1")
        elif event == "idle":
            progress.enter_phase(IDLE_PHASE)
        else:
            report = detector.poll(now_s)
            if progress.num_phase_changes != seen_moves or progress.phase == IDLE_PHASE:
                assert (report is not None) == is_reported
                assert report is None or report.is_resolved
                seen_moves, seen_at_s, is_reported = progress.num_phase_changes, now_s, False
            elif now_s - seen_at_s >= AFTER_S and not is_reported:
                assert report is not None
                assert (report.phase, report.request, report.is_resolved) == ("device", "r1", False)
                is_reported = True
            else:
                assert report is None
