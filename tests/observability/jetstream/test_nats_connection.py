"""The thread of a connection ends although a cancellation was swallowed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from kit.jetstream import config_of

from observability.jetstream import (
    nats_connection,
)

pytestmark = [pytest.mark.sockets, pytest.mark.processes, pytest.mark.faults]


class DeafOnce:
    """Swallows the first cancellation, as a library may while it waits for a reply."""

    def __init__(self) -> None:
        self.is_running = threading.Event()

    async def run(self, client: Any) -> None:
        self.is_running.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    def on_disconnected(self) -> None:
        """Nothing."""

    def on_reconnected(self) -> None:
        """Nothing."""


def test_a_thread_ends_although_a_cancellation_was_swallowed(nats_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: closing a reader hung."""
    monkeypatch.setattr(nats_connection, "_CANCEL_AGAIN_S", 0.05)
    user = DeafOnce()
    thread = nats_connection.NatsThread(config_of(nats_server), user, name="deaf")
    thread.start()
    assert user.is_running.wait(30.0)
    thread.stop()
