"""A waiting thread gets the fair lock."""

from __future__ import annotations

import threading

import pytest

from observability.kv_stream.thread_fair_rlock import FairRLock

pytestmark = pytest.mark.sockets


def test_a_waiting_thread_gets_the_lock_and_returns_it() -> None:
    lock = FairRLock()
    order: list[str] = []

    def query() -> None:
        with lock:
            order.append("queried")

    for _ in range(50):
        with lock:
            thread = threading.Thread(target=query)
            thread.start()
            while not lock._turn.locked():
                thread.join(0.0001)
            order.append("before")
            with lock:  # as a listener does
                pass
            lock.yield_to_waiters()
            order.append("after")
            lock.yield_to_waiters()
        thread.join()
    assert order == ["before", "queried", "after"] * 50
