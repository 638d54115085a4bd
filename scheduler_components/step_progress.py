"""Where a scheduler's step stands: written by the scheduler's thread, read by whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IDLE", "StepProgress"]

IDLE = "idle"
"""The phase of a scheduler that waits for requests: to stay in it is no stall."""


@dataclass(slots=True, kw_only=True)
class StepProgress:
    """The step, its phase, and the request at hand. Each field is stored whole, so another thread reads it at any time.

    Attributes:
        step: number of the step, from 1; 0 before the first.
        phase: what the scheduler is at, for example ``device``.
        request: id of the request at hand; empty where it is a whole batch.
        num_phase_changes: grows with each change of phase.
        num_stalls: written by the watchdog alone.
    """

    step: int = 0
    phase: str = IDLE
    request: str = ""
    num_phase_changes: int = 0
    num_stalls: int = 0

    def begin_step(self, step: int, phase: str) -> None:
        """A step begins."""
        self.step = step
        self.enter(phase)

    def enter(self, phase: str, request: str = "") -> None:
        """The scheduler goes on to something else."""
        self.phase = phase
        self.request = request
        self.num_phase_changes += 1
