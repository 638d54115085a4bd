"""Measure the cost of publishing and the delay of batches in a scheduler loop that releases the GIL.

The replay buffer is full, as it is after minutes of service, so each step also folds a batch. The cache's pool is
full as well, so each step removes as many blocks as it stores. In one loop the pool still fills and the snapshot grows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved, percentile
from benchmarks.processes import LoopResult, LoopSpec, run_loop
from benchmarks.publishers import KIT, KIT_CACHE, KIT_INLINE, KIT_WITHOUT_IDLE, LIMIT, OFF
from benchmarks.workloads import SHAPES

NAME = "publish"
_WINDOW = 500
_TAIL = 8

Runs = dict[str, list[LoopResult]]


class Loop(msgspec.Struct, frozen=True):
    """One kind of loop and its goals.

    Attributes:
        name: suffix of each row.
        kind: kind of the ``LoopSpec``.
        ours: the kit's configuration in this loop.
        rivals: other configurations of the kit, timed in the same run.
        publish_us: goal of the median of ``publish()``, for every shape. The goal of the 99th percentile is five times
            as high.
        excess_us: goal of the time that events add to the median iteration.
        cpu: goal of the processor time of ``publish()``, ``idle()`` and the publisher's threads, relative to SGLang's.
        is_pool_full: whether each step removes as many blocks as it stores.
    """

    name: str
    kind: Literal["waits", "releases the GIL"]
    ours: str
    rivals: tuple[str, ...]
    publish_us: dict[str, float]
    excess_us: dict[str, float]
    cpu: dict[str, float]
    is_pool_full: bool = True


_SHAPES = ("1 block", "16 events", "64 events", "256 events", "8,192 tokens")
_LOOPS = (
    Loop(
        name="idle() called",
        kind="waits",
        ours=KIT,
        rivals=(KIT_CACHE,),
        publish_us=dict.fromkeys(_SHAPES, 1.0),
        excess_us=dict.fromkeys(_SHAPES, 5.0),
        cpu=dict.fromkeys(_SHAPES, 1.0),
    ),
    Loop(
        name="no idle()",
        kind="releases the GIL",
        ours=KIT_WITHOUT_IDLE,
        rivals=(KIT_INLINE,),
        publish_us={"1 block": 3.0, "64 events": 5.0, "8,192 tokens": 5.0},
        excess_us={"1 block": 10.0, "64 events": 50.0, "8,192 tokens": 50.0},
        cpu={},
    ),
    Loop(
        name="idle() called, pool fills",
        kind="waits",
        ours=KIT,
        rivals=(),
        publish_us={"8,192 tokens": 1.0},
        excess_us={"8,192 tokens": 5.0},
        cpu={"8,192 tokens": 1.0},
        is_pool_full=False,
    ),
)


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Run every shape without publishing, with the kit, with its peers and at the limit, in turns."""
    rows: list[Measurement] = []
    for loop in _LOOPS:
        for shape in loop.publish_us:
            rows += _rows(loop, shape, _run_in_turns(loop, shape, peers, scale), peers)
    return rows


def _run_in_turns(loop: Loop, shape: str, peers: Sequence[str], scale: Scale) -> Runs:
    runs: Runs = {subject: [] for subject in (OFF, loop.ours, *loop.rivals, LIMIT, *peers)}
    pool_steps = SHAPES[shape].pool_steps if loop.is_pool_full else None
    for _ in range(scale.turns):
        for subject, found in runs.items():
            spec = LoopSpec(
                subject=subject,
                shape=shape,
                steps=scale.of(1_500),
                loop=loop.kind,
                subscribes=subject != OFF,
                kept=_WINDOW + 1 + (pool_steps or 0),
                buffer_steps=_WINDOW,
                pool_steps=pool_steps,
            )
            found.append(run_loop(spec))
    return runs


def _rows(loop: Loop, shape: str, runs: Runs, peers: Sequence[str]) -> list[Measurement]:
    append = _append_us(len(runs[loop.ours]))
    case, rivals = f"{shape}, {loop.name}", (*loop.rivals, *peers)
    rows = []
    for percent, share in ((50, 1.0), (99, 5.0), (100, None)):
        spans = {name: [percentile(run.publish_us, percent) for run in runs[name]] for name in (loop.ours, *rivals)}
        ours = spans.pop(loop.ours)
        bound = None if share is None else Goal(loop.publish_us[shape] * share)
        rows.append(Measurement(NAME, f"publish() p{percent}, {case}", "us", ours, {LIMIT: append} | spans, bound))
    rows.append(_excess(loop, shape, case, runs, rivals))
    rows.append(_worst_iterations(loop, case, runs, rivals))
    rows += [
        _cpu(loop, shape, case, runs, name) for name in (loop.ours, *(each for each in rivals if each == KIT_CACHE))
    ]
    rows += _deliveries(loop, case, runs, rivals)
    return rows


def _append_us(turns: int) -> list[float]:
    """Time the cheapest possible way to accept a batch."""
    return [ns / 1e3 for ns in measure_interleaved({"": lambda: box.append(None)}, turns=turns, number=10_000)[""]]


box: deque[None] = deque(maxlen=100)


def _excess(loop: Loop, shape: str, case: str, runs: Runs, rivals: Sequence[str]) -> Measurement:
    def excess(subject: str) -> list[float]:
        pairs = zip(runs[subject], runs[OFF], strict=True)
        return [percentile(on.iteration_us, 50) - percentile(off.iteration_us, 50) for on, off in pairs]

    beside = {name: excess(name) for name in (LIMIT, *rivals)}
    return Measurement(NAME, f"loop excess p50, {case}", "us", excess(loop.ours), beside, Goal(loop.excess_us[shape]))


def _worst_iterations(loop: Loop, case: str, runs: Runs, rivals: Sequence[str]) -> Measurement:
    names = (OFF, loop.ours, *rivals)
    spans = {name: [percentile(run.iteration_us, 99.9) for run in runs[name]] for name in names}
    ours = spans.pop(loop.ours)
    goal = Goal(1.2, OFF) if loop.kind == "waits" else Goal(1.2, KIT_INLINE)
    return Measurement(NAME, f"loop iteration p99.9, {case}", "us", ours, spans, goal)


def _cpu(loop: Loop, shape: str, case: str, runs: Runs, ours: str) -> Measurement:
    """Report the processor time of the calls and the publisher's threads. The rest of the loop varies by more."""

    def cpu(subject: str) -> list[float]:
        return [(run.calls_cpu_s + run.threads_cpu_s) / len(run.publish_us) * 1e6 for run in runs[subject]]

    beside = {name: cpu(name) for name in runs if name not in (OFF, loop.ours, KIT_CACHE)}
    goal = Goal(loop.cpu[shape], "SGLang") if shape in loop.cpu else None
    what = "CPU of publishing per step, all threads, replay buffer full"
    what += ", events of the kit's caches" if ours == KIT_CACHE else ""
    return Measurement(NAME, f"{what}, {case}", "us", cpu(ours), beside, goal)


def _deliveries(loop: Loop, case: str, runs: Runs, rivals: Sequence[str]) -> list[Measurement]:
    rows = []
    for percent in (50, 99):
        spans = {
            name: [percentile(run.deliveries.delays_s, percent) * 1e3 for run in runs[name] if run.deliveries]
            for name in (loop.ours, LIMIT, *rivals)
        }
        ours = spans.pop(loop.ours)
        goal = Goal(5.0) if percent == 99 else None
        rows.append(Measurement(NAME, f"delivery p{percent}, {case}", "ms", ours, spans, goal))
    heard = [run for run in runs[loop.ours] if run.deliveries]
    last = [max(run.deliveries.delays_s[-_TAIL:]) * 1e3 for run in heard if run.deliveries]
    rows.append(Measurement(NAME, f"the last batches, without a further call, {case}", "ms", last, {}, Goal(20.0)))
    missing = [float(len(run.publish_us) - len(run.deliveries.delays_s)) for run in heard if run.deliveries]
    rows.append(Measurement(NAME, f"batches lost, {case}", "", missing, {}, Goal(0.0)))
    return rows
