"""Measure the cost of control requests: in a step without one, and in a step that asks all ranks.

The figures are the processor time of the scheduler's thread at 64 running requests, in a replica of one rank. Other
ranks add the agreement itself, which the section ``hicache_step`` measures over groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.quiesce import QuiesceState, QuiesceStepper
from scheduler_components.values import FlushCache, PauseGeneration, PauseMode
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NAME = "quiesce"
_RUNNING = 64
_STEPS_PER_TURN = 200
_FOR_EVER_S = 1e9


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want their engines
    """Time a step without control requests, with them enabled, and with one pending; and an agreement alone."""
    return [*_steps(scale), _question(scale)]


def _steps(scale: Scale) -> Iterator[Measurement]:
    with _scheduler(scale, 2) as (scheduler, stepper):

        def on() -> None:
            stepper.step()
            scheduler.step()

        us = _us({"on": on, "off": scheduler.step}, scale, _STEPS_PER_TURN)
    what = f"a step, {_RUNNING} running, control requests enabled, none pending"
    yield Measurement(NAME, what, "us", us["on"], {"no control requests": us["off"]}, Goal(1.02, "no control requests"))
    with _scheduler(scale, 2) as (scheduler, stepper), _scheduler(scale, 2) as (other, _):
        stepper.enqueue(1, PauseGeneration(PauseMode.FINISH, _FOR_EVER_S))

        def asking() -> None:
            stepper.step()
            scheduler.step()

        us = _us({"on": asking, "off": other.step}, scale, _STEPS_PER_TURN)
    what = f"a step, {_RUNNING} running, a control request pending: one agreement"
    yield Measurement(NAME, what, "us", us["on"], {"no control requests": us["off"]})


def _question(scale: Scale) -> Measurement:
    with _scheduler(scale, 1) as (_, stepper):
        stepper.enqueue(1, FlushCache(_FOR_EVER_S))
        us = _us({"ours": stepper.step}, scale, 2_000)
    return Measurement(NAME, "one agreement: propose, reduce, apply; one rank", "us", us["ours"], {}, Goal(20.0))


@contextmanager
def _scheduler(scale: Scale, num_timed: int) -> Iterator[tuple[Scheduler, QuiesceStepper]]:
    """Make a reference scheduler with this many requests that decode throughout the measurement."""
    state = QuiesceState()
    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=16, kv_tokens=1 << 20, max_running_requests=_RUNNING, max_prefill_tokens=1 << 17),
        ParallelState.trivial(),
        SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None),
        quiesce=state,
    )
    limits = SamplingLimits(max_new_tokens=num_timed * (scale.turns + 1) * _STEPS_PER_TURN + 50, ignore_eos=True)
    for number in range(_RUNNING):
        scheduler.submit(EngineRequest(f"r{number}", range(100 * number, 100 * number + 100), limits))
    for _ in range(20):
        scheduler.step()
    yield scheduler, make_quiesce_stepper(scheduler, state, groups=ParallelGroups())
    scheduler.close()


def _us(calls: dict[str, Callable[[], object]], scale: Scale, number: int) -> dict[str, list[float]]:
    found = measure_interleaved(calls, turns=scale.turns, number=scale.of(number), clock_ns=time.thread_time_ns)
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
