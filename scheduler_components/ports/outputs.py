"""OutputSink: the path of output messages to the process that turns tokens into text."""

from __future__ import annotations

from typing import Protocol

from scheduler_components.values import OutputBatch

__all__ = ["NullOutputSink", "OutputSink"]


class OutputSink(Protocol):
    """The engine's own socket or queue to the detokenizer. Called by `OutputStreamer`. No method blocks."""

    def is_ready(self) -> bool:
        """Return whether the receiver accepts a message now. `OutputStreamer` asks before it builds one."""
        ...

    def send(self, batch: OutputBatch) -> bool:
        """Send one whole message; return False if the receiver did not accept it."""
        ...

    def close(self) -> None:
        """Release the sockets. Safe to call twice."""
        ...


class NullOutputSink:
    """Drop all outputs, on a rank that streams none."""

    def is_ready(self) -> bool:
        return True

    def send(self, batch: OutputBatch) -> bool:
        return True

    def close(self) -> None:
        pass
