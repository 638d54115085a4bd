"""Measure publishing while traffic never stops and clients replay, in every kind of scheduler loop.

Delay, replay, cost of a call, backlog, processor time and memory are reported together for each loop, so that an
improvement of one row cannot hide its cost in another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.measure import Goal, Measurement, Samples, Scale, percentile
from benchmarks.processes import Child, Delivery, Replays, free_endpoints, join_replays, start_child
from benchmarks.publishers import (
    KIT,
    KIT_INLINE,
    KIT_WITHOUT_IDLE,
    OFF,
    BenchmarkedPublisher,
    open_benchmarked_publisher,
)
from benchmarks.workloads import SHAPES

# --- the process of a loop and its replay clients ---


LoopKind = Literal["holds the GIL", "makes system calls", "sleeps", "waits", "works"]


class TrafficLoop(msgspec.Struct, frozen=True):
    """One kind of scheduler loop.

    Attributes:
        kind: what a step does besides 0.2 ms of work: nothing; small system calls in that work; a sleep of 0.2 ms; a
            wait until ``period_s`` have passed since its begin; or more such work with small system calls until then.
        period_s: length of a step of ``"waits"`` and ``"works"``.
        steps: measured steps.
    """

    kind: LoopKind
    period_s: float
    steps: int


LOOPS = {
    "holds the GIL": TrafficLoop("holds the GIL", 0.0, 10_000),
    "small system calls": TrafficLoop("makes system calls", 0.0, 10_000),
    "sleeps 0.2 ms": TrafficLoop("sleeps", 0.0, 5_000),
    "waits, steps of 1 ms": TrafficLoop("waits", 0.001, 2_000),
    "waits, steps of 10 ms": TrafficLoop("waits", 0.01, 250),
    "waits, steps of 100 ms": TrafficLoop("waits", 0.1, 30),
    "works, steps of 1 ms": TrafficLoop("works", 0.001, 2_000),
    "works, steps of 10 ms": TrafficLoop("works", 0.01, 250),
    "works, steps of 100 ms": TrafficLoop("works", 0.1, 30),
}
"""The kinds of loops, by their name in the table."""


class TrafficSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a traffic process.

    Attributes:
        subject: a name of ``publishers.open_benchmarked_publisher``.
        shape: a name of ``workloads.SHAPES``.
        loop: a name of ``LOOPS``.
        share: part of the loop's steps.
        kept: batches published before the loop, which each replay requests.
        buffer_steps: batches that the publisher keeps for replays.
        num_clients: replay clients. One asks once; several ask again without a pause until the loop ends.
        pool_steps: as in ``LoopSpec``.
    """

    subject: str
    shape: str
    loop: str
    share: float = 1.0
    kept: int = 10_000
    buffer_steps: int = 40_000
    num_clients: int = 0
    pool_steps: int | None = None


class TrafficResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one loop, together.

    Attributes:
        publish_us, idle_us: time per call. iteration_us: time per step, without making its batch.
        deliveries: the batches of the loop at the subscriber; None without one.
        replays: the answers that the clients received; None without clients.
        max_pending: largest number of accepted and unsent batches, read every few steps.
        calls_cpu_us, threads_cpu_us: processor time per step: of the loop's thread in the calls, and of all others.
        growth_bytes: resident memory at the end of the loop, minus that before it.
        loop_s: duration of the loop.
    """

    publish_us: list[float]
    idle_us: list[float]
    iteration_us: list[float]
    deliveries: Delivery | None
    replays: Replays | None
    max_pending: int
    calls_cpu_us: float
    threads_cpu_us: float
    growth_bytes: int
    loop_s: float


_WORK_LOOPS = 4_000
"""About 0.2 ms of Python. A count instead of a time, so that a stolen GIL lengthens the step."""

_CALLS_PER_WORK = 20
_SLEEP_S = 0.0002
_PENDING_EVERY = 16
_SETTLE_S = 1.0


def _work() -> None:
    for number in range(_WORK_LOOPS):
        number & 7


def _work_with_system_calls(sink: int) -> None:
    for _ in range(_CALLS_PER_WORK):
        for number in range(_WORK_LOOPS // _CALLS_PER_WORK):
            number & 7
        os.write(sink, b"!")  # releases the GIL for a microsecond


def _step(loop: TrafficLoop, idle: Callable[[], None], sink: int) -> None:
    """Do the work of one step, and its wait; the hook is called where a scheduler would wait for its device."""
    due_s = time.perf_counter() + loop.period_s
    if loop.kind == "makes system calls" or loop.kind == "works":
        _work_with_system_calls(sink)
    else:
        _work()
    idle()
    if loop.kind == "sleeps":
        time.sleep(_SLEEP_S)
    elif loop.kind == "waits":
        time.sleep(max(0.0, due_s - time.perf_counter()))
    while loop.kind == "works" and time.perf_counter() < due_s:
        _work_with_system_calls(sink)


def run_loop(subject: BenchmarkedPublisher, spec: TrafficSpec, steps: int) -> TrafficResult:
    """Run the loop's steps in this process."""
    loop = LOOPS[spec.loop]
    publish_us: list[float] = []
    idle_us: list[float] = []
    iteration_us: list[float] = []
    clock, cpu = time.perf_counter, time.thread_time
    calls_cpu_s, max_pending = 0.0, 0
    sink = os.open(os.devnull, os.O_WRONLY)

    def idle() -> None:
        nonlocal calls_cpu_s
        cpu_at, at_s = cpu(), clock()
        subject.idle()
        idle_us.append((clock() - at_s) * 1e6)
        calls_cpu_s += cpu() - cpu_at

    memory, begun_s = _resident_bytes(), clock()
    cpu_before, own_cpu_before = time.process_time(), cpu()
    for step in range(steps):
        step_s = clock()
        _step(loop, idle, sink)
        making_s = clock()
        number = spec.kept + step
        evicted = number - spec.pool_steps if spec.pool_steps is not None and number >= spec.pool_steps else None
        batch = subject.make_batch(subject.make_events(number, evicted), time.time())
        cpu_at, made_s = cpu(), clock()
        subject.publish(batch)
        published_s = clock()
        calls_cpu_s += cpu() - cpu_at
        publish_us.append((published_s - made_s) * 1e6)
        iteration_us.append((published_s - step_s - (made_s - making_s)) * 1e6)
        if step % _PENDING_EVERY == 0 or loop.period_s:
            max_pending = max(max_pending, subject.num_pending())
    loop_s = clock() - begun_s
    threads_cpu_s = time.process_time() - cpu_before - (cpu() - own_cpu_before)
    os.close(sink)
    return TrafficResult(
        publish_us=publish_us,
        idle_us=idle_us,
        iteration_us=iteration_us,
        deliveries=None,
        replays=None,
        max_pending=max_pending,
        calls_cpu_us=calls_cpu_s / steps * 1e6,
        threads_cpu_us=threads_cpu_s / steps * 1e6,
        growth_bytes=_resident_bytes() - memory,
        loop_s=loop_s,
    )


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _measure(subject: BenchmarkedPublisher, spec: TrafficSpec, endpoint: str, replay_endpoint: str) -> TrafficResult:
    steps = max(1, int(LOOPS[spec.loop].steps * spec.share))
    for step in range(spec.kept):
        subject.publish(subject.make_batch(subject.make_events(step), 0.0))
        subject.idle()
    time.sleep(_SETTLE_S)

    def warm_up() -> None:
        subject.publish(subject.make_batch(subject.make_events(0), 0.0))
        subject.idle()

    subscriber = Child("subscriber", {"endpoint": endpoint, "expected": steps})
    subscriber.wait_until_ready(warm_up)
    asks = {"endpoint": replay_endpoint, "asks": "loop" if spec.num_clients > 1 else "prompt", "kept": spec.kept}
    clients = [Child("replay", asks) for _ in range(spec.num_clients)]
    for client in clients:
        client.wait_until_ready(subject.idle)
    result = run_loop(subject, spec, steps)
    deliveries = subscriber.result(Delivery)
    replays = join_replays([client.result(Replays) for client in clients])
    return msgspec.structs.replace(result, deliveries=deliveries, replays=replays)


def main() -> None:
    """Run the traffic of the command line."""
    spec = msgspec.json.decode(sys.argv[1], type=TrafficSpec)
    endpoint, replay_endpoint = free_endpoints(2)
    subject = open_benchmarked_publisher(spec.subject, SHAPES[spec.shape], endpoint, replay_endpoint, spec.buffer_steps)
    try:
        # Without a publisher there is nothing to subscribe to.
        is_off = spec.subject == "off"
        steps = max(1, int(LOOPS[spec.loop].steps * spec.share))
        result = run_loop(subject, spec, steps) if is_off else _measure(subject, spec, endpoint, replay_endpoint)
    finally:
        subject.close()
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))


# --- the section ---

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
    with start_child("bench_traffic", msgspec.json.encode(spec)) as loop:
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


if __name__ == "__main__":
    main()
