"""Two mixins that write one field of the host."""

from __future__ import annotations

from collections.abc import Callable


class PrefillMixin:
    """Takes tokens of the budget."""

    def admit(self: Scheduler) -> None:
        while self.waiting and self.waiting[0][1] <= self.free_tokens:
            rid, num_tokens = self.waiting.pop(0)
            self.free_tokens -= num_tokens
            self.running.append((rid, num_tokens))
            self.send(f"{rid} runs")


class DecodeMixin:
    """Gives tokens back."""

    def decode(self: Scheduler) -> None:
        for rid, num_tokens in self.running[:1]:
            self.free_tokens += num_tokens
            self.running.remove((rid, num_tokens))
            self.send(f"{rid} ends")


class Scheduler(PrefillMixin, DecodeMixin):
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.free_tokens = 4
        self.waiting: list[tuple[str, int]] = []
        self.running: list[tuple[str, int]] = []

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        self.admit()
        self.decode()
        self.send(f"{self.free_tokens} free")
