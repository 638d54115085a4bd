"""Measure a scheduler and a metrics server in one process in prometheus_client's multiprocess mode.

``python -m benchmarks.metrics_process SPEC`` prints its times as JSON. It needs a separate process, because the
environment variable ``PROMETHEUS_MULTIPROC_DIR`` selects the mode before the library is imported.
"""

from __future__ import annotations

import mmap
import struct
import sys
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from benchmarks.measure import measure_interleaved
from observability import MetricsBoardCollector, render_metrics
from scheduler_components import ParallelState
from scheduler_components.metrics import RequestLatencyRecorder, open_shm_metrics_board, open_shm_metrics_sink
from scheduler_components.values import LatencySnapshot, LoadSnapshot, SchedulerStats, TierStats

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
