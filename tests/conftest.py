"""What every test may ask for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest


@pytest.fixture
def free_ports() -> Callable[[int], int]:
    """Find a block of ports that are free on loopback now; returns the lowest."""

    def find(count: int) -> int:
        for _ in range(100):
            held: list[socket.socket] = []
            try:
                first = socket.socket()
                held.append(first)
                first.bind(("127.0.0.1", 0))
                base: int = first.getsockname()[1]
                for port in range(base + 1, base + count):
                    held.append(socket.socket())
                    held[-1].bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            else:
                return base
            finally:
                for each in held:
                    each.close()
        raise AssertionError(f"no {count} free ports in a row")

    return find


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds; fails after ten seconds."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, "the condition never held"
            pause.wait(0.002)

    return wait
