"""A scheduler among fakes, for the tests of what it does in single situations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components import BlockStored, EventBatch, KVCacheEvent, ParallelState
from scheduler_components.kv_events import EventPublisher
from scheduler_components.scheduling.composition import Clocks, SchedulerSinks
from scheduler_components.testing import ListOutputSink
from scheduler_components.values import KvMetrics, SchedulerStats
from scheduler_engine.device.device import DeviceOutput, ScheduledBatch, SimulatedModel
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler, StepResult

MODEL = SimulatedModel()


class InstantDevice:
    """A device without delay that records the calls around it."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.answers: list[tuple[int, ...] | DeviceOutput | Exception] = []  # given instead of the model's, one a step

    def launch(self, batch: ScheduledBatch) -> None:
        self.journal.append("launch")
        self.batch = batch

    def wait(self) -> DeviceOutput:
        self.journal.append("wait")
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer if isinstance(answer, DeviceOutput) else DeviceOutput(answer)
        return DeviceOutput(tuple(MODEL.next_token(chunk.request.rid, chunk.end) for chunk in self.batch.chunks))


class JournalingPublisher(EventPublisher):
    """Keeps batches; notes what happens around it."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__()
        self.journal = journal
        self.batches: list[EventBatch] = []

    def publish(self, events: EventBatch) -> None:
        self.journal.append("publish")
        self.batches.append(events)

    def idle(self) -> None:
        self.journal.append("idle")

    def shutdown(self) -> None:
        self.journal.append("shutdown")

    def events(self) -> list[KVCacheEvent]:
        return [event for batch in self.batches for event in batch.events]


class StatsSink:
    """Keeps statistics and KvMetrics."""

    wants_reports = True

    def __init__(self) -> None:
        self.stats: list[SchedulerStats] = []
        self.kv_metrics: list[KvMetrics] = []
        self.closed = False

    def record(self, stats: SchedulerStats) -> None:
        self.stats.append(stats)

    def send(self, metrics: KvMetrics) -> None:
        self.kv_metrics.append(metrics)

    def close(self) -> None:
        self.closed = True


class SchedulerBench:
    """A scheduler among fakes."""

    def __init__(self, parallel: ParallelState | None = None, **sizes: int | float) -> None:
        self.journal: list[str] = []
        self.device = InstantDevice(self.journal)
        self.publisher = JournalingPublisher(self.journal)
        self.sink = StatsSink()
        self.outputs = ListOutputSink()
        self.scheduler = Scheduler.compose(
            SchedulerConfig(**{"page_size": 4, "kv_tokens": 64, **sizes}),
            parallel if parallel is not None else ParallelState.trivial(),
            self.device,
            sinks=SchedulerSinks(events=self.publisher, outputs=self.outputs, metrics=self.sink, kv_metrics=self.sink),
            clocks=Clocks(wall=lambda: 1_700_000_000.0, monotonic=lambda: 0.0),
        )

    def submit(self, rid: str, prompt: list[int] | range, max_new: int = 1) -> EngineRequest:
        request = EngineRequest(rid, prompt, SamplingLimits(max_new_tokens=max_new))
        self.scheduler.submit(request)
        return request

    def drain(self) -> list[StepResult]:
        return list(self.scheduler.drain())

    def stored_tokens(self) -> list[int]:
        return [
            token for event in self.publisher.events() if isinstance(event, BlockStored) for token in event.token_ids
        ]

    def foretold(self, request: EngineRequest) -> tuple[int, ...]:
        """What the device generates for a request that nothing but its length ends."""
        first = request.num_prompt_tokens
        return tuple(MODEL.next_token(request.rid, first + index) for index in range(request.limits.max_new_tokens))


@pytest.fixture
def make_bench() -> Callable[..., SchedulerBench]:
    """``make_bench(parallel=None, **sizes)``: by default pages of 4 tokens and a pool of 16."""
    return SchedulerBench
