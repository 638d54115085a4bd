"""Measure how often the threads of an idle publisher wake up. Linux only."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.processes import free_endpoints
from benchmarks.publishers import KIT, open_benchmarked_publisher
from benchmarks.workloads import SHAPES

NAME = "idle"
_TASKS = Path("/proc/self/task")
_SETTLE_S = 1.0
_WATCH_S = 2.0


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Count the context switches of all other threads."""
    if not _TASKS.is_dir():
        return []
    counts: dict[str, list[float]] = {name: [] for name in (KIT, *peers)}
    for _ in range(max(1, scale.turns // 2)):
        for name in counts:
            endpoint, replay_endpoint = free_endpoints(2)
            subject = open_benchmarked_publisher(name, SHAPES["1 block"], endpoint, replay_endpoint)
            time.sleep(_SETTLE_S)
            before = _wake_ups()
            time.sleep(_WATCH_S)
            counts[name].append((_wake_ups() - before) / _WATCH_S)
            subject.close()
    ours = counts.pop(KIT)
    return [Measurement(NAME, "wake-ups of an idle publisher", "1/s", ours, counts, Goal(0.0))]


def _wake_ups() -> int:
    me = str(threading.get_native_id())
    switches = 0
    for task in _TASKS.iterdir():
        if task.name != me:
            lines = (task / "status").read_text().splitlines()
            switches += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
    return switches
