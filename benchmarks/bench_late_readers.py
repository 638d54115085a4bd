"""Measure how long a reader that joins a busy publisher takes until it is LIVE.

The replay buffer is full, so each reader needs the snapshot, and each step of the loop moves the edge of the buffer.
The loop sleeps until its next step and never calls ``idle()``. It is judged while it runs: it ends after the readers.
"""

from __future__ import annotations

import math
import select
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.processes import free_endpoints, start_child
from benchmarks.publishers import KIT_INLINE, KIT_WITHOUT_IDLE, BenchmarkedPublisher, open_benchmarked_publisher
from benchmarks.workloads import SHAPES
from observability.kv_stream import StreamState, open_subscriber, static_address

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
        with start_child("bench_late_readers", msgspec.json.encode(readers)) as child:
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


# --- the process that joins a stream that never stops, several times ---


_POLL_S = 0.02


class LateReaders(msgspec.Struct, frozen=True, kw_only=True):
    """The readers to start, each after the previous one is LIVE.

    Attributes:
        endpoint, replay_endpoint: addresses of the publisher.
        joins: number of readers.
        timeout_s: seconds after which a reader stops trying.
    """

    endpoint: str
    replay_endpoint: str
    joins: int
    timeout_s: float


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """The arrival of each reader.

    Attributes:
        live_s: seconds from opening the subscriber until its stream is LIVE; infinite after the timeout.
        ages_s: age of the newest batch in the view at that time, in seconds; NaN without one.
    """

    live_s: list[float]
    ages_s: list[float]


def join(readers: LateReaders) -> tuple[float, float]:
    """Follow the stream until it is LIVE. Return the seconds, and the age of the newest batch in the view."""
    begun_s = time.monotonic()
    with open_subscriber([static_address(readers.endpoint, replay=readers.replay_endpoint)]) as subscriber:
        while (stats := subscriber.stats()[0]).state is not StreamState.LIVE:
            if time.monotonic() - begun_s >= readers.timeout_s:
                return math.inf, math.nan
            subscriber.poll(_POLL_S)
        live_s = time.monotonic() - begun_s
    return live_s, math.nan if stats.newest_batch_age_s is None else stats.newest_batch_age_s


def main() -> None:
    """Start the readers of the command line."""
    readers = msgspec.json.decode(sys.argv[1], type=LateReaders)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.flush()
    found = [join(readers) for _ in range(readers.joins)]
    arrivals = Arrivals(live_s=[live_s for live_s, _ in found], ages_s=[age_s for _, age_s in found])
    sys.stdout.buffer.write(msgspec.msgpack.encode(arrivals))


if __name__ == "__main__":
    main()
