"""SIGTERM cancels the task of a command."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from scheduler_components.reference.cli.sigterm import cancel_on_sigterm


def test_sigterm_cancels_the_current_task() -> None:
    async def wait() -> None:
        cancel_on_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wait())
