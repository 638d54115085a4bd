"""The limit is computed before the component is constructed, so no order is left to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class RequestQueues(Protocol):
    """The members of the scheduler that `Admission` uses."""

    waiting: list[tuple[str, int]]
    running: list[tuple[str, int]]


@dataclass(slots=True, kw_only=True)
class Admission:
    """Knows how many requests may run."""

    queues: RequestQueues
    max_running: int

    def admit(self) -> None:
        while self.queues.waiting and len(self.queues.running) < self.max_running:
            self.queues.running.append(self.queues.waiting.pop(0))


class Scheduler:
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.num_pages = 2
        self.max_running = min(4, self.num_pages)
        self.admission = Admission(queues=self, max_running=self.max_running)
        self.waiting: list[tuple[str, int]] = []
        self.running: list[tuple[str, int]] = []

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        self.admission.admit()
        for rid, num_tokens in self.running:
            self.send(f"{rid} +1 of {num_tokens}")
        self.running = [(rid, left - 1) for rid, left in self.running if left > 1]
