"""Measure how long a reader that joins a busy publisher takes until it is LIVE.

The replay buffer is full, so each reader needs the snapshot, and each step of the loop moves the edge of the buffer.
The loop sleeps until its next step and never calls ``idle()``. It is judged while it runs: it ends after the readers.
"""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Sequence

import msgspec

from benchmarks.late_reader_process import Arrivals, LateReaders
from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.processes import free_endpoints, start_child
from benchmarks.publishers import KIT_INLINE, KIT_WITHOUT_IDLE, BenchmarkedPublisher, open_benchmarked_publisher
from benchmarks.workloads import SHAPES

NAME = "late_readers"
_RATES = (100, 500, 2_000, 10_000)
_SEND_MODES = {"background": KIT_WITHOUT_IDLE, "inline": KIT_INLINE}
_BUFFER_STEPS = 10_000
_STANDING = 12_000
"""Blocks that stay cached: some are in the snapshot, the others in the replay buffer."""

_JOINS = 4
_TIMEOUT_S = 10.0
_CHILD_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.05
_SETTLE_S = 0.3
_PAUSE_EVERY = 8
_PAUSE_S = 0.0002


class _Run(msgspec.Struct, frozen=True):
    """The readers of one loop, and the batches per second that it reached while they joined."""

    arrivals: Arrivals
    batches_per_s: float


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peer has a snapshot
    """Let readers join at each rate, in both send modes."""
    joins = scale.of(_JOINS)
    rows = []
    for rate in _RATES:
        for mode, subject in _SEND_MODES.items():
            runs = [_measure(subject, rate, joins) for _ in range(scale.turns)]
            rows += _rows(f"{rate:,} batches/s, {mode}", runs)
    return rows


def _rows(case: str, runs: Sequence[_Run]) -> list[Measurement]:
    slowest = [max(each.arrivals.live_s) for each in runs]
    ages = [max(each.arrivals.ages_s) * 1e3 for each in runs]
    rates = [each.batches_per_s for each in runs]
    return [
        Measurement(NAME, f"slowest reader until LIVE, {case}", "s", slowest, {}, Goal(1.0)),
        Measurement(NAME, f"age of the newest batch when LIVE, {case}", "ms", ages),
        Measurement(NAME, f"batches published per second meanwhile, {case}", "/s", rates),
    ]


def _measure(kind: str, rate: int, joins: int) -> _Run:
    endpoint, replay_endpoint = free_endpoints(2)
    subject = open_benchmarked_publisher(kind, SHAPES["1 block"], endpoint, replay_endpoint, _BUFFER_STEPS)
    try:
        for step in range(_STANDING):
            _publish(subject, step)
            if step % _PAUSE_EVERY == 0:
                time.sleep(_PAUSE_S)  # the publisher's thread sends
        time.sleep(_SETTLE_S)
        readers = LateReaders(endpoint=endpoint, replay_endpoint=replay_endpoint, joins=joins, timeout_s=_TIMEOUT_S)
        with start_child("late_reader_process", msgspec.json.encode(readers)) as child:
            try:
                return _publish_until_joined(subject, rate, child, joins * _TIMEOUT_S + _CHILD_TIMEOUT_S)
            finally:
                child.kill()
    finally:
        subject.close()


def _publish_until_joined(
    subject: BenchmarkedPublisher, rate: int, child: subprocess.Popen[bytes], timeout_s: float
) -> _Run:
    """Publish at ``rate`` until the readers have reported. Raise a TimeoutError if they do not."""
    assert child.stdout is not None
    begun_s = looked_s = time.monotonic()
    step, is_ready = _STANDING, False
    while True:
        _publish(subject, step)
        step += 1
        now_s = time.monotonic()
        if now_s - looked_s >= _LOOK_EVERY_S:
            looked_s = now_s
            if select.select([child.stdout], [], [], 0)[0]:
                if is_ready:
                    break
                if child.stdout.readline() != b"ready\n":
                    raise RuntimeError("the readers did not start")
                is_ready = True
        if now_s - begun_s > timeout_s:
            raise TimeoutError(f"the readers reported nothing in {timeout_s:.0f} s")
        due_in_s = begun_s + (step - _STANDING) / rate - now_s
        if due_in_s > 0:
            time.sleep(due_in_s)
    batches_per_s = (step - _STANDING) / (time.monotonic() - begun_s)
    return _Run(msgspec.msgpack.decode(child.stdout.read(), type=Arrivals), batches_per_s)


def _publish(subject: BenchmarkedPublisher, step: int) -> None:
    evicted = step - _STANDING if step >= _STANDING else None
    subject.publish(subject.make_batch(subject.make_events(step, evicted), time.time()))
