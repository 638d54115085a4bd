"""Run a scheduler loop in a separate process: work, wait for an imaginary device, publish.

``processes.run_loop`` starts it with a ``LoopSpec`` as JSON. It writes a ``LoopResult`` as msgpack to standard output.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

from benchmarks.processes import Delivery, LoopResult, LoopSpec, Replays, free_endpoints, start_child
from benchmarks.publishers import BenchmarkedPublisher, open_benchmarked_publisher
from benchmarks.workloads import SHAPES

_WORK_LOOPS = 4_000
"""About 200 microseconds of Python. A count instead of a time, so that a stolen GIL lengthens the step."""

_DEVICE_S = 0.001
_LET_GO_S = 0.0002
_BETWEEN_S = 0.002
_CHILD_TIMEOUT_S = 120
_SETTLE_S = 1.5
"""After this time the peers' threads have sent and buffered the batches published before."""

_SETTLES = 1_500

R = TypeVar("R")


class Child:
    """A subscriber or replay client. It prints ``ready``, then its result, and ends soon after its input does."""

    def __init__(self, module: str, argument: object) -> None:
        self._process = start_child(module, msgspec.json.encode(argument))
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def wait_until_ready(self, meanwhile: Callable[[], None]) -> None:
        """Call ``meanwhile`` every few milliseconds until the child is ready."""
        while not select.select([self._output], [], [], _BETWEEN_S)[0]:
            meanwhile()
        if self._output.readline() != b"ready\n":
            raise RuntimeError("a benchmark's child did not get ready")

    def result(self, kind: type[R]) -> R:
        """Close the child's input and return its result."""
        with self._process:
            try:
                output, _ = self._process.communicate(timeout=_CHILD_TIMEOUT_S)
            finally:
                self._process.kill()
        return msgspec.msgpack.decode(output, type=kind)


def _work() -> int:
    total = 0
    for number in range(_WORK_LOOPS):
        total += number & 7
    return total


def make_batch(subject: BenchmarkedPublisher, spec: LoopSpec, step: int, ts: float) -> Any:
    evicted = None if spec.pool_steps is None or step < spec.pool_steps else step - spec.pool_steps
    return subject.make_batch(subject.make_events(step, evicted), ts)


def _warm_up(subject: BenchmarkedPublisher, spec: LoopSpec) -> None:
    subject.publish(make_batch(subject, spec, 0, 0.0))
    subject.idle()


def run_steps(subject: BenchmarkedPublisher, spec: LoopSpec) -> LoopResult:
    """Run the measured steps of a loop in this process."""
    publish_us, iteration_us = [], []
    clock, cpu, idle, publish = time.perf_counter, time.thread_time, subject.idle, subject.publish
    calls_cpu_s = 0.0
    cpu_before, own_cpu_before, begun_s = time.process_time(), cpu(), time.time()
    for step in range(spec.steps):
        begun = clock()
        _work()
        if spec.loop == "waits":
            device_done = clock() + _DEVICE_S
            cpu_at = cpu()
            idle()
            calls_cpu_s += cpu() - cpu_at
            time.sleep(max(0.0, device_done - clock()))
        elif spec.loop == "releases the GIL":
            time.sleep(_LET_GO_S)
        making = clock()
        batch = make_batch(subject, spec, spec.kept + step, time.time())
        cpu_at = cpu()
        made = clock()
        publish(batch)
        published = clock()
        calls_cpu_s += cpu() - cpu_at
        publish_us.append((published - made) * 1e6)
        iteration_us.append((published - begun - (made - making)) * 1e6)
    threads_cpu_s = time.process_time() - cpu_before - (cpu() - own_cpu_before)
    return LoopResult(
        publish_us=publish_us,
        iteration_us=iteration_us,
        begun_s=begun_s,
        ended_s=time.time(),
        calls_cpu_s=calls_cpu_s,
        threads_cpu_s=threads_cpu_s,
    )


def _publish_all(subject: BenchmarkedPublisher, batches: Sequence[Any]) -> LoopResult:
    begun_s = time.time()
    for batch in batches:
        subject.publish(batch)
    return LoopResult(publish_us=[], iteration_us=[], begun_s=begun_s, ended_s=time.time())


def _measure(subject: BenchmarkedPublisher, spec: LoopSpec, endpoint: str, replay_endpoint: str) -> LoopResult:
    for step in range(spec.kept):
        subject.publish(make_batch(subject, spec, step, 0.0))
        subject.idle()
    time.sleep(_SETTLE_S * min(1.0, spec.kept / _SETTLES))
    subscriber = None
    if spec.subscribes:
        subscriber = Child("subscriber_process", {"endpoint": endpoint, "expected": spec.steps})
        subscriber.wait_until_ready(lambda: _warm_up(subject, spec))
    asks = {"endpoint": replay_endpoint, "asks": spec.replay, "kept": spec.kept}
    replayers = [Child("replay_process", asks) for _ in range(spec.num_clients if spec.replay != "none" else 0)]
    for replayer in replayers:
        replayer.wait_until_ready(subject.idle)
    steps = range(0 if spec.works else spec.steps)
    prebuilt = [subject.make_batch(subject.make_events(step), time.time()) for step in steps]
    cpu_before = time.process_time()
    result = run_steps(subject, spec) if spec.works else _publish_all(subject, prebuilt)
    deliveries = subscriber.result(Delivery) if subscriber else None
    cpu_s = time.process_time() - cpu_before
    replays = join_replays([each.result(Replays) for each in replayers])
    return msgspec.structs.replace(result, deliveries=deliveries, replays=replays, cpu_to_delivery_s=cpu_s)


def join_replays(found: Sequence[Replays]) -> Replays | None:
    if not found:
        return None
    return Replays(
        **{field: list(chain.from_iterable(getattr(each, field) for each in found)) for field in _REPLAY_FIELDS}
    )


_REPLAY_FIELDS = Replays.__struct_fields__


def main() -> None:
    """Run the loop of the command line."""
    spec = msgspec.json.decode(sys.argv[1], type=LoopSpec)
    endpoint, replay_endpoint = free_endpoints(2)
    subject = open_benchmarked_publisher(spec.subject, SHAPES[spec.shape], endpoint, replay_endpoint, spec.buffer_steps)
    try:
        result = _measure(subject, spec, endpoint, replay_endpoint)
    finally:
        subject.close()
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))


if __name__ == "__main__":
    main()
