"""Measure the cost of starting: import time in fresh interpreters, and memory of long-lived objects."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bench_cache import GrowthProbe
from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.processes import free_endpoints
from benchmarks.publishers import KIT_WITHOUT_IDLE, open_benchmarked_publisher
from benchmarks.workloads import SHAPES, Shape
from scheduler_components import BlockStored, KVEventBatch
from scheduler_components.kv_events import BatchEncoder, EventStream

# --- the process that prints the resident memory of one long-lived object ---


COUNT = 100_000
BASE_BLOCKS = 400_000
NUM_BATCHES = 10_000


def _cache() -> int:
    before = _resident_bytes()
    probe = GrowthProbe(COUNT)
    return _resident_bytes(probe) - before


def _window() -> int:
    endpoint, replay_endpoint = free_endpoints(2)
    subject = open_benchmarked_publisher(KIT_WITHOUT_IDLE, SHAPES["16 events"], endpoint, replay_endpoint)
    before = _resident_bytes()
    for step in range(NUM_BATCHES):
        subject.publish(subject.make_batch(subject.make_events(step), 0.0))
    after = _resident_bytes()
    subject.close()
    return after - before


def _base(shape: Shape) -> int:
    """Measure the snapshot of a stream with a replay buffer of one batch."""
    encoder, stream = BatchEncoder(), EventStream(epoch=bytes(16), max_steps=1, max_bytes=1 << 30)
    blocks_per_step = shape.num_events * shape.blocks_per_event

    def publish(first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            events = tuple(BlockStored(**fields) for fields in shape.fields(step, tuple))
            stream.append(*encoder.encode_with_changes(KVEventBatch(1.5, events), 0))
            stream.fold_oldest()

    publish(0, _FIRST_STEPS)
    before = _resident_bytes()
    publish(_FIRST_STEPS, BASE_BLOCKS // blocks_per_step)
    return _resident_bytes(stream) - before


_FIRST_STEPS = 20
"""Warm-up runs, after which the libraries have allocated their own memory."""


def _resident_bytes(*_: object) -> int:
    """Return the resident bytes of this process while the arguments are alive."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


THINGS: dict[str, Callable[[], int]] = {
    "cache": _cache,
    "window": _window,
    "base1": lambda: _base(SHAPES["1 block"]),
    "base64": lambda: _base(Shape("64 blocks", 1, 64)),
}


# --- the section ---

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
        command = [sys.executable, "-m", "benchmarks.bench_start", thing]
        found = []
        for _ in range(max(1, scale.turns // 2)):
            done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
            found.append(int(done.stdout) / count)
        rows.append(Measurement(NAME, f"memory of {what}", unit, found, {}, _MEMORY_GOALS.get(thing)))
    return rows


if __name__ == "__main__":
    print(THINGS[sys.argv[1]]())
