"""Measure the cost of a decision log: per note, per step of a scheduler with it and without, and after a difference.

The figures are the processor time of the scheduler's thread. With and without are two schedulers with 64 running
requests that decode, stepped in turns, step by step; the row of their difference is what the log costs. It compares the
fastest tenth of the steps, because other processes only add time. The agreement that carries the digest belongs to the
step with and without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved, percentile
from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups, Proposal
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.ports import NullDecisionLog
from scheduler_components.testing.in_process_groups import InProcessGroups, agree_on_decisions
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NAME = "decision_log"
_RUNNING = 64
_STEPS_PER_TURN = 200
_NOTES_PER_CALL = 100
_RANKS = 8


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want their engines
    """Time a note, an agreement, a step with the log and without it, and the report on a difference."""
    return [_note(scale), _agreement(scale), *_steps(scale), _report(scale)]


def _note(scale: Scale) -> Measurement:
    log = DecisionLog()

    def notes() -> None:
        note = log.note
        for _ in range(_NOTES_PER_CALL):
            note("evict", 1234, 4)

    us = _us({"ours": notes}, scale, 2_000)["ours"]
    what = "one note of two values, with its share of encoding and digest"
    return Measurement(NAME, what, "us", [each / _NOTES_PER_CALL for each in us], {}, Goal(0.3))


def _agreement(scale: Scale) -> Measurement:
    log, groups = DecisionLog(), ParallelGroups()

    def compare() -> None:
        log.note("batch", 0, 300_000, *range(_RUNNING))
        proposal = Proposal("step", step=1)
        log.fill(proposal)
        log.apply(1, groups.reduce(proposal))

    def agree() -> None:
        proposal = Proposal("step", step=1)
        proposal.min("other", 1)
        groups.reduce(proposal)

    us = _us({"on": compare, "off": agree}, scale, 2_000)
    what = f"note the batch of {_RUNNING} requests and compare it; one rank"
    return Measurement(NAME, what, "us", us["on"], {"an agreement without it": us["off"]})


def _steps(scale: Scale) -> Iterator[Measurement]:
    on, off = _scheduler(scale, DecisionLog()), _scheduler(scale, NullDecisionLog())
    us: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(scale.turns):
        steps: dict[str, list[float]] = {"on": [], "off": []}
        for _ in range(_STEPS_PER_TURN):
            for name, scheduler in (("on", on), ("off", off)):
                begun_ns = time.thread_time_ns()
                scheduler.step()
                steps[name].append((time.thread_time_ns() - begun_ns) / 1e3)
        for name, times in steps.items():
            us[name].append(percentile(times, 10))
    on.close()
    off.close()
    what = f"a step, {_RUNNING} running, with the decision log (fastest tenth)"
    yield Measurement(NAME, what, "us", us["on"], {"without it": us["off"]})
    costs = [with_log - without for with_log, without in zip(us["on"], us["off"], strict=True)]
    yield Measurement(NAME, f"what it adds to a step, {_RUNNING} running", "us", costs, {}, Goal(15.0))


def _report(scale: Scale) -> Measurement:
    logs = {rank: DecisionLog(groups=ParallelGroups(rank=rank), policy="count") for rank in range(_RANKS)}
    groups = InProcessGroups(dict.fromkeys(logs, (tuple(logs),)))

    def diverge() -> None:
        for rank, log in logs.items():
            log.note("batch", 0, 300_000, *range(_RUNNING))
            log.note("evict", rank, 4)
        agree_on_decisions(groups, logs, step=1)

    us = _us({"ours": diverge}, scale, 100)["ours"]
    what = f"after a difference: pack and compare the decisions of {_RANKS} ranks, per rank"
    return Measurement(NAME, what, "us", [each / _RANKS for each in us])


def _scheduler(scale: Scale, decisions: DecisionLog | NullDecisionLog) -> Scheduler:
    """Make a reference scheduler whose requests decode throughout the measurement."""
    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=16, kv_tokens=1 << 20, max_running_requests=_RUNNING, max_prefill_tokens=1 << 17),
        ParallelState.trivial(),
        SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None),
        decisions=decisions,
    )
    limits = SamplingLimits(max_new_tokens=(scale.turns + 1) * _STEPS_PER_TURN + 50, ignore_eos=True)
    for number in range(_RUNNING):
        scheduler.submit(EngineRequest(f"r{number}", range(100 * number, 100 * number + 100), limits))
    for _ in range(20):
        scheduler.step()
    return scheduler


def _us(calls: dict[str, Callable[[], object]], scale: Scale, number: int) -> dict[str, list[float]]:
    found = measure_interleaved(calls, turns=scale.turns, number=scale.of(number), clock_ns=time.thread_time_ns)
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
