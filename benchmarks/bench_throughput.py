"""Measure the throughput of publishing prepared batches to one subscriber."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.processes import LoopResult, LoopSpec, run_loop
from benchmarks.publishers import KIT, KIT_WITHOUT_IDLE, LIMIT
from benchmarks.workloads import SHAPES

NAME = "throughput"
_CASES = {"1 block": (30_000, 3.5), "64 events": (4_000, 1.5), "8,192 tokens": (2_000, 1.2)}


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Measure delivered batches per second per shape, and the publisher's CPU for small ones."""
    rows = []
    for shape, (steps, goal) in _CASES.items():
        runs: dict[str, list[LoopResult]] = {subject: [] for subject in (KIT_WITHOUT_IDLE, LIMIT, *peers)}
        for _ in range(scale.turns):
            for subject in runs:
                spec = LoopSpec(subject=subject, shape=shape, steps=scale.of(steps), loop="holds the GIL", works=False)
                runs[subject].append(run_loop(spec))
        runs[KIT] = runs.pop(KIT_WITHOUT_IDLE)
        rates = {name: [_rate(each) for each in found] for name, found in runs.items()}
        ours = rates.pop(KIT)
        rows.append(Measurement(NAME, f"delivered, {shape}", "batches/s", ours, rates, Goal(goal, "SGLang", True)))
        per_event = {name: [_cpu_s(each, shape) for each in found] for name, found in runs.items()}
        ours = per_event.pop(KIT)
        bound = Goal(0.2, "SGLang") if shape == "1 block" else None
        rows.append(Measurement(NAME, f"CPU per million events, {shape}", "s", ours, per_event, bound))
    return rows


def _rate(run: LoopResult) -> float:
    assert run.deliveries is not None
    return len(run.deliveries.times_s) / (run.deliveries.times_s[-1] - run.begun_s)


def _cpu_s(run: LoopResult, shape: str) -> float:
    assert run.deliveries is not None
    return run.cpu_to_delivery_s / (len(run.deliveries.times_s) * SHAPES[shape].num_events) * 1e6
