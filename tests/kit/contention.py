"""Threads that contend for one lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

NUM_THREADS, NUM_TURNS = 4, 200


def count_most_holders(acquire: Callable[[], Callable[[], object] | None]) -> int:
    """Let threads take a lock in turn and return the largest number of them that held it together.

    Args:
        acquire: takes the lock and returns the function that releases it, or returns None while it is taken.
    """
    num_holders, most = 0, 0
    counting = threading.Lock()

    def take_often() -> None:
        nonlocal num_holders, most
        num_taken = 0
        while num_taken < NUM_TURNS:
            release = acquire()
            if release is None:
                os.sched_yield()
                continue
            with counting:
                num_holders += 1
                most = max(most, num_holders)
            num_taken += 1
            with counting:
                num_holders -= 1
            release()

    threads = [threading.Thread(target=take_often) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return most
