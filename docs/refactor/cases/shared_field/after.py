"""The field has one owner, and both components call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class TokenBudget:
    """Counts the tokens that no request uses."""

    def __init__(self, free_tokens: int) -> None:
        self.free_tokens = free_tokens

    def take(self, num_tokens: int) -> None:
        self.free_tokens -= num_tokens

    def give(self, num_tokens: int) -> None:
        self.free_tokens += num_tokens


class RequestQueues(Protocol):
    """The members of the scheduler that `Prefill` uses."""

    waiting: list[tuple[str, int]]
    running: list[tuple[str, int]]


@dataclass(slots=True, kw_only=True)
class Prefill:
    """Takes tokens of the budget."""

    queues: RequestQueues
    budget: TokenBudget
    send: Callable[[str], None]

    def admit(self) -> None:
        while self.queues.waiting and self.queues.waiting[0][1] <= self.budget.free_tokens:
            rid, num_tokens = self.queues.waiting.pop(0)
            self.budget.take(num_tokens)
            self.queues.running.append((rid, num_tokens))
            self.send(f"{rid} runs")


class RunningRequests(Protocol):
    """The members of the scheduler that `Decode` uses."""

    running: list[tuple[str, int]]


@dataclass(slots=True, kw_only=True)
class Decode:
    """Gives tokens back."""

    requests: RunningRequests
    budget: TokenBudget
    send: Callable[[str], None]

    def decode(self) -> None:
        for rid, num_tokens in self.requests.running[:1]:
            self.budget.give(num_tokens)
            self.requests.running.remove((rid, num_tokens))
            self.send(f"{rid} ends")


class Scheduler:
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.budget = TokenBudget(4)
        self.prefill = Prefill(queues=self, budget=self.budget, send=self.send)
        self.decoding = Decode(requests=self, budget=self.budget, send=self.send)
        self.waiting: list[tuple[str, int]] = []
        self.running: list[tuple[str, int]] = []

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        self.prefill.admit()
        self.decoding.decode()
        self.send(f"{self.budget.free_tokens} free")
