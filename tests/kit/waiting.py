"""Wait for a condition without a fixed sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

DEADLINE_S = 30.0
_PAUSE_S = 0.002


def wait_until(
    condition: Callable[[], object],
    *,
    poll: Callable[[], object] | None = None,
    describe: Callable[[], object] = lambda: "the condition never held",
    deadline_s: float = DEADLINE_S,
) -> None:
    """Call ``poll``, or pause, until ``condition`` holds; fail with ``describe()`` after ``deadline_s``."""
    pause = threading.Event()
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        if poll is None:
            pause.wait(_PAUSE_S)
        else:
            poll()
