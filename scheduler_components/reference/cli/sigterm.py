"""End a command on SIGTERM as on Ctrl-C."""

from __future__ import annotations

import asyncio
import signal

__all__ = ["cancel_on_sigterm"]


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the current task, as Ctrl-C does through ``asyncio.run``."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
