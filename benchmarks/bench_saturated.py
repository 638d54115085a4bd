"""A scheduler's loop that never lets go of the GIL: how late batches arrive, and how far the publisher falls behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measure import Goal, Measurement, Scale, percentile
from benchmarks.processes import LoopResult, LoopSpec, run_loop
from benchmarks.subjects import KIT, LIMIT, OFF

NAME = "saturated"
_STEPS = 15_000
_SHAPE = "1 block"


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Run the loop with publishing off, the kit, its peers and the limit, in turns."""
    subjects = [OFF, KIT, LIMIT, *peers]
    runs: dict[str, list[LoopResult]] = {subject: [] for subject in subjects}
    for _ in range(scale.turns):
        for subject in subjects:
            spec = LoopSpec(
                subject=subject, shape=_SHAPE, steps=scale.of(_STEPS), loop="never lets go", subscribes=subject != OFF
            )
            runs[subject].append(run_loop(spec))

    def row(what: str, unit: str, goal: Goal | None, read: Callable[[LoopResult], float]) -> Measurement:
        has_off = what.startswith("loop")
        values = {name: [read(each) for each in runs[name]] for name in subjects if name != OFF or has_off}
        ours = values.pop(KIT)
        return Measurement(NAME, f"{what}, {scale.of(_STEPS):,} steps", unit, ours, values, goal)

    return [
        row("delivery p50", "ms", None, lambda each: _delay_ms(each, 50)),
        row("delivery p99", "ms", Goal(2.0), lambda each: _delay_ms(each, 99)),
        row("undelivered at the end", "", Goal(8.0), lambda each: each.undelivered_at_end),
        row("publish() p50", "us", None, lambda each: percentile(each.publish_us, 50)),
        row("loop iteration p50", "us", None, lambda each: percentile(each.iteration_us, 50)),
        row("loop iteration max", "us", Goal(0.05, "SGLang"), lambda each: max(each.iteration_us)),
    ]


def _delay_ms(run: LoopResult, percent: float) -> float:
    return percentile(run.deliveries.delays_s, percent) * 1e3 if run.deliveries else float("nan")
