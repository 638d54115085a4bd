"""Edges that are broken on purpose, as far as their decisions are pure. Each function breaks one rule for a test.

Some were defects of 0.4: replays that starve, and a truncated floor.
"""

from __future__ import annotations

import re

import pytest

from scheduler_components.kv_events import sequence_floor
from scheduler_components.kv_events.handover import PAUSE_S, Handover
from scheduler_components.kv_events.replay import ReplaySessions


def replays_starve_while_batches_are_published(patch: pytest.MonkeyPatch) -> None:
    """Calls that sent batches served no replay, and the thread drained only when nothing had been published."""
    pause_s = Handover.pause_s

    def pause_while_published(self: Handover, now_s: float, late_s: float, requests_at_s: float) -> float:
        if now_s - self.backlog.last_s < 0.5:
            return 0.008
        return pause_s(self, now_s, late_s, requests_at_s)

    patch.setattr(Handover, "replay_s", lambda *_: 0.0)
    patch.setattr(Handover, "pause_s", pause_while_published)


def a_late_thread_is_counted_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Handover, "is_thread_prompt", lambda *_: True)


def the_thread_waits_for_a_scheduler_that_stopped(patch: pytest.MonkeyPatch) -> None:
    pause_s = Handover.pause_s

    def wait(self: Handover, now_s: float, late_s: float, requests_at_s: float) -> float:
        return pause_s(self, now_s, late_s, requests_at_s) if self.is_active else PAUSE_S

    patch.setattr(Handover, "pause_s", wait)


def clients_that_are_gone_keep_their_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplaySessions, "drop", lambda *_: None)


def a_truncated_floor_is_believed(patch: pytest.MonkeyPatch) -> None:
    def believe(content: bytes | None, name: str) -> int:
        del name
        digits = re.match(rb"\d+", content or b"")
        return int(digits[0]) if digits else 0

    patch.setattr(sequence_floor, "_number_in", believe)
