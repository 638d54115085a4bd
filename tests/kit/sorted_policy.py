"""A right scheduling policy, which variants break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from scheduler_components.testing import PolicyRequest


class Sorted:
    """Sorts all waiting requests in each order: correct, and not flat."""

    def __init__(self, match_length: Callable[[PolicyRequest], int]) -> None:
        self.match_length = match_length
        self.waiting: dict[int, PolicyRequest] = {}

    def key(self, request: PolicyRequest, step: int) -> tuple[Any, ...]:
        return ()

    def add(self, request: PolicyRequest, step: int) -> None:
        self.waiting[request.arrival] = request

    def discard(self, request: PolicyRequest) -> None:
        self.waiting.pop(request.arrival, None)

    def order(self, step: int) -> Iterator[PolicyRequest]:
        return iter(sorted(self.waiting.values(), key=lambda each: (*self.key(each, step), each.arrival)))

    def on_scheduled(self, chunks: Any) -> None:
        pass
