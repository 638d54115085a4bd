"""The processor time that a benchmark's loop counts as publishing."""

from __future__ import annotations

from statistics import median

import pytest
from msgspec.structs import replace

from benchmarks.processes import LoopSpec, run_loop
from benchmarks.publishers import KIT, KIT_WITHOUT_IDLE, OFF

pytestmark = pytest.mark.processes


def test_the_cpu_of_publishing_is_that_of_its_calls_and_of_other_threads() -> None:
    spec = LoopSpec(subject=OFF, shape="256 events", steps=100, loop="holds the GIL", subscribes=False)
    off = run_loop(spec)
    cpu_of_work_s = sum(off.iteration_us) / 1e6
    assert off.calls_cpu_s < cpu_of_work_s / 10, "the loop's own work is none of it"
    assert off.threads_cpu_s < cpu_of_work_s / 10


def test_the_cpu_of_publishing_counts_idle_and_the_thread_that_sends() -> None:
    spec = LoopSpec(subject=KIT, shape="256 events", steps=100, loop="waits", subscribes=False)
    drains = run_loop(spec)
    in_publish_us = median(drains.publish_us) * spec.steps
    assert drains.calls_cpu_s * 1e6 > 100 * in_publish_us, "publish() defers, and idle() encodes"
    left = run_loop(replace(spec, subject=KIT_WITHOUT_IDLE))
    assert left.threads_cpu_s > drains.threads_cpu_s, "the thread encodes"
