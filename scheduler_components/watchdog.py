"""Watchdog: detect that a scheduler makes no progress. Pure; `thread_watchdog` runs it on a thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components._internal.old_names import old_names
from scheduler_components.values import StallReport

__all__ = ["CONTROL_PHASE", "IDLE_PHASE", "RECEIVE_PHASE", "StallDetector", "StepProgress"]

IDLE_PHASE = "idle"
"""The phase of a scheduler that waits for requests. It may last any time without being a stall."""

CONTROL_PHASE = "control"
"""The phase of a scheduler that carries out a control request, for example loads weights."""

RECEIVE_PHASE = "receive"
"""The phase of a scheduler with work that waits for its input."""


@dataclass(slots=True, kw_only=True)
class StepProgress:
    """The current step, phase and request of a scheduler.

    The scheduler's thread writes it. Other threads may read a field at any time, because each assignment is atomic.

    Attributes:
        step: number of the step, from 1; 0 before the first.
        phase: the current activity, for example ``device``.
        request: id of the request that it processes; empty for a whole batch.
        num_phase_changes: increases with each change of phase.
        num_stalls: stalls so far. Only the watchdog writes it.
    """

    step: int = 0
    phase: str = IDLE_PHASE
    request: str = ""
    num_phase_changes: int = 0
    num_stalls: int = 0

    def begin_step(self, step: int, phase: str) -> None:
        """Enter the first phase of a new step."""
        self.step = step
        self.enter_phase(phase)

    def enter_phase(self, phase: str, request: str = "") -> None:
        self.phase = phase
        self.request = request
        self.num_phase_changes += 1


@dataclass(slots=True, kw_only=True)
class StallDetector:
    """Compares the progress of a step between two polls, and reports the start and the end of each stall once.

    An idle scheduler never stalls. The time without progress starts at the first poll that saw the phase, so a late
    poll never makes a stall look longer than it is.

    Attributes:
        progress: written by the scheduler.
        rank: description of its rank.
        after_s: seconds in one phase after which it is a stall.
    """

    progress: StepProgress
    rank: str
    after_s: float
    _num_phase_changes: int = field(default=-1, init=False)
    _since_s: float = field(default=0.0, init=False)
    _open: StallReport | None = field(default=None, init=False)

    def poll(self, now_s: float) -> StallReport | None:
        """Check the progress; return a report if a stall has started or ended since the last poll.

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
        waited_s = now_s - self._since_s
        if num_phase_changes != self._num_phase_changes or phase == IDLE_PHASE:
            ended, self._open = self._open, None
            self._num_phase_changes, self._since_s = num_phase_changes, now_s
            if ended is None:
                return None
            return StallReport(ended.rank, ended.step, ended.phase, ended.request, waited_s, is_resolved=True)
        if self._open is not None or waited_s < self.after_s:
            return None
        progress.num_stalls += 1
        self._open = StallReport(self.rank, step, phase, request, waited_s)
        return self._open


__getattr__ = old_names(__name__)
