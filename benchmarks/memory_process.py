"""Print the resident memory of one long-lived object in a process that makes nothing else. Linux only."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.bench_cache import GrowthProbe
from benchmarks.processes import free_endpoints
from benchmarks.publishers import KIT_WITHOUT_IDLE, open_benchmarked_publisher
from benchmarks.workloads import SHAPES, Shape
from scheduler_components import BlockStored, KVEventBatch
from scheduler_components.kv_events import BatchEncoder, EventStream

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

if __name__ == "__main__":
    print(THINGS[sys.argv[1]]())
