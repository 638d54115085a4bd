"""ReopenPauses: how long a subscriber waits before it connects again. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FIRST_REOPEN_S", "LAST_REOPEN_S", "ReopenPauses"]

FIRST_REOPEN_S = 0.05
"""Pause after a connection over which batches came."""

LAST_REOPEN_S = 2.0
"""Pauses double up to this, while no batch comes."""


@dataclass(slots=True)
class ReopenPauses:
    """The pauses of one subscriber.

    Attributes:
        next_s: the next pause in seconds.
    """

    next_s: float = FIRST_REOPEN_S

    def take(self) -> float:
        """Return the next pause in seconds, and double the one after it."""
        pause_s, self.next_s = self.next_s, min(LAST_REOPEN_S, 2 * self.next_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again: a batch has come."""
        self.next_s = FIRST_REOPEN_S
