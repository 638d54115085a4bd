"""The consoles of the command line: plain text, and the end of the reader as an error like any other."""

from __future__ import annotations

from rich.console import Console


class _PipeConsole(Console):
    """A console that raises ``BrokenPipeError`` when its reader is gone. Rich would end the process by itself."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  rich calls this while it handles the error


def make_console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or on standard error, that changes no text."""
    return _PipeConsole(stderr=stderr, highlight=False, emoji=False)
