"""AnswerMemory: bounds the memory of all answers that a proxy holds until they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from scheduler_components import ComponentError

_FREE_BYTES = 64 * 2**10


class AnswerMemoryError(ComponentError):
    """The answers of other requests fill the memory."""


@dataclass(slots=True, kw_only=True)
class AnswerMemory:
    """Counts the bytes of all answers in memory.

    Attributes:
        max_bytes: limit of all together. The first 64 KiB of each do not count, so that small answers pass while large
            ones fill the memory.
        held_bytes: those that count now.
    """

    max_bytes: int
    held_bytes: int = field(default=0, init=False)

    @contextmanager
    def open(self) -> Iterator[HeldAnswer]:
        """Count the bytes of one answer until the block is left."""
        held = HeldAnswer(memory=self)
        try:
            yield held
        finally:
            held.resize(0)


@dataclass(slots=True, kw_only=True)
class HeldAnswer:
    """The bytes of one answer, or of the part of a stream, that is in memory."""

    memory: AnswerMemory
    _counted_bytes: int = field(default=0, init=False)

    def resize(self, num_bytes: int) -> None:
        """Note how many bytes are held now.

        Raises:
            AnswerMemoryError: they are more than before, and too many with those of the other answers.
        """
        counted = max(0, num_bytes - _FREE_BYTES)
        added = counted - self._counted_bytes
        if added > 0 and self.memory.held_bytes + added > self.memory.max_bytes:
            raise AnswerMemoryError("the answers of other requests fill the memory; try again later")
        self.memory.held_bytes += added
        self._counted_bytes = counted
