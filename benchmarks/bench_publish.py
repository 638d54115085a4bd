"""A scheduler's loop that also waits for its device: what publishing costs it, and how soon batches arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from benchmarks.measure import Goal, Measurement, Scale, measure_in_turns, percentile
from benchmarks.processes import LoopResult, LoopSpec, run_loop
from benchmarks.subjects import KIT, KIT_WITHOUT_IDLE, LIMIT, OFF

NAME = "publish"
_CPU_GOALS = {"1 block": 0.6, "64 events": 0.65, "8,192 tokens": 0.75}
_TAIL = 8

Runs = dict[str, list[LoopResult]]


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Run every shape with publishing off, the kit, its peers and the limit, in turns."""
    rows: list[Measurement] = []
    for shape in _CPU_GOALS:
        subjects = [OFF, KIT, *([KIT_WITHOUT_IDLE] if shape == "1 block" else []), LIMIT, *peers]
        rows += _rows(shape, _run_in_turns(shape, subjects, scale), peers)
    return rows


def _run_in_turns(shape: str, subjects: Sequence[str], scale: Scale) -> Runs:
    runs: Runs = {subject: [] for subject in subjects}
    for _ in range(scale.turns):
        for subject in subjects:
            spec = LoopSpec(subject=subject, shape=shape, steps=scale.of(1_500), subscribes=subject != OFF)
            runs[subject].append(run_loop(spec))
    return runs


def _rows(shape: str, runs: Runs, peers: Sequence[str]) -> list[Measurement]:
    append = _append_us(len(runs[KIT]))
    others = [LIMIT, *peers]
    rows = []
    for percent, goal in ((50, 1.0), (99, 5.0), (100, None)):
        spans = {name: [percentile(run.publish_us, percent) for run in runs[name]] for name in runs}
        beside: dict[str, list[float]] = {LIMIT: append} | {peer: spans[peer] for peer in peers}
        bound = None if goal is None else Goal(goal)
        rows.append(Measurement(NAME, f"publish() p{percent}, {shape}", "us", spans[KIT], beside, bound))
        if KIT_WITHOUT_IDLE in spans:
            beside = {LIMIT: spans[LIMIT]} | {peer: spans[peer] for peer in peers}
            rows.append(
                Measurement(NAME, f"publish() p{percent}, {shape}, no idle()", "us", spans[KIT_WITHOUT_IDLE], beside)
            )
    rows.append(_excess(shape, runs, others))
    rows.append(_worst_iterations(shape, runs, peers))
    rows.append(_cpu(shape, runs, others))
    rows += _deliveries(shape, runs, others)
    return rows


def _append_us(turns: int) -> list[float]:
    """The least that accepting a batch can cost."""
    return [ns / 1e3 for ns in measure_in_turns({"": lambda: box.append(None)}, turns=turns, number=10_000)[""]]


box: deque[None] = deque(maxlen=100)


def _excess(shape: str, runs: Runs, others: Sequence[str]) -> Measurement:
    def excess(subject: str) -> list[float]:
        pairs = zip(runs[subject], runs[OFF], strict=True)
        return [percentile(on.iteration_us, 50) - percentile(off.iteration_us, 50) for on, off in pairs]

    beside = {name: excess(name) for name in others}
    return Measurement(NAME, f"loop excess p50, {shape}", "us", excess(KIT), beside, Goal(5.0))


def _worst_iterations(shape: str, runs: Runs, peers: Sequence[str]) -> Measurement:
    spans = {name: [percentile(run.iteration_us, 99.9) for run in runs[name]] for name in (OFF, KIT, *peers)}
    beside = {name: spans[name] for name in (OFF, *peers)}
    return Measurement(NAME, f"loop iteration p99.9, {shape}", "us", spans[KIT], beside, Goal(1.2, OFF))


def _cpu(shape: str, runs: Runs, others: Sequence[str]) -> Measurement:
    def cpu(subject: str) -> list[float]:
        pairs = zip(runs[subject], runs[OFF], strict=True)
        return [(on.cpu_s - off.cpu_s) / len(on.publish_us) * 1e6 for on, off in pairs]

    beside = {name: cpu(name) for name in others}
    goal = Goal(_CPU_GOALS[shape], "SGLang")
    return Measurement(NAME, f"process CPU a step above off, {shape}", "us", cpu(KIT), beside, goal)


def _deliveries(shape: str, runs: Runs, others: Sequence[str]) -> list[Measurement]:
    rows = []
    for percent in (50, 99):
        spans = {
            name: [percentile(run.deliveries.delays_s, percent) * 1e3 for run in runs[name] if run.deliveries]
            for name in (KIT, *others)
        }
        beside = {name: spans[name] for name in others}
        rows.append(Measurement(NAME, f"delivery p{percent}, {shape}", "ms", spans[KIT], beside))
    last = [max(run.deliveries.delays_s[-_TAIL:]) * 1e3 for run in runs[KIT] if run.deliveries]
    rows.append(Measurement(NAME, f"the tail, after which nothing is called, {shape}", "ms", last, {}, Goal(20.0)))
    missing = [float(len(run.publish_us) - len(run.deliveries.delays_s)) for run in runs[KIT] if run.deliveries]
    rows.append(Measurement(NAME, f"batches lost, {shape}", "", missing, {}, Goal(0.0)))
    return rows
