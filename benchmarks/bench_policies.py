"""Measure ``next_batch()`` by scheduling policy and number of waiting requests, next to SGLang and vLLM.

64 requests run. Each step admits some, as many finish, and as many others arrive (``policy_workload``). The figures are
the processor time of the calling thread.

- ``next_batch()`` makes the chunks and pages of all running requests, orders the waiting ones and admits some. It is
  compared with vLLM's ``schedule()``, which does the same (``BENCH_VLLM_PYTHON`` names a Python with vLLM).
- *Order and admission* is ``next_batch()`` without the part that continues running requests. It is compared with
  SGLang's ``calc_priority`` and its loop over ``PrefillAdder`` (``BENCH_SGLANG_PYTHON``).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.policy_workload import (
    KV_TOKENS,
    NUM_RUNNING,
    OUTPUT_TOKENS,
    PAGE_SIZE,
    PREFILL_TOKENS,
    cached_families,
    prompt,
)
from scheduler_components import ParallelState
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.scheduling.scheduling_policy import POLICY_NAMES, make_policy
from scheduler_components.values import RequestHints
from scheduler_components.waiting.lora_queue import LoraLimits, LoraQueue
from scheduler_components.waiting.thread_adapter_loader import open_thread_adapter_loader
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NAME = "policies"
NUM_WAITING = (0, 128, 10_000)
_OF_SGLANG = ("fcfs", "priority", "lpm", "dfs-weight", "shortest-prefill-first", "hrrn")
_OF_VLLM = ("fcfs", "priority")
_CALLS, _PEER_CALLS = 200, 40
_NUM_ADAPTERS = 12
_FLAT = 1.25  # within noise
_ROOT = Path(__file__).parents[1]


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # these peers run in processes
    """Measure each policy with 0, 128 and 10,000 waiting requests, in turns with the peers."""
    rows = []
    with (
        _peer("BENCH_SGLANG_PYTHON", "benchmarks.sglang_policy_process") as sglang,
        _peer("BENCH_VLLM_PYTHON", "benchmarks.vllm_policy_process") as vllm,
    ):
        for policy in POLICY_NAMES:
            rows += _rows(policy, scale, sglang, vllm)
    return rows


def _rows(policy: str, scale: Scale, sglang: Peer, vllm: Peer) -> Iterator[Measurement]:
    steady = {num_waiting: SteadyScheduler(policy, num_waiting) for num_waiting in NUM_WAITING}
    batch_us: dict[int, list[float]] = {num_waiting: [] for num_waiting in NUM_WAITING}
    admission_us: dict[int, list[float]] = {num_waiting: [] for num_waiting in NUM_WAITING}
    sglang_us: dict[int, list[float]] = {}
    vllm_us: dict[int, list[float]] = {}
    for _ in range(scale.turns):
        for num_waiting, scheduler in steady.items():
            batch, admission = scheduler.costs_us(scale.of(_CALLS))
            batch_us[num_waiting].append(batch)
            admission_us[num_waiting].append(admission)
            num_calls = scale.of(_PEER_CALLS if num_waiting <= 128 else _PEER_CALLS // 10)
            # Without waiting requests SGLang returns before it looks at a policy.
            for peer, is_its, found in (
                (sglang, policy in _OF_SGLANG and num_waiting > 0, sglang_us),
                (vllm, policy in _OF_VLLM, vllm_us),
            ):
                if is_its and (theirs := peer.us_per_call(policy, num_waiting, num_calls)) is not None:
                    found.setdefault(num_waiting, []).append(theirs)
    for scheduler in steady.values():
        scheduler.close()
    for num_waiting in NUM_WAITING:
        what = f"{policy}, {num_waiting:,} waiting"
        for name, ours, peer_name, found in (
            ("next_batch()", batch_us, "vLLM", vllm_us),
            ("order and admission", admission_us, "SGLang", sglang_us),
        ):
            beside = {peer_name: found[num_waiting]} if num_waiting in found else {}
            goal = Goal(0.5, peer_name) if beside else None
            if num_waiting > 128:
                beside["128 waiting"] = ours[128]
                goal = Goal(_FLAT, "128 waiting")
            yield Measurement(NAME, f"{name}, {what}", "us", ours[num_waiting], beside, goal)


def _adapter_name(number: int) -> str:
    return f"adapter {number}"


class SteadyScheduler:
    """The reference scheduler with 64 running requests and a constant number of waiting ones.

    Args:
        policy: name of the scheduling policy.
        num_waiting: requests that wait.
    """

    def __init__(self, policy: str, num_waiting: int) -> None:
        device = SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None)
        limits = LoraLimits(max_loaded=_NUM_ADAPTERS, max_registered=_NUM_ADAPTERS)
        self._loader = open_thread_adapter_loader(device.adapters)
        self._scheduler = Scheduler.compose(
            SchedulerConfig(
                page_size=PAGE_SIZE,
                kv_tokens=KV_TOKENS,
                max_running_requests=NUM_RUNNING,
                max_prefill_tokens=PREFILL_TOKENS,
                chunk_tokens=PREFILL_TOKENS,
            ),
            ParallelState.trivial(),
            device,
            sinks=SchedulerSinks(),
            lora=LoraQueue(limits=limits, loader=self._loader),
        )
        # For other policies adapters would only split the cache.
        self._num_adapters = _NUM_ADAPTERS if policy == "lora-grouping" else 0
        for number in range(self._num_adapters):
            self._scheduler.lora.register(_adapter_name(number), "no file", request_id=number)
        while self._scheduler.lora.has_pending_loads:
            self._scheduler.step()
        batcher = self._scheduler.batcher
        batcher.policy = make_policy(policy, match_length=batcher.kv_cache.match_length)
        self._count = 0
        for tokens in cached_families():
            self._submit([*tokens, 1], 1)
        while self._scheduler.has_work:
            self._step()
        self._num_requests = NUM_RUNNING + num_waiting
        for number in range(OUTPUT_TOKENS + NUM_RUNNING):  # until 64 requests of different ages run
            self._fill(min(self._num_requests, NUM_RUNNING * (number + 1) // OUTPUT_TOKENS))
            self._step()

    def costs_us(self, num_steps: int) -> tuple[float, float]:
        """Return the microseconds of processor time of one ``next_batch()``, and without its running requests."""
        batch_ns = running_ns = 0
        batcher, queues = self._scheduler.batcher, self._scheduler.queues
        for _ in range(num_steps):
            self._fill(self._num_requests)
            batcher._continue_running([], queues.running)  # allocates their pages
            started_ns = time.thread_time_ns()
            batcher._continue_running([], queues.running)
            running_ns += time.thread_time_ns() - started_ns
            batch_ns += self._step()
        return batch_ns / 1e3 / num_steps, (batch_ns - running_ns) / 1e3 / num_steps

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return len(self._scheduler.queues.running)

    def close(self) -> None:
        """Close the scheduler."""
        self._scheduler.close()
        self._loader.close()

    def _step(self) -> int:
        """Take a step as ``Scheduler.step`` does, without its reports. Return the nanoseconds of ``next_batch()``."""
        started_ns = time.thread_time_ns()
        batch = self._scheduler.batcher.next_batch()
        spent_ns = time.thread_time_ns() - started_ns
        self._scheduler._compute(batch)
        self._scheduler.queues.on_aborts_streamed()
        return spent_ns

    def _fill(self, num_requests: int) -> None:
        while len(self._scheduler.queues) < num_requests:
            self._submit(prompt(self._count), OUTPUT_TOKENS)

    def _submit(self, tokens: Sequence[int], num_output_tokens: int) -> None:
        number = self._count
        self._count += 1
        hints = RequestHints(
            priority=number % 5,
            tenant=f"tenant {number % 16}",
            deadline_s=float(number * 7 % 1_000),
            lora=_adapter_name(number % self._num_adapters) if self._num_adapters else None,
        )
        limits = SamplingLimits(max_new_tokens=num_output_tokens, ignore_eos=True)
        self._scheduler.submit(EngineRequest(f"r{number}", tokens, limits, hints=hints))


class Peer(Protocol):
    """Another engine's scheduler."""

    def us_per_call(self, policy: str, num_waiting: int, num_calls: int) -> float | None:
        """Return the microseconds of processor time per call; None if it was not measured."""
        ...


class _Absent:
    def us_per_call(self, policy: str, num_waiting: int, num_calls: int) -> float | None:
        return None


class _Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def us_per_call(self, policy: str, num_waiting: int, num_calls: int) -> float | None:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        print(policy, num_waiting, num_calls, file=requests, flush=True)
        answer = next((line for line in answers if line.startswith("answer ")), None)  # libraries print, too
        if answer is None:
            raise RuntimeError(f"the peer ended while it measured {policy} with {num_waiting} waiting requests")
        return float(answer.split()[1])


@contextmanager
def _peer(variable: str, module: str) -> Iterator[Peer]:
    python = os.environ.get(variable)
    if not python:
        yield _Absent()
        return
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(
        [python, "-W", "ignore", "-m", module],
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _Process(process)
    finally:
        process.kill()
        process.wait()
