"""Defects of 0.4 at the edges, as far as a world without sockets and threads has them. Each function breaks a rule."""

from __future__ import annotations

import re

import pytest

from observability.simulation.publisher_process import PublisherProcess
from scheduler_components.kv_events import sequence_floor


def replays_starve_while_batches_are_published(patch: pytest.MonkeyPatch) -> None:
    """Replays were served only in calls that found nothing to send."""
    serve = PublisherProcess._serve

    def serve_when_idle(self: PublisherProcess) -> None:
        if self.is_up and self._timeline.now_s - self._backlog.last_s < 0.5:
            self._timeline.after(0.001, self._serve)
        else:
            serve(self)

    patch.setattr(PublisherProcess, "_serve", serve_when_idle)


def a_truncated_floor_is_believed(patch: pytest.MonkeyPatch) -> None:
    def believe(content: bytes | None, name: str) -> int:
        del name
        digits = re.match(rb"\d+", content or b"")
        return int(digits[0]) if digits else 0

    patch.setattr(sequence_floor, "_number_in", believe)
