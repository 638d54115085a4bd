"""A device that answers at once, with what it was told to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["InstantDevice"]

B = TypeVar("B")
R = TypeVar("R")


class InstantDevice(Generic[B, R]):
    """``launch`` keeps the batch, ``wait`` computes its answer; a scheduler with such a device takes no time.

    Args:
        compute: a batch's answer.

    Attributes:
        scripted: answers or errors given first, one a step, instead of computed ones.
        launched: every batch so far.
    """

    def __init__(self, compute: Callable[[B], R]) -> None:
        self._compute = compute
        self.scripted: list[R | Exception] = []
        self.launched: list[B] = []

    def launch(self, batch: B) -> None:
        """Begin a step."""
        self.launched.append(batch)

    def wait(self) -> R:
        """End it.

        Raises:
            IndexError: nothing was launched; otherwise what ``scripted`` says.
        """
        batch = self.launched[-1]
        if not self.scripted:
            return self._compute(batch)
        answer = self.scripted.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer
