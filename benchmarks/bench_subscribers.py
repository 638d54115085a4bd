"""Measure the cost per subscriber in the publisher's process, where libzmq's thread sends every batch to each."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from benchmarks.measure import Measurement, Scale
from benchmarks.processes import free_endpoints, start_child
from benchmarks.publishers import KIT, open_benchmarked_publisher
from benchmarks.workloads import SHAPES
from scheduler_components.kv_events import Endpoint

NAME = "subscribers"
_COUNTS = (1, 10, 100, 1_000)
_BATCHES_PER_S = 300
_SECONDS = 5
_PATIENCE_S = 60.0
_SETTLE_S = 0.3


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Publish at a constant rate to growing numbers of subscribers; measure the processor time of all threads."""
    rows = []
    for count in _COUNTS:
        percents: dict[str, list[float]] = {name: [] for name in (KIT, *peers)}
        for _ in range(max(1, scale.turns // 2)):
            for name, found in percents.items():
                found.append(_percent_of_a_core(name, count, scale.of(_SECONDS)))
        ours = percents.pop(KIT)
        what = f"CPU of the publisher, {_BATCHES_PER_S} batches/s, {count:,} subscriber{'s' * (count > 1)}"
        rows.append(Measurement(NAME, what, "% of a core", ours, percents))
    return rows


def _percent_of_a_core(name: str, count: int, seconds: int) -> float:
    endpoint, replay_endpoint = free_endpoints(2)
    shape = SHAPES["16 events"]
    subject = open_benchmarked_publisher(name, shape, endpoint, replay_endpoint)
    address = Endpoint.parse(endpoint)
    arguments = msgspec.json.encode({"host": address.host, "port": address.port, "count": count})
    try:
        with start_child("processes", "crowd", arguments) as crowd:
            assert crowd.stdout is not None
            if crowd.stdout.readline() != b"ready\n":
                raise RuntimeError("the subscribers could not connect; their error is above")
            time.sleep(_SETTLE_S)
            batches = [subject.make_batch(subject.make_events(step), 0.0) for step in range(seconds * _BATCHES_PER_S)]
            begun_s, cpu_s = time.monotonic(), time.process_time()
            for number, batch in enumerate(batches):
                time.sleep(max(0.0, begun_s + number / _BATCHES_PER_S - time.monotonic()))
                subject.publish(batch)
                subject.idle()
            time.sleep(_SETTLE_S)
            cpu_s = time.process_time() - cpu_s
            took_s = time.monotonic() - begun_s
            told, _ = crowd.communicate(timeout=_PATIENCE_S)
    finally:
        subject.close()
    if not int(told):
        raise RuntimeError("nothing was delivered")
    return 100 * cpu_s / took_s
