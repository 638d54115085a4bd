"""Measure the cost of starting: import time in fresh interpreters, and memory of long-lived objects."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.memory_process import BASE_BLOCKS, COUNT, NUM_BATCHES

NAME = "start"
_ROOT = Path(__file__).parent.parent
_IMPORTS = {
    "the package": "import scheduler_components",
    "all components, no sockets": (
        "import scheduler_components.kv_events_publisher, scheduler_components.load_inquirer, "
        "scheduler_components.metrics_emitter, scheduler_components.cache.radix_cache"
    ),
    "the ZMQ publisher": "import scheduler_components.kv_events.zmq_publisher",
}
_LIBRARIES = "import attrs, msgspec"
_MEMORY = {
    "cache": ("radix cache, 100,000 pages of 16 tokens", "bytes a page", COUNT),
    "window": ("publisher's replay buffer, 10,000 batches of 1.7 KB", "bytes a batch", NUM_BATCHES),
    "base1": ("publisher's snapshot, 400,000 blocks of 16 tokens, 1 per event and batch", "bytes a block", BASE_BLOCKS),
    "base64": ("publisher's snapshot, the same, 64 per event", "bytes a block", BASE_BLOCKS),
}
_MEMORY_GOALS = {"base1": Goal(120.0), "base64": Goal(120.0)}


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: importing them imports torch
    """Time imports in turns with a bare interpreter; read resident memory before and after."""
    return [*_import_rows(scale), *_memory_rows(scale)]


def _import_rows(scale: Scale) -> list[Measurement]:
    scripts = {"bare": "pass", "libraries": _LIBRARIES, **_IMPORTS}
    spans: dict[str, list[float]] = {name: [] for name in scripts}
    for _ in range(2 * scale.turns):
        for name, script in scripts.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", script], cwd=_ROOT, check=True)
            spans[name].append((time.perf_counter() - begun) * 1e3)

    def above_bare(name: str) -> list[float]:
        return [span - bare for span, bare in zip(spans[name], spans["bare"], strict=True)]

    beside = {"attrs and msgspec": above_bare("libraries")}
    return [Measurement(NAME, f"import {name}", "ms", above_bare(name), beside) for name in _IMPORTS]


def _memory_rows(scale: Scale) -> list[Measurement]:
    if not Path("/proc/self/statm").is_file():
        return []
    rows = []
    for thing, (what, unit, count) in _MEMORY.items():
        command = [sys.executable, "-m", "benchmarks.memory_process", thing]
        found = []
        for _ in range(max(1, scale.turns // 2)):
            done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
            found.append(int(done.stdout) / count)
        rows.append(Measurement(NAME, f"memory of {what}", unit, found, {}, _MEMORY_GOALS.get(thing)))
    return rows
