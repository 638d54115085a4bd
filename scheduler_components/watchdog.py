"""When a step makes no progress: the rule by which a watchdog tells it, pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.step_progress import IDLE, StepProgress
from scheduler_components.values import StallReport

__all__ = ["StallDetector"]


@dataclass(slots=True, kw_only=True)
class StallDetector:
    """Compares what it sees of a step's progress between two looks. A stall is told once, and so is its end.

    An idle scheduler is never stuck. Time without progress counts from the first look that saw the phase, so a look
    that comes late makes no stall longer than it was.

    Attributes:
        progress: the scheduler's.
        rank: whose it is, in words.
        after_s: time in one phase from which on it is a stall.
    """

    progress: StepProgress
    rank: str
    after_s: float
    _num_moves: int = field(default=-1, init=False)
    _since_s: float = field(default=0.0, init=False)
    _told: StallReport | None = field(default=None, init=False)

    def poll(self, now_s: float) -> StallReport | None:
        """Look at the progress; returns a report when a stall has begun or has ended, None otherwise.

        Args:
            now_s: monotonic seconds.
        """
        progress = self.progress
        num_phase_changes, step, phase, request = (
            progress.num_phase_changes,
            progress.step,
            progress.phase,
            progress.request,
        )
        if num_phase_changes != self._num_moves or phase == IDLE:
            told, self._told = self._told, None
            waited_s = now_s - self._since_s
            self._num_moves, self._since_s = num_phase_changes, now_s
            if told is None:
                return None
            return StallReport(told.rank, told.step, told.phase, told.request, waited_s, is_resolved=True)
        waited_s = now_s - self._since_s
        if self._told is not None or waited_s < self.after_s:
            return None
        progress.num_stalls += 1
        self._told = StallReport(self.rank, step, phase, request, waited_s)
        return self._told
