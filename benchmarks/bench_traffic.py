"""Measure publishing while traffic never stops and clients replay, in every kind of scheduler loop.

Delay, replay, cost of a call, backlog, processor time and memory are reported together for each loop, so that an
improvement of one row cannot hide its cost in another.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.measure import Goal, Measurement, Samples, Scale, percentile
from benchmarks.processes import start_child
from benchmarks.publishers import KIT, KIT_INLINE, KIT_WITHOUT_IDLE, OFF
from benchmarks.traffic_process import LOOPS, TrafficResult, TrafficSpec

__all__ = ["run_traffic"]

NAME = "traffic"
_SHAPE = "1 block"
_KEPT = 10_000
_CLIENTS = (0, 1, 4)
_TIMEOUT_S = 240.0
_NEVER_WAITS = ("1 block", "64 events", "8,192 tokens")
_EXCESS_US = {"1 block": 10.0, "64 events": 40.0, "8,192 tokens": 60.0}
_OURS = (OFF, KIT_WITHOUT_IDLE, KIT, KIT_INLINE)
_MiB = 1024 * 1024


def run_traffic(spec: TrafficSpec) -> TrafficResult:
    """Run one loop in a separate process.

    Raises:
        subprocess.CalledProcessError: the loop failed; its traceback is on standard error.
    """
    with start_child("traffic_process", msgspec.json.encode(spec)) as loop:
        try:
            output, _ = loop.communicate(timeout=_TIMEOUT_S)
        finally:
            loop.kill()
    if loop.returncode:
        raise subprocess.CalledProcessError(loop.returncode, f"traffic {spec}")
    return msgspec.msgpack.decode(output, type=TrafficResult)


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Run every loop with 0, 1 and 4 replaying clients, then the costs of a loop that never waits.

    A peer whose publisher or reader starves until the run is given up has no figures for that loop.
    """
    rows: list[Measurement] = []
    turns = max(1, scale.turns // 2)
    for loop in LOOPS:
        for num_clients in _CLIENTS:
            spec = TrafficSpec(subject="", shape=_SHAPE, loop=loop, share=scale.share, num_clients=num_clients)
            subjects = (*_OURS, *peers)
            rows += _judge(spec, _run_in_turns(spec, subjects, turns))
    for shape in _NEVER_WAITS:
        spec = TrafficSpec(
            subject="", shape=shape, loop="holds the GIL", share=scale.share, kept=1_500, buffer_steps=500,
            pool_steps=250,
        )  # fmt: skip
        rows += _costs(spec, _run_in_turns(spec, (OFF, KIT_WITHOUT_IDLE, KIT_INLINE, *peers), scale.turns))
    return rows


Runs = dict[str, list[TrafficResult]]


def _run_in_turns(spec: TrafficSpec, subjects: Sequence[str], turns: int) -> Runs:
    runs: Runs = {subject: [] for subject in subjects}
    for _ in range(turns):
        for subject in list(runs):
            try:
                runs[subject].append(run_traffic(msgspec.structs.replace(spec, subject=subject)))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                if subject in _OURS:
                    raise
                print(f"traffic: {subject} has no figures for this loop: {error}", file=sys.stderr)
                del runs[subject]
    return runs


def _judge(spec: TrafficSpec, runs: Runs) -> list[Measurement]:
    case = f"{spec.loop}, {spec.num_clients} replays"

    def row(what: str, unit: str, read: Callable[[TrafficResult], float], goal: Goal | None = None) -> Measurement:
        values = _values(runs, read)
        values.pop(OFF)
        # Without the hook is the harder case, and the one that the engines have.
        return Measurement(NAME, f"{what}, {case}", unit, values.pop(KIT_WITHOUT_IDLE), values, goal)

    rows = [
        row("live delay p99", "ms", _delay_p99_ms, Goal(10.0)),
        row("publish() p50", "us", lambda run: percentile(run.publish_us, 50)),
        row("publish() p99", "us", lambda run: percentile(run.publish_us, 99)),
        row("most batches pending", "", lambda run: run.max_pending),
        row("CPU of publishing per step", "us", lambda run: run.calls_cpu_us + run.threads_cpu_us),
        row("memory growth", "MiB", lambda run: run.growth_bytes / _MiB),
    ]
    if spec.num_clients == 1:
        rows += [
            row("replayed batches of 10,000", "", lambda run: _replayed(run)[0], Goal(_KEPT, at_least=True)),
            row("time to the end of the replay", "s", lambda run: _replayed(run)[1], Goal(0.5)),
        ]
    elif spec.num_clients:
        rows.append(row("complete replays meanwhile", "", lambda run: sum(run.replays.ended) if run.replays else 0))
    return rows


def _costs(spec: TrafficSpec, runs: Runs) -> list[Measurement]:
    case = f"loop that never waits, replay buffer full, {spec.shape}"

    def row(what: str, unit: str, values: dict[str, Samples], goal: Goal | None) -> Measurement:
        return Measurement(NAME, f"{what}, {case}", unit, values.pop(KIT_WITHOUT_IDLE), values, goal)

    p99 = _values(runs, lambda run: percentile(run.publish_us, 99))
    p99.pop(OFF)
    median = _values(runs, lambda run: percentile(run.iteration_us, 50))
    off = median.pop(OFF)
    excess: dict[str, Samples] = {
        name: [on - without for on, without in zip(values, off, strict=True)] for name, values in median.items()
    }
    means = _values(runs, lambda run: sum(run.iteration_us) / len(run.iteration_us))
    delays = {name: [_delay_p99_ms(run) for run in found] for name, found in runs.items() if name != OFF}
    return [
        row("publish() p99", "us", p99, Goal(100.0)),
        row("excess of an iteration, median", "us", excess, Goal(_EXCESS_US[spec.shape])),
        row("iteration, mean", "us", means, Goal(1.0, "SGLang")),
        row("live delay p99", "ms", delays, Goal(10.0)),
    ]


def _values(runs: Runs, read: Callable[[TrafficResult], float]) -> dict[str, Samples]:
    return {name: [read(each) for each in found] for name, found in runs.items()}


def _delay_p99_ms(run: TrafficResult) -> float:
    return percentile(run.deliveries.delays_s, 99) * 1e3 if run.deliveries else float("nan")


def _replayed(run: TrafficResult) -> tuple[float, float]:
    """Return the number of batches and the seconds of the only replay; infinite seconds without its end marker."""
    if run.replays is None or not run.replays.ended:
        return 0.0, float("inf")
    return float(run.replays.batches[0]), run.replays.whole_s[0] if run.replays.ended[0] else float("inf")
