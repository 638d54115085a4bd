"""Compare the cost of a step of vLLM's scheduler, PolicyScheduler and ComponentScheduler, in turns, without a model.

No test asserts a time. `make engines ENGINES=vllm TEST_ARGS='-k scheduler_cost -s'` prints the figures: processor time
of the calling thread, median per step, in microseconds. 64 requests run and 128 wait; two requests end in each step and
two others are admitted. Prompts have 256 tokens, half of them shared.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm.v1.core.sched.scheduler import Scheduler
from vllm_schedulers import PlayedWorker, make_request, open_scheduler

from scheduler_components.engines.vllm import ComponentScheduler, PolicyScheduler

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines_only,
    pytest.mark.timing,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

RUNNING, WAITING, OUTPUT_TOKENS = 64, 128, 32
TURNS, STEPS_PER_TURN = 8, 64


class TimedWorker(PlayedWorker):
    """A worker that times the two calls of a step, and replaces the requests that end."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.schedule_us: list[float] = []
        self.update_us: list[float] = []
        self.count = 0
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.timed_schedule, self.timed_update
        for number in range(RUNNING):
            self.add(OUTPUT_TOKENS // 2 + number // 2)  # so that two of them end in each step
        while len(scheduler.running if hasattr(scheduler, "running") else scheduler.queues.running) < RUNNING:
            self.step()

    def add(self, max_tokens: int = OUTPUT_TOKENS) -> None:
        prompt = [self.count % 4] * 128 + [self.count] * 128
        self.scheduler.add_request(make_request(f"r{self.count}", prompt, max_tokens, block_size=16))
        self.count += 1

    def timed_schedule(self, *arguments: Any) -> Any:
        started_ns = time.thread_time_ns()
        output = self._schedule(*arguments)
        self.schedule_us.append((time.thread_time_ns() - started_ns) / 1e3)
        return output

    def timed_update(self, *arguments: Any) -> Any:
        started_ns = time.thread_time_ns()
        outputs = self._update(*arguments)
        self.update_us.append((time.thread_time_ns() - started_ns) / 1e3)
        return outputs

    def turn(self) -> None:
        for _ in range(STEPS_PER_TURN):
            while sum(self.scheduler.get_request_counts()) < RUNNING + WAITING:
                self.add()
            self.step()


def test_the_cost_of_a_step(tiny_llama: Path) -> None:
    cases = {
        "vLLM's Scheduler": (Scheduler, None),
        "PolicyScheduler fcfs": (PolicyScheduler, {"policy": "fcfs"}),
        "PolicyScheduler lpm": (PolicyScheduler, {"policy": "lpm"}),
        "ComponentScheduler fcfs": (ComponentScheduler, {"policy": "fcfs"}),
        "ComponentScheduler lpm": (ComponentScheduler, {"policy": "lpm"}),
    }
    sizes: dict[str, Any] = {
        "block_size": 16, "num_blocks": 4_096, "max_num_seqs": RUNNING, "max_num_batched_tokens": 8_192,
        "max_model_len": 1_024,
    }  # fmt: skip
    workers = {
        name: TimedWorker(open_scheduler(kind, tiny_llama, settings=chosen, **sizes))
        for name, (kind, chosen) in cases.items()
    }
    for turn in range(TURNS):
        for worker in workers.values():
            worker.turn()
            if turn == 0:  # until the requests end two by two
                worker.schedule_us.clear()
                worker.update_us.clear()
    [vllm, *_] = workers.values()
    for name, worker in workers.items():
        schedule, update = median(worker.schedule_us), median(worker.update_us)
        share = f"{schedule / median(vllm.schedule_us):.2f}x, {update / median(vllm.update_us):.2f}x of vLLM's"
        sys.stdout.write(f"\n{name:24} schedule() {schedule:6.0f}, update_from_output() {update:6.0f} ({share})")
        assert len(worker.schedule_us) == (TURNS - 1) * STEPS_PER_TURN
