"""End a command on SIGTERM: as on Ctrl-C, or after the work in flight."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Termination:
    """What a signal to end does: it cancels a task, but within ``deferred`` the first one only sets ``requested``.

    Attributes:
        task: the task to cancel.
        requested: set by a signal within ``deferred``.
    """

    task: asyncio.Task[object]
    requested: asyncio.Event = field(default_factory=asyncio.Event)
    _is_deferred: bool = field(default=False, init=False)

    def on_signal(self) -> None:
        """Handle a signal. The second one always cancels."""
        if self._is_deferred and not self.requested.is_set():
            self.requested.set()
        else:
            self.task.cancel()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block end by itself after the first signal. It waits for ``requested``."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False


def cancel_on_sigterm() -> Termination:
    """Let SIGTERM cancel the current task, as Ctrl-C does through ``asyncio.run``, unless the result defers it."""
    task = asyncio.current_task()
    assert task is not None
    termination = Termination(task=task)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, termination.on_signal)
    return termination
