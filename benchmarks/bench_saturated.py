"""Measure the delay of batches and the backlog in a scheduler loop that never releases the GIL.

The loop never waits, so it never calls ``idle()``. The replay buffer and the pool are full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measure import Goal, Measurement, Scale, percentile
from benchmarks.processes import LoopResult, LoopSpec, run_loop
from benchmarks.publishers import KIT_INLINE, KIT_WITHOUT_IDLE, LIMIT, OFF
from benchmarks.workloads import SHAPES

NAME = "saturated"
_STEPS = {"1 block": 15_000, "64 events": 4_000}
_WINDOW = 500


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Run the loop without publishing, with the kit, with its peers and at the limit, in turns."""
    return [row for shape, steps in _STEPS.items() for row in _rows(shape, scale.of(steps), scale.turns, peers)]


def _rows(shape: str, steps: int, turns: int, peers: Sequence[str]) -> list[Measurement]:
    subjects = [OFF, KIT_WITHOUT_IDLE, KIT_INLINE, LIMIT, *peers]
    runs: dict[str, list[LoopResult]] = {subject: [] for subject in subjects}
    for _ in range(turns):
        for subject in subjects:
            pool_steps = SHAPES[shape].pool_steps
            spec = LoopSpec(
                subject=subject,
                shape=shape,
                steps=steps,
                loop="holds the GIL",
                subscribes=subject != OFF,
                kept=_WINDOW + 1 + pool_steps,
                buffer_steps=_WINDOW,
                pool_steps=pool_steps,
            )
            runs[subject].append(run_loop(spec))

    def row(what: str, unit: str, goal: Goal | None, read: Callable[[LoopResult], float]) -> Measurement:
        has_off = what.startswith("loop")
        values = {name: [read(each) for each in runs[name]] for name in subjects if name != OFF or has_off}
        ours = values.pop(KIT_WITHOUT_IDLE)
        return Measurement(NAME, f"{what}, {shape}, {steps:,} steps", unit, ours, values, goal)

    return [
        row("delivery p50", "ms", None, lambda each: _delay_ms(each, 50)),
        row("delivery p99", "ms", Goal(5.0), lambda each: _delay_ms(each, 99)),
        row("undelivered at the end", "", Goal(8.0), lambda each: each.num_undelivered),
        row("publish() p50", "us", None, lambda each: percentile(each.publish_us, 50)),
        row("publish() p99", "us", None, lambda each: percentile(each.publish_us, 99)),
        row("loop iteration p50", "us", None, lambda each: percentile(each.iteration_us, 50)),
        row("loop iteration mean", "us", None, lambda each: sum(each.iteration_us) / len(each.iteration_us)),
        row("loop iteration max", "us", None, lambda each: max(each.iteration_us)),
    ]


def _delay_ms(run: LoopResult, percent: float) -> float:
    return percentile(run.deliveries.delays_s, percent) * 1e3 if run.deliveries else float("nan")
