"""When a writer prepares the broker, and when it may send. Pure: no socket, clock or thread.

To prepare the broker means to create the log and the buckets, or to check that they still have what was stored. A
writer does it after each connect. It does it again after a failure, because the broker may have lost what it had.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PAUSE_S", "BrokerPreparation"]

PAUSE_S = 0.5
"""Pause after a failure."""


@dataclass(slots=True, kw_only=True)
class BrokerPreparation:
    """Decides when one connection prepares the broker.

    Attributes:
        is_done: the broker is prepared: messages and snapshots may be sent.
    """

    is_done: bool = False
    _number: int = 0  # of the newest preparation; one that was begun before counts no longer

    def begin(self) -> int:
        """A preparation begins. Return its number."""
        self.is_done = False
        self._number += 1
        return self._number

    def is_current(self, number: int) -> bool:
        """Return False if the connection was lost, or another preparation was begun or scheduled, since ``number``."""
        return number == self._number

    def end(self, number: int) -> bool:
        """Note that preparation ``number`` has succeeded. Return whether the broker is prepared now."""
        if self.is_current(number):
            self.is_done = True
        return self.is_done

    def on_disconnected(self) -> None:
        """The connection is lost: the next one prepares the broker again."""
        self.begin()

    def on_failed(self) -> float | None:
        """The broker did not store a message or a snapshot, as after a bucket was deleted.

        Return the seconds after which to prepare it again; None if that is under way or scheduled.
        """
        if not self.is_done:
            return None
        self.begin()
        return PAUSE_S
