"""The processor time that a benchmark's loop counts as publishing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.processes import LoopSpec, run_loop, run_steps
from benchmarks.publishers import KIT, OFF, NoPublisher
from benchmarks.workloads import SHAPES

STEPS = 5
BURST_S = 0.004
"""The processor time of a burst. The time that a loaded machine takes for it is of no account."""


@pytest.mark.processes
def test_the_cpu_of_publishing_is_that_of_its_calls_and_of_other_threads() -> None:
    spec = LoopSpec(subject=OFF, shape="256 events", steps=100, loop="holds the GIL", subscribes=False)
    off = run_loop(spec)
    cpu_of_work_s = sum(off.iteration_us) / 1e6
    assert off.calls_cpu_s < cpu_of_work_s / 10, "the loop's own work is none of it"
    assert off.threads_cpu_s < cpu_of_work_s / 10


def burn() -> None:
    end = time.thread_time() + BURST_S
    while time.thread_time() < end:
        pass


class Bursts(NoPublisher):
    """A publisher whose thread and whose ``idle()`` take one burst each."""

    def __init__(self, sender: ThreadPoolExecutor) -> None:
        super().__init__(SHAPES["256 events"])
        self.sender = sender

    def publish(self, batch: Any) -> None:
        self.sender.submit(burn).result()

    def idle(self) -> None:
        burn()


def test_the_cpu_of_publishing_counts_idle_and_the_thread_that_sends() -> None:
    spec = LoopSpec(subject=KIT, shape="256 events", steps=STEPS, loop="waits", subscribes=False)
    with ThreadPoolExecutor(1) as sender:
        counted = run_steps(Bursts(sender), spec)
    assert STEPS * BURST_S <= counted.calls_cpu_s < 2 * STEPS * BURST_S, "idle() is in it, and the thread is not"
    assert counted.threads_cpu_s >= STEPS * BURST_S
