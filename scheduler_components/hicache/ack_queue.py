"""AckQueue: operations whose ends all ranks acknowledge in one order, however the ranks' I/O is ordered."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Generic, TypeVar

from scheduler_components.errors import CacheIntegrityError

__all__ = ["AckQueue"]

Operation = TypeVar("Operation")


class AckQueue(Generic[Operation]):
    """Operations in the order in which they began. Two numbers a rank agree on any number of them.

    ``done`` counts operations that have ended here, from the oldest on without a hole; ``good`` those that ended well.
    With the MIN of each over all ranks, the first ``good`` operations have ended well on every rank. When ``done`` is
    more, the next one has ended on every rank and, on the rank with the least ``good``, not well.
    """

    __slots__ = ("_ends", "_operations")

    def __init__(self) -> None:
        self._operations: deque[tuple[int, Operation]] = deque()
        self._ends: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._operations)

    def push(self, number: int, operation: Operation) -> None:
        """Begin an operation."""
        self._operations.append((number, operation))

    def acknowledge(self, number: int, is_good: bool) -> None:
        """An operation has ended on this rank.

        Raises:
            CacheIntegrityError: it had ended before.
        """
        if number in self._ends:
            raise CacheIntegrityError(f"operation {number} ended twice")
        self._ends[number] = is_good

    def done(self) -> int:
        """Operations that have ended here, from the oldest on."""
        return sum(1 for _ in takewhile(lambda entry: entry[0] in self._ends, self._operations))

    def good(self) -> int:
        """Operations that have ended well here, from the oldest on."""
        return sum(1 for _ in takewhile(lambda entry: self._ends.get(entry[0], False), self._operations))

    def pop(self, done: int, good: int) -> list[tuple[int, Operation, bool]]:
        """Take out what all ranks agree has ended: number, operation, and whether it ended well everywhere.

        Args:
            done: MIN over all ranks of ``done()``.
            good: MIN over all ranks of ``good()``.
        """
        settled = [(*self._pop(), True) for _ in range(good)]
        if done > good:
            settled.append((*self._pop(), False))
        return settled

    def _pop(self) -> tuple[int, Operation]:
        number, operation = self._operations.popleft()
        self._ends.pop(number, None)
        return number, operation
