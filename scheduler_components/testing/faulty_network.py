"""A network that loses, repeats and delays messages by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["Fault", "FaultyNetwork"]

T = TypeVar("T")


class Fault(Enum):
    """The fault of one message."""

    NONE = "it arrives"
    DROP = "it never arrives"
    DUPLICATE = "it arrives twice"
    DELAY = "it arrives after the next message that is not delayed"
    DROP_AND_DUPLICATE_LAST = "the message before it arrives once more, and it does not"


@dataclass
class FaultyNetwork(Generic[T]):
    """A one-way network. Message ``i`` has the fault ``plan[i]``; messages beyond the plan have none.

    ``send`` returns the messages that arrive now, ``flush`` the delayed ones. ``num_lost`` counts lost messages.
    """

    plan: Sequence[Fault] = ()
    num_carried: int = 0
    num_lost: int = 0
    _delayed: list[T] = field(default_factory=list)
    _last: list[T] = field(default_factory=list)

    def send(self, message: T) -> list[T]:
        """Send one message, and return the arriving messages in order."""
        fault = self.plan[self.num_carried] if self.num_carried < len(self.plan) else Fault.NONE
        self.num_carried += 1
        if fault is Fault.DELAY:
            self._delayed.append(message)
            return []
        if fault is Fault.DROP:
            self.num_lost += 1
            return []
        if fault is Fault.DROP_AND_DUPLICATE_LAST:
            self.num_lost += 1
            return list(self._last)
        self._last = [message]
        return [message, *([message] if fault is Fault.DUPLICATE else []), *self.flush()]

    def flush(self) -> list[T]:
        """Return the delayed messages."""
        arriving, self._delayed = self._delayed, []
        return arriving
