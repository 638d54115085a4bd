"""Measure what metrics sinks and scrapes cost a step. ``bench_step`` measures all of ``emit()``."""

from __future__ import annotations

import gc
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from benchmarks.bench_load import inquirer_over
from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved, percentile
from observability import MetricsBoardCollector, PrometheusSink, render_metrics
from scheduler_components import MetricsEmitter, ParallelState
from scheduler_components.load import TokenCountedQueue
from scheduler_components.metrics import RequestLatencyRecorder, open_shm_metrics_board, open_shm_metrics_sink
from scheduler_components.values import LatencySnapshot, LoadSnapshot, SchedulerStats, TierStats

NAME = "metrics"
_ROOT = Path(__file__).parent.parent
_PATIENCE_S = 120
_SCRAPE_EVERY_S = 0.1
_WORK_LOOPS = 2_000


class _Cell:
    """The cheapest possible sink: one attribute store."""

    stats: SchedulerStats

    def record(self, stats: SchedulerStats) -> None:
        self.stats = stats


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: gauges set one by one stand for them
    """Time the sinks in and across processes, scrapes, and a loop next to a scraping thread."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    cell = _Cell()
    load = inquirer_over(TokenCountedQueue())
    MetricsEmitter(parallel=ParallelState.trivial(), load=load, sink=cell).emit()
    stats = cell.stats
    gauges, set_gauges = _gauges()
    number = scale.of(20_000)
    found = measure_interleaved(
        {
            "record": lambda: sink.record(stats),
            "limit": lambda: cell.record(stats),
        },
        turns=scale.turns,
        number=number,
    )
    found |= measure_interleaved({"64 gauges": set_gauges}, turns=scale.turns, number=scale.of(500))
    us = {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
    beside = {"limit": us["limit"], "64 gauges": us["64 gauges"]}
    scrapes = measure_interleaved(
        {"ours": lambda: render_metrics(registry), "64 gauges": lambda: generate_latest(gauges)},
        turns=scale.turns,
        number=scale.of(100),
    )
    ms = {name: [ns / 1e6 for ns in samples] for name, samples in scrapes.items()}
    return [
        Measurement(NAME, "record() of the sink alone, in process", "us", us["record"], beside, Goal(1.0)),
        Measurement(NAME, "one scrape, without request times", "ms", ms["ours"], {"64 gauges": ms["64 gauges"]}),
        *(_whole_scrape(num_ranks, stats, scale) for num_ranks in (1, 64)),
        *_across_processes(scale, stats),
        *_scraped_loops(scale, registry),
    ]


def _whole_scrape(num_ranks: int, stats: SchedulerStats, scale: Scale) -> Measurement:
    """Time scrapes of reports with tiers and all request times over a board, in processor time with the GIL held."""
    whole = msgspec.structs.replace(stats, **all_parts()[0])
    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory(prefix="metrics-board-") as folder, ExitStack() as sinks:
        MetricsBoardCollector(registry, board=open_shm_metrics_board(Path(folder), num_ranks))
        for rank in range(num_ranks):
            parallel = ParallelState(dp_rank=rank, dp_size=num_ranks)
            sink = open_shm_metrics_sink(Path(folder), parallel)
            sinks.callback(sink.close)
            sink.record(msgspec.structs.replace(whole, labels=parallel.metric_labels))
        found = measure_interleaved(
            {"ours": lambda: render_metrics(registry)},
            turns=scale.turns,
            number=max(1, scale.of(100) // num_ranks),
            clock_ns=time.thread_time_ns,
        )
    ms = [ns / 1e6 / num_ranks for ns in found["ours"]]
    what = f"a scrape of {num_ranks} rank{'s' * (num_ranks > 1)} with all request times, per rank"
    return Measurement(NAME, what, "ms", ms, {}, Goal(0.5))


def _across_processes(scale: Scale, stats: SchedulerStats) -> list[Measurement]:
    """Time the same over shared memory, next to prometheus_client's multiprocess mode."""
    spec = ProcessSpec(
        load=stats.load,
        turns=scale.turns,
        num_records=scale.of(20_000),
        num_gauge_rounds=scale.of(500),
        num_scrapes=scale.of(100),
    )
    command = [sys.executable, "-m", "benchmarks.bench_metrics", msgspec.json.encode(spec).decode()]
    with tempfile.TemporaryDirectory(prefix="metrics-peer-") as folder:
        environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": folder}
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, check=True, stdout=subprocess.PIPE, timeout=_PATIENCE_S
        )
    found = msgspec.json.decode(done.stdout, type=dict[str, list[float]])
    us = {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
    ms = {name: [ns / 1e6 for ns in samples] for name, samples in found.items()}
    peer = "64 gauges, multiprocess"
    beside = {"limit": us["limit"], peer: us["gauges"]}
    whole = {"limit": us["limit whole"]}
    return [
        Measurement(NAME, "record() of the sink alone, without times", "us", us["record"], beside, Goal(2.0)),
        Measurement(NAME, "the same, with tiers, and times that changed", "us", us["record whole"], whole),
        Measurement(NAME, "one scrape, across processes", "ms", ms["scrape"], {peer: ms["scrape gauges"]}),
    ]


def _gauges() -> tuple[CollectorRegistry, Callable[[], None]]:
    registry = CollectorRegistry()
    labels = {"model_name": "m", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    gauges = [Gauge(f"peer_{number}", "A gauge.", list(labels), registry=registry) for number in range(NUM_GAUGES)]

    def set_all() -> None:
        for gauge in gauges:
            gauge.labels(**labels).set(1.0)

    return registry, set_all


def _scraped_loops(scale: Scale, registry: CollectorRegistry) -> list[Measurement]:
    """Measure a loop's p99 next to a scraping thread, in turns with the same loop alone.

    Ten scrapes per second are a hundred times a Prometheus server's rate; scrapes without a pause are the worst case.
    """
    spans: dict[float | None, list[float]] = {None: [], _SCRAPE_EVERY_S: [], 0.0: []}
    for _ in range(scale.turns):
        for pause_s, found in spans.items():
            found.append(_loop_p99_us(registry, pause_s, scale.of(3_000)))
    alone = {"unscraped": spans[None]}
    goal = Goal(1.15, "unscraped")
    return [
        Measurement(NAME, "loop p99, scraped 10 times a second", "us", spans[_SCRAPE_EVERY_S], alone, goal),
        Measurement(NAME, "loop p99, scraped without a pause", "us", spans[0.0], alone),
    ]


def _loop_p99_us(registry: CollectorRegistry, pause_s: float | None, steps: int) -> float:
    if pause_s is None:
        return _loop_alone_p99_us(steps)
    stop = threading.Event()
    thread = threading.Thread(target=_scrape_until, args=(registry, stop, pause_s))
    thread.start()
    try:
        return _loop_alone_p99_us(steps)
    finally:
        stop.set()
        thread.join()


def _scrape_until(registry: CollectorRegistry, stop: threading.Event, pause_s: float) -> None:
    while not stop.wait(pause_s):
        render_metrics(registry)


def _loop_alone_p99_us(steps: int) -> float:
    gc.collect()
    spans = []
    for _ in range(steps):
        begun = time.perf_counter()
        total = 0
        for number in range(_WORK_LOOPS):
            total += number & 7
        time.sleep(0.0005)
        spans.append((time.perf_counter() - begun) * 1e6)
    return percentile(spans, 99)


# --- the process of a loop with metrics ---


NUM_GAUGES = 64
"""The metrics that SGLang 0.5.23 sets one by one at the end of a step."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The reported ``load``, then the numbers of calls per turn."""

    load: LoadSnapshot
    turns: int
    num_records: int
    num_gauge_rounds: int
    num_scrapes: int


def main() -> None:
    """Run the specification of the command line."""
    spec = msgspec.json.decode(sys.argv[1], type=ProcessSpec)
    with tempfile.TemporaryDirectory(prefix="metrics-board-", dir=_memory_directory()) as folder:
        found = _measure(spec, Path(folder))
    print(msgspec.json.encode(found).decode())


def _memory_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _measure(spec: ProcessSpec, directory: Path) -> dict[str, list[float]]:
    parallel = ParallelState.trivial()
    sink = open_shm_metrics_sink(directory, parallel)
    plain = SchedulerStats(labels=parallel.metric_labels, load=spec.load)
    whole = cycle([msgspec.structs.replace(plain, **parts) for parts in all_parts()])
    set_gauges = _gauges()
    records: dict[str, Callable[[], object]] = {
        "record": lambda: sink.record(plain),
        "record whole": lambda: sink.record(next(whole)),
        "limit": _packing(_count_numbers(plain)),
        "limit whole": _packing(_count_numbers(next(whole))),
    }
    found = measure_interleaved(records, turns=spec.turns, number=spec.num_records)
    found |= measure_interleaved({"gauges": set_gauges}, turns=spec.turns, number=spec.num_gauge_rounds)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    MetricsBoardCollector(ours, board=open_shm_metrics_board(directory, 1))
    MultiProcessCollector(theirs)  # type: ignore[no-untyped-call]
    sink.record(plain)
    scrapes: dict[str, Callable[[], object]] = {
        "scrape": lambda: render_metrics(ours),
        "scrape gauges": lambda: generate_latest(theirs),
    }
    found |= measure_interleaved(scrapes, turns=spec.turns, number=spec.num_scrapes)
    sink.close()
    return found


def all_parts() -> list[dict[str, LatencySnapshot | TierStats]]:
    """Make two complete reports that differ in one histogram, as after a decode step."""
    latencies = RequestLatencyRecorder()
    histograms = latencies.histograms
    for name in LatencySnapshot.__struct_fields__:
        for number in range(2_000):
            getattr(histograms, name).observe(number % 97 * 0.05)
    first = latencies.stats()
    histograms.inter_token.observe(0.01)
    return [{"latencies": each, "tiers": TierStats()} for each in (first, latencies.stats())]


def _packing(count: int) -> Callable[[], None]:
    """Write as many doubles to shared memory, without a schema or protection against torn reads."""
    memory = mmap.mmap(-1, 8 * count)
    layout, values = struct.Struct(f"{count}d"), [1.5] * count
    return lambda: layout.pack_into(memory, 0, *values)


def _count_numbers(value: object) -> int:
    if isinstance(value, msgspec.Struct):
        return sum(map(_count_numbers, msgspec.structs.astuple(value)))
    if isinstance(value, tuple):
        return sum(map(_count_numbers, value))
    return int(isinstance(value, int | float))


def _gauges() -> Callable[[], None]:
    labels = {"model_name": "m", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    gauges = [
        # SGLang uses this mode. The values are in mapped files for any registry.
        Gauge(f"peer_{number}", "A gauge.", list(labels), registry=None, multiprocess_mode="mostrecent")
        for number in range(NUM_GAUGES)
    ]

    def set_all() -> None:
        for gauge in gauges:
            gauge.labels(**labels).set(1.0)

    return set_all


if __name__ == "__main__":
    main()
