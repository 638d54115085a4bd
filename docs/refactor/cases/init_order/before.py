"""Mixins whose initialisation depends on its order."""

from __future__ import annotations

from collections.abc import Callable


class LimitMixin:
    """Knows how many requests may run."""

    def init_limit(self: Scheduler) -> None:
        self.max_running = 4

    def admit(self: Scheduler) -> None:
        while self.waiting and len(self.running) < self.max_running:
            self.running.append(self.waiting.pop(0))


class PoolMixin:
    """Knows how much memory there is, and lowers the limit to it."""

    def init_pool(self: Scheduler) -> None:
        self.num_pages = 2
        self.max_running = min(self.max_running, self.num_pages)


class Scheduler(LimitMixin, PoolMixin):
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.waiting: list[tuple[str, int]] = []
        self.running: list[tuple[str, int]] = []
        self.init_limit()
        self.init_pool()

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        self.admit()
        for rid, num_tokens in self.running:
            self.send(f"{rid} +1 of {num_tokens}")
        self.running = [(rid, left - 1) for rid, left in self.running if left > 1]
