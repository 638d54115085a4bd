"""Page stores that wait, or that answer what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

from scheduler_components.hicache import MemoryPageStore
from scheduler_components.ports import PageBytes

PATIENCE_S = 60.0


class GatedPageStore(MemoryPageStore):
    """A memory store whose named operations wait until the test opens the gate. A closed store keeps its pages.

    Attributes:
        entered: set when the first gated operation begins.
        gate: the test sets it to let gated operations continue.
        closed: set when the store was closed.
        queries: the keys of each ``batch_exists``.
    """

    def __init__(self, *gated: str) -> None:
        super().__init__(1 << 20)
        self._gated = frozenset(gated)
        self.entered, self.gate, self.closed = Event(), Event(), Event()
        self.queries: list[Sequence[str]] = []

    def _enter(self, operation: str) -> None:
        if operation in self._gated:
            self.entered.set()
            assert self.gate.wait(PATIENCE_S)

    def batch_exists(self, keys: Sequence[str]) -> int:
        self.queries.append(keys)
        self._enter("batch_exists")
        return super().batch_exists(keys)

    def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
        self._enter("batch_get")
        return super().batch_get(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        self._enter("batch_get_into")
        return super().batch_get_into(keys, pages)

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        self._enter("batch_set")
        return super().batch_set(keys, pages)

    def close(self) -> None:
        self._enter("close")
        self.closed.set()


class FixedAnswerStore:
    """Answers every operation with one object, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _say(self, *_: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    batch_exists = batch_get = batch_set = delete = close = _say
