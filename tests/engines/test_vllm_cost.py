"""Compare the cost of events in vLLM's step between its own publisher and the plugin's, in turns in one engine.

No test asserts a time. `make engines ENGINES=vllm TEST_ARGS='-k cost -s'` prints the figures. Wall time includes other
load of the machine. The processor time of the step's thread is the cost of the call itself.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm_in_process import Engine, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timing, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

TURNS, CALLS_PER_TURN = 6, 150


class Timed:
    """A publisher whose cost per step is timed, in microseconds: its call, and the events of removed blocks before it.

    The removals are included because ``once_per_block`` asks vLLM's pool about each of them.
    """

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher
        self.wall_us: list[float] = []
        self.thread_us: list[float] = []
        self._removals_wall_ns = self._removals_thread_ns = 0

    def publish(self, batch: Any) -> None:
        thread_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        self.publisher.publish(batch)
        wall_ns, thread_ns = time.perf_counter_ns() - wall_ns, time.thread_time_ns() - thread_ns
        self.wall_us.append((wall_ns + self._removals_wall_ns) / 1e3)
        self.thread_us.append((thread_ns + self._removals_thread_ns) / 1e3)
        self._removals_wall_ns = self._removals_thread_ns = 0

    def time_removals(self, emit: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Return the method of vLLM's pool that adds its time to the next call of ``publish``."""

        def timed(pool: Any, block_hashes: Any) -> None:
            thread_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
            emit(pool, block_hashes)
            self._removals_wall_ns += time.perf_counter_ns() - wall_ns
            self._removals_thread_ns += time.thread_time_ns() - thread_ns

        return timed

    def shutdown(self) -> None:
        self.publisher.shutdown()


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    p50, p99 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return f"p50 {p50:7.1f}  p99 {p99:7.1f}  mean {sum(ordered) / len(ordered):7.1f}"


def test_the_cost_of_publish_is_measured_for_both_publishers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = type(engine.scheduler.kv_cache_manager.block_pool)
    removal = "_emit_block_removed_events"
    patched = getattr(pool, removal)
    own = inspect.unwrap(patched)
    opened = {
        "vLLM's own": (engine.open_vllms_own, own),
        "once_per_block: false": (lambda: engine.open({"once_per_block": False}), own),
        "scheduler-components": (engine.open, patched),
    }
    assert patched is not own
    turns: dict[str, list[Timed]] = {name: [] for name in opened}
    asked = prompts(seed=21)
    for _ in range(TURNS):
        for name, (open_one, emit) in opened.items():
            timed = Timed(open_one())
            engine.publish_by(timed)
            monkeypatch.setattr(pool, removal, timed.time_removals(emit))
            turns[name].append(timed)
            while len(timed.wall_us) < CALLS_PER_TURN:
                engine.generate([next(asked) for _ in range(4)], max_tokens=8)
            monkeypatch.setattr(pool, removal, patched)
    engine.publish_by(engine.open())
    sys.stdout.write(f"\nremovals and publish() in vLLM's step, us, {TURNS} turns of {CALLS_PER_TURN} calls each\n")
    for name, timed_turns in turns.items():
        for kind in ("wall_us", "thread_us"):
            values = [each for timed in timed_turns for each in getattr(timed, kind)[10:]]
            sys.stdout.write(f"{name:22} {kind:10} {percentiles(values)}\n")
        assert all(len(timed.wall_us) >= CALLS_PER_TURN for timed in timed_turns)
