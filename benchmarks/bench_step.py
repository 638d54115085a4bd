"""Measure what a step pays besides events: statistics, load, request times.

The calls are those of the reference scheduler, with a publisher and running requests. The figures are the processor
time of this thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from observability import PrometheusSink
from scheduler_components import ParallelState
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.kv_events import open_event_publisher
from scheduler_components.load import TokenCountedQueue
from scheduler_components.metrics import open_shm_metrics_sink
from scheduler_components.ports import MetricsSink, NullMetricsSink
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import IntegrityConfig, SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NAME = "step"
RUNNING = (16, 64, 256)
_TOKENS_EACH = 100
_STEPS_BEFORE = 20
_PARALLEL = ParallelState.trivial()


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want their engines
    """Time ``emit`` over both sinks, the load inquiry, latencies, the pool checks, and the sort of a queue."""
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        rows = [*_emits(scale, Path(folder))]
    return [*rows, *_inquiries(scale), _latencies(scale), *_guards(scale), *_sorting(scale)]


@contextmanager
def running_scheduler(
    num_running: int,
    sink: MetricsSink | None = None,
    *,
    bind: str = "",
    integrity: IntegrityConfig | None = None,
) -> Iterator[Scheduler]:
    """Make a reference scheduler with this many decoding requests. A publisher binds at ``bind`` if given."""
    config = f'{{"publisher": "zmq", "endpoint": "{bind}"}}' if bind else None
    scheduler = Scheduler.compose(
        SchedulerConfig(
            page_size=16,
            kv_tokens=1 << 18,
            max_running_requests=256,
            max_prefill_tokens=1 << 17,
            integrity=integrity or IntegrityConfig(),
        ),
        _PARALLEL,
        SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None),
        sinks=SchedulerSinks(
            events=open_event_publisher(config, parallel=_PARALLEL),
            metrics=sink or NullMetricsSink(),
        ),
    )
    limits = SamplingLimits(max_new_tokens=500, ignore_eos=True)
    for number in range(num_running):
        first = number * _TOKENS_EACH
        scheduler.submit(EngineRequest(f"r{number}", range(first, first + _TOKENS_EACH), limits))
    try:
        for _ in range(_STEPS_BEFORE):
            scheduler.step()
        yield scheduler
    finally:
        scheduler.close()


def _emits(scale: Scale, folder: Path) -> Iterator[Measurement]:
    shared = open_shm_metrics_sink(folder, _PARALLEL)
    sinks: dict[str, tuple[MetricsSink, float]] = {
        "in process": (PrometheusSink(CollectorRegistry()), 1.0),
        "shared memory": (shared, 4.0),
    }
    for name, (sink, goal_us) in sinks.items():
        with running_scheduler(64, sink, bind=f"ipc://{folder}/{name[:2]}") as scheduler:
            calls = {
                "ours": scheduler.metrics.emit,
                "load": scheduler.load.get_loads,
                "counters": scheduler.kv_events.stats,
            }
            us = _us(_measured(calls, scale, 20_000))
        peers = {"its load inquiry": us["load"], "the publisher's counters alone": us["counters"]}
        what = f"emit(), 64 running, publisher attached, {name}"
        yield Measurement(NAME, what, "us", us["ours"], peers, Goal(goal_us))
    shared.close()


def _inquiries(scale: Scale) -> Iterator[Measurement]:
    for num_running in RUNNING:
        with running_scheduler(num_running) as scheduler:
            us = _us(_measured({"ours": scheduler.load.get_loads}, scale, 20_000))
        yield Measurement(NAME, f"get_loads(), {num_running} running", "us", us["ours"], {}, Goal(0.8))


def _latencies(scale: Scale) -> Measurement:
    """Time steps in which each request got one token."""
    with running_scheduler(64) as scheduler:
        requests, book, ones = list(scheduler.queues.running), scheduler.request_metrics, [1] * 64

        def one_by_one() -> None:
            for request in requests:
                book.on_tokens([request], [1])

        calls = {"ours": lambda: book.on_tokens(requests, ones), "one by one": one_by_one}
        us = _us(_measured(calls, scale, 2_000))
    peers = {"one by one": us["one by one"]}
    return Measurement(NAME, "latencies and rates, a step of 64 running", "us", us["ours"], peers, Goal(15.0))


def _guards(scale: Scale) -> Iterator[Measurement]:
    """Time the pool checks of a step, and whole steps with and without them."""
    every_step = IntegrityConfig(checks=CheckPolicy(count_every_steps=1), owners_one_in=1)
    with running_scheduler(64) as usual, running_scheduler(64, integrity=every_step) as thorough:
        ledger = _us(_measured({"ours": _ledger_of(usual), "all recorded": _ledger_of(thorough)}, scale, 10_000))
        checks = _us(_measured({"ours": _checks_of(usual), "in each step": _checks_of(thorough)}, scale, 5_000))
    peers = {"all recorded": ledger["all recorded"]}
    what = "allocation log, a step of 64 running, one page of four recorded"
    yield Measurement(NAME, what, "us", ledger["ours"], peers, Goal(2.0))
    what = "checks and phases, a step of 64 running, counts every 16 steps"
    yield Measurement(NAME, what, "us", checks["ours"], {"in each step": checks["in each step"]}, Goal(2.0))
    without = IntegrityConfig(checks=CheckPolicy(count_every_steps=10**9), owners_one_in=0)
    with running_scheduler(64) as usual, running_scheduler(64, integrity=without) as bare:
        us = _us(_measured({"ours": usual.step, "without": bare.step}, scale, 80))
    yield Measurement(
        NAME, "a step of 64 running, with checks and allocation log", "us", us["ours"], {"without": us["without"]}
    )


def _ledger_of(scheduler: Scheduler) -> Callable[[], None]:
    """Do the logging of a decode step of 64 requests, four of which allocate a page."""
    allocation_log, growing, page = scheduler.integrity.allocation_log, scheduler.queues.running[:4], [1]

    def step() -> None:
        for request in growing:
            if request.is_sampled:
                allocation_log.record("allocated", "full", request.rid, "RequestKvCache.grow", page)

    return step


def _checks_of(scheduler: Scheduler) -> Callable[[], None]:
    progress, checker = scheduler.integrity.progress, scheduler.integrity.checker

    def step() -> None:
        for phase in ("agreement", "batch", "device", "results", "report", "idle"):
            progress.enter_phase(phase)
        checker.after_step(is_idle=False)

    return step


def _sorting(scale: Scale) -> Iterator[Measurement]:
    class Waiting:
        num_input_tokens, num_cached_tokens = 1_000, 300

        def __init__(self, priority: int) -> None:
            self.priority = priority

    requests = [Waiting(number * 7919 % 10_000) for number in range(10_000)]
    queue, plain = TokenCountedQueue(requests), list(requests)

    def by_priority(request: Waiting) -> int:
        return request.priority

    sorts = {"ours": lambda: queue.sort(key=by_priority), "a list": lambda: plain.sort(key=by_priority)}
    walks = {"ours": lambda: [None for _ in queue], "a list": lambda: [None for _ in plain]}
    for what, calls in (("sort", sorts), ("a walk over", walks)):
        found = _measured(calls, scale, 20)
        ms = {name: [ns / 1e6 for ns in samples] for name, samples in found.items()}
        yield Measurement(NAME, f"{what} a TokenCountedQueue of 10,000", "ms", ms["ours"], {"a list": ms["a list"]})


def _measured(calls: Mapping[str, Callable[[], object]], scale: Scale, number: int) -> dict[str, list[float]]:
    return measure_interleaved(calls, turns=scale.turns, number=scale.of(number), clock_ns=time.thread_time_ns)


def _us(found: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
