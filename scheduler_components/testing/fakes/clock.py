"""A clock that stands still until it is moved."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Give it where a component takes ``clock``; set or add to ``now_s`` to let time pass, backwards too."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
