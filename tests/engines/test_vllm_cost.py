"""Compare the cost of `publish()` in vLLM's step between its own publisher and the plugin's, in turns in one engine.

No test asserts a time. `make engines ENGINES=vllm TEST_ARGS='-k cost -s'` prints the figures. Wall time includes other
load of the machine. The processor time of the step's thread is the cost of the call itself.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm_in_process import Engine, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timing, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

TURNS, CALLS_PER_TURN = 6, 150


class Timed:
    """A publisher whose calls are timed, in microseconds."""

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher
        self.wall_us: list[float] = []
        self.thread_us: list[float] = []

    def publish(self, batch: Any) -> None:
        thread_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        self.publisher.publish(batch)
        wall_ns, thread_ns = time.perf_counter_ns() - wall_ns, time.thread_time_ns() - thread_ns
        self.wall_us.append(wall_ns / 1e3)
        self.thread_us.append(thread_ns / 1e3)

    def shutdown(self) -> None:
        self.publisher.shutdown()


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    p50, p99 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return f"p50 {p50:7.1f}  p99 {p99:7.1f}  mean {sum(ordered) / len(ordered):7.1f}"


def test_the_cost_of_publish_is_measured_for_both_publishers(engine: Engine) -> None:
    opened = {"vLLM's own": engine.open_vllms_own, "scheduler-components": engine.open}
    turns: dict[str, list[Timed]] = {name: [] for name in opened}
    asked = prompts(seed=21)
    for _ in range(TURNS):
        for name, open_one in opened.items():
            timed = Timed(open_one())
            engine.publish_by(timed)
            turns[name].append(timed)
            while len(timed.wall_us) < CALLS_PER_TURN:
                engine.generate([next(asked) for _ in range(4)], max_tokens=8)
    engine.publish_by(engine.open())
    sys.stdout.write(f"\npublish() in vLLM's step, us, {TURNS} turns of {CALLS_PER_TURN} calls each\n")
    for name, timed_turns in turns.items():
        for kind in ("wall_us", "thread_us"):
            values = [each for timed in timed_turns for each in getattr(timed, kind)[10:]]
            sys.stdout.write(f"{name:22} {kind:10} {percentiles(values)}\n")
        assert all(len(timed.wall_us) >= CALLS_PER_TURN for timed in timed_turns)
