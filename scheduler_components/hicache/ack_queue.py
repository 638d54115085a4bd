"""AckQueue: settle operations in the order in which they began, although they end in another order on each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Generic, TypeVar

from scheduler_components.errors import CacheIntegrityError

__all__ = ["AckQueue"]

Operation = TypeVar("Operation")


class AckQueue(Generic[Operation]):
    """The operations under way, oldest first. Two numbers per rank suffice to agree on any number of operations.

    ``num_done`` counts the operations that have ended on this rank, from the oldest on without a gap; ``num_ok`` counts
    those that have succeeded, from the oldest on without a gap. With the MIN of each number over all ranks, the first
    ``num_ok`` operations have succeeded on every rank. If ``num_done`` is larger, the next operation has ended on every
    rank and failed on at least one.

    Both numbers are kept up to date, so the cost of a step depends on the operations that ended in it and not on those
    under way.
    """

    __slots__ = ("_num_done", "_num_ok", "_operations", "_pending", "_results")

    def __init__(self) -> None:
        self._operations: deque[tuple[int, Operation]] = deque()
        self._pending: deque[int] = deque()  # from the oldest operation that has not ended on
        self._results: dict[int, bool | None] = {}  # by operation; None until it has ended on this rank
        self._num_done = 0
        self._num_ok = 0

    def __len__(self) -> int:
        return len(self._operations)

    def __iter__(self) -> Iterator[tuple[int, Operation]]:
        """Yield the number and the content of each operation, oldest first."""
        return iter(self._operations)

    def __contains__(self, number: int) -> bool:
        """Return whether the operation has not been popped yet."""
        return number in self._results

    def push(self, number: int, operation: Operation) -> None:
        self._operations.append((number, operation))
        self._pending.append(number)
        self._results[number] = None

    def acknowledge(self, number: int, is_ok: bool) -> None:
        """Record the end of an operation on this rank.

        Raises:
            CacheIntegrityError: the operation has ended before, or is not under way.
        """
        if number not in self._results:
            raise CacheIntegrityError(f"operation {number} ended, but is not under way")
        if self._results[number] is not None:
            raise CacheIntegrityError(f"operation {number} ended twice")
        self._results[number] = is_ok
        while self._pending and (result := self._results[self._pending[0]]) is not None:
            self._pending.popleft()
            self._num_ok += result and self._num_ok == self._num_done
            self._num_done += 1

    def num_done(self) -> int:
        """Return how many operations have ended on this rank, from the oldest on."""
        return self._num_done

    def num_ok(self) -> int:
        """Return how many operations have succeeded on this rank, from the oldest on."""
        return self._num_ok

    def pop(self, num_done: int, num_ok: int) -> list[tuple[int, Operation, bool]]:
        """Remove the operations that have ended on all ranks; return (number, operation, succeeded on all ranks).

        Args:
            num_done: MIN of ``num_done()`` over all ranks.
            num_ok: MIN of ``num_ok()`` over all ranks.
        """
        if not num_done:
            return []
        settled = [(*self._pop(), True) for _ in range(num_ok)]
        if num_done > num_ok:
            settled.append((*self._pop(), False))
        return settled

    def _pop(self) -> tuple[int, Operation]:
        number, operation = self._operations.popleft()
        self._num_done -= 1
        if self._results.pop(number):
            self._num_ok -= 1
        else:  # the successful operations behind it count from now on; each operation is counted here once
            ended = islice(self._operations, self._num_done)
            self._num_ok = sum(1 for _ in takewhile(lambda entry: self._results[entry[0]], ended))
        return number, operation
