"""ProgressLine: how far a long command is, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

_EVERY_S = 10.0
_TERMINAL_S = 0.2


@dataclass(slots=True, kw_only=True)
class ProgressLine:
    """Prints how far a command is: on a single line of a terminal, otherwise a line every ten seconds.

    Attributes:
        out: standard error, so that standard output contains only results.
        clock: monotonic seconds.
    """

    out: TextIO
    clock: Callable[[], float] = time.monotonic
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.clock() + self._interval_s

    @property
    def _interval_s(self) -> float:
        return _TERMINAL_S if self.out.isatty() else _EVERY_S

    def show(self, text: str) -> None:
        """Show the text, if the last time is long enough ago."""
        now_s = self.clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        self._write(f"\r\033[K{text}" if self.out.isatty() else f"{text}\n")

    def clear(self) -> None:
        """Clear the line for other text."""
        if self.out.isatty():
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
