"""Defects of 0.4 at the edges, as far as a world without sockets and threads has them. Each function breaks a rule."""

from __future__ import annotations

import re

import pytest

from scheduler_components.kv_events import sequence_floor
from scheduler_components.kv_events.handover import Handover


def replays_starve_while_batches_are_published(patch: pytest.MonkeyPatch) -> None:
    """Calls that sent batches served no replay, and the thread drained only when nothing had been published."""
    pause_s = Handover.pause_s

    def pause_while_published(self: Handover, now_s: float, late_s: float, requests_at_s: float) -> float:
        if now_s - self.backlog.last_s < 0.5:
            return 0.008
        return pause_s(self, now_s, late_s, requests_at_s)

    patch.setattr(Handover, "replay_s", lambda *_: 0.0)
    patch.setattr(Handover, "pause_s", pause_while_published)


def a_truncated_floor_is_believed(patch: pytest.MonkeyPatch) -> None:
    def believe(content: bytes | None, name: str) -> int:
        del name
        digits = re.match(rb"\d+", content or b"")
        return int(digits[0]) if digits else 0

    patch.setattr(sequence_floor, "_number_in", believe)
