"""Measure replays: completeness, duration, the latency of an idle publisher, and the effect on live batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from benchmarks.measure import Goal, Measurement, Samples, Scale, percentile
from benchmarks.processes import LoopResult, LoopSpec, Replays, run_loop
from benchmarks.publishers import KIT, KIT_INLINE, KIT_WITHOUT_IDLE, LIMIT

NAME = "replay"
_KEPT = 10_000
_BUFFER_STEPS = 40_000
"""No batch leaves the replay buffer during the replay, so that all of it must arrive."""
_SHAPE = "16 events"
"""About 1.7 KB per batch."""


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Replay everything in each kind of loop, replay the last batch of an idle publisher, and replay repeatedly."""
    everything = LoopSpec(subject="", shape=_SHAPE, steps=0, kept=_KEPT, buffer_steps=_BUFFER_STEPS)
    loops = {
        "loop that also waits": replace(everything, steps=2_000),
        "loop that never waits": replace(everything, steps=15_000, loop="holds the GIL"),
    }
    rows: list[Measurement] = []
    for loop, spec in loops.items():
        for client in ("prompt", "slow"):
            runs = _run(replace(spec, replay=client, subscribes=False), (KIT, *peers), scale)
            rows += _whole(f"{client} client, {loop}", runs, peers)
    rows += _without_idle(scale, peers)
    last = replace(everything, kept=100, replay="last", subscribes=False)
    rows.append(_first_answer(_run(last, (KIT, LIMIT, *peers), scale)))
    for loop, spec in loops.items():
        rows += _live_meanwhile(
            loop, _run(replace(spec, replay="loop"), (KIT, *peers), scale), waits=spec.loop == "waits"
        )
    for loop, spec in loops.items():
        # Most of the requested batches have left the replay buffer, so the kit answers with the snapshot.
        folded = replace(spec, replay="loop", buffer_steps=_KEPT // 10, steps=2_000)
        rows += _live_meanwhile(f"{loop}, with a snapshot", _run(folded, (KIT,), scale), waits=spec.loop == "waits")
    return rows


def _without_idle(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Run a scheduler that releases the GIL and never calls ``idle()``, with large batches and a full buffer."""
    loop = "loop without idle()"
    subjects = (KIT_WITHOUT_IDLE, KIT_INLINE, *peers)
    spec = LoopSpec(
        subject="",
        shape="64 events",
        steps=3_000,
        loop="releases the GIL",
        kept=_KEPT,
        buffer_steps=_KEPT,
        subscribes=False,
    )
    runs = _run(replace(spec, replay="prompt"), subjects, scale)
    spans = _values(runs, lambda run: percentile(run.iteration_us, 99) / 1e3)
    rows = _whole(f"prompt client, {loop}", runs, peers, ours=KIT_WITHOUT_IDLE, whole_goal=Goal(1.0))
    ours = spans.pop(KIT_WITHOUT_IDLE)
    rows.append(Measurement(NAME, f"iteration p99 while replaying, {loop}", "ms", ours, spans, Goal(1.0)))
    crowd = replace(spec, replay="loop", num_clients=4, subscribes=True)
    delays = _values(_run(crowd, subjects, scale), _live_p99_ms)
    ours = delays.pop(KIT_WITHOUT_IDLE)
    rows.append(Measurement(NAME, f"live p99 while four clients replay, {loop}", "ms", ours, delays, Goal(10.0)))
    waits = replace(crowd, loop="waits", steps=1_500)
    delays = _values(_run(waits, (KIT, *peers), scale), _live_p99_ms)
    ours = delays.pop(KIT)
    rows.append(
        Measurement(NAME, "live p99 while four clients replay, loop that waits", "ms", ours, delays, Goal(10.0))
    )
    return rows


def _run(spec: LoopSpec, subjects: Sequence[str], scale: Scale) -> dict[str, list[LoopResult]]:
    runs: dict[str, list[LoopResult]] = {subject: [] for subject in subjects}
    spec = replace(spec, steps=scale.of(spec.steps) if spec.steps else 0)
    for _ in range(max(1, scale.turns // 2)):
        for subject in subjects:
            runs[subject].append(run_loop(replace(spec, subject=subject)))
    return runs


def _values(runs: dict[str, list[LoopResult]], read: Callable[[LoopResult], float]) -> dict[str, Samples]:
    return {name: [read(each) for each in found] for name, found in runs.items()}


def _replays(run: LoopResult) -> Replays:
    assert run.replays is not None
    return run.replays


def _whole(
    case: str,
    runs: dict[str, list[LoopResult]],
    peers: Sequence[str],
    *,
    ours: str = KIT,
    whole_goal: Goal | None = None,
) -> list[Measurement]:
    counts = _values(runs, lambda run: _replays(run).batches[0])
    ends = _values(runs, lambda run: float(_replays(run).ended[0]))
    spans = _values(runs, lambda run: _replays(run).whole_s[0])
    goal = whole_goal or (Goal(1.5, "SGLang") if "SGLang" in peers and min(ends["SGLang"]) else None)
    return [
        Measurement(NAME, f"batches of {_KEPT:,}, {case}", "", counts.pop(ours), counts, Goal(_KEPT, at_least=True)),
        Measurement(NAME, f"end marker, {case}", "", ends.pop(ours), ends, Goal(1, at_least=True)),
        Measurement(NAME, f"time to the end, {case}", "s", spans.pop(ours), spans, goal),
    ]


def _first_answer(runs: dict[str, list[LoopResult]]) -> Measurement:
    spans = _values(runs, lambda run: percentile(_replays(run).first_s, 50) * 1e3)
    return Measurement(NAME, "first answer of an idle publisher, p50", "ms", spans.pop(KIT), spans, Goal(1.0))


def _live_meanwhile(loop: str, runs: dict[str, list[LoopResult]], *, waits: bool) -> list[Measurement]:
    delays = _values(runs, _live_p99_ms)
    longest = _values(runs, lambda run: max(run.publish_us) / 1e3)
    answers = _values(runs, lambda run: sum(_replays(run).ended))
    return [
        Measurement(NAME, f"live p99 while replaying, {loop}", "ms", delays.pop(KIT), delays, Goal(10.0)),
        Measurement(
            NAME,
            f"publish() max while replaying, {loop}",
            "ms",
            longest.pop(KIT),
            longest,
            Goal(1.0) if waits else None,
        ),
        Measurement(NAME, f"complete replays meanwhile, {loop}", "", answers.pop(KIT), answers),
    ]


def _live_p99_ms(run: LoopResult) -> float:
    assert run.deliveries is not None
    return percentile(run.deliveries.delays_s, 99) * 1e3
