"""Waiting for a collective of gloo: the caller is asked often, and gloo's own answer is the one that counts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[torch]")

from scheduler_components.agreement.torch_sync import wait_for_collective

pytestmark = pytest.mark.torch


class Work:
    """A collective of gloo that ends after some waits."""

    def __init__(self, num_waits: int, error: str = "") -> None:
        self.num_waits, self.error = num_waits, error
        self.waited: list[float] = []

    def is_completed(self) -> bool:
        return self.num_waits <= 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            self.waited.append(timeout.total_seconds())
            self.num_waits -= 1
            if self.num_waits > 0 or (self.num_waits == 0 and self.error):
                raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


def wait(work: Any, calls: list[int], timeout_s: float = 60.0) -> None:
    wait_for_collective(work, timeout_s=timeout_s, on_wait=lambda: calls.append(len(calls)))


def test_the_caller_is_asked_between_two_waits() -> None:
    work, calls = Work(4), list[int]()
    wait(work, calls)
    assert (len(work.waited), len(calls)) == (4, 3)
    assert max(work.waited) <= 0.25


def test_a_collective_that_ends_quickly_asks_nothing() -> None:
    calls = list[int]()
    wait(Work(1), calls)
    assert calls == []


def test_an_error_of_gloo_is_raised_without_a_further_wait() -> None:
    work, calls = Work(2, "Connection closed by peer"), list[int]()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait(work, calls)
    assert (len(work.waited), len(calls)) == (2, 1)


def test_a_collective_that_ends_while_the_wait_times_out_has_ended() -> None:
    class Late(Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            self.waited.append(0.0)
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            return True

    wait(Late(0), [])


def test_the_time_limit_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        wait(Work(1_000), [], timeout_s=0.0)


def test_what_the_caller_raises_ends_the_wait() -> None:
    def stop() -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        wait_for_collective(Work(1_000), timeout_s=60.0, on_wait=stop)  # type: ignore[arg-type]
