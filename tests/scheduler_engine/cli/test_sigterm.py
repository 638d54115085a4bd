"""SIGTERM cancels the task of a command; where the task defers it, the second one does."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from scheduler_engine.cli.sigterm import cancel_on_sigterm


def test_sigterm_cancels_the_current_task() -> None:
    async def wait() -> None:
        cancel_on_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wait())


def test_a_deferred_sigterm_is_a_request_and_the_second_one_cancels() -> None:
    was_requested = False

    async def wait() -> None:
        nonlocal was_requested
        termination = cancel_on_sigterm()
        with termination.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(termination.requested.wait(), 10)
            was_requested = True
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wait())
    assert was_requested


def test_a_sigterm_after_the_deferral_cancels() -> None:
    async def wait() -> None:
        termination = cancel_on_sigterm()
        with termination.deferred():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wait())
