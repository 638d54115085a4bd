"""Progress: one line of a terminal, or a line every ten seconds."""

from __future__ import annotations

import io

import pytest

from scheduler_engine.cli.progress_line import ProgressLine


@pytest.mark.parametrize(("is_terminal", "written"), [(False, "c\n"), (True, "\r\033[Kb\r\033[Kc\r\033[K")])
def test_it_is_shown_now_and_then(is_terminal: bool, written: str) -> None:
    out = io.StringIO()
    out.isatty = lambda: is_terminal  # type: ignore[method-assign]
    times = iter((0.0, 0.1, 5.0, 10.0))
    line = ProgressLine(out=out, clock=lambda: next(times))
    for text in "abc":
        line.show(text)
    line.clear()
    assert out.getvalue() == written
