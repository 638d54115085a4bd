"""A clock that stands still until it is moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from scheduler_components import (
    DisaggregationLoad,
    EventBatch,
    KVCacheEvent,
    KvMetrics,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    OutputBatch,
    OutputDelta,
    PublisherStats,
    QueueLoad,
    SchedulerStats,
    SpeculativeLoad,
)

__all__ = [
    "FakeClock",
    "InstantDevice",
    "Fault",
    "FaultyNetwork",
    "ListEventSink",
    "ListKvMetricsSink",
    "ListLoadSink",
    "ListMetricsSink",
    "ListOutputSink",
    "FakeLoad",
    "FakeParts",
    "FakePool",
    "FakeQueues",
    "FakeRates",
    "FakeRequest",
    "ScriptedEvents",
]


class FakeClock:
    """Give it where a component takes ``clock``; set or add to ``now_s`` to let time pass, backwards too."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


# A device that answers at once, with what it was told to answer.

B = TypeVar("B")
R = TypeVar("R")


class InstantDevice(Generic[B, R]):
    """``launch`` keeps the batch, ``wait`` computes its answer; a scheduler with such a device takes no time.

    Args:
        compute: a batch's answer.

    Attributes:
        scripted: answers or errors given first, one a step, instead of computed ones.
        launched: every batch so far.
    """

    def __init__(self, compute: Callable[[B], R]) -> None:
        self._compute = compute
        self.scripted: list[R | Exception] = []
        self.launched: list[B] = []

    def launch(self, batch: B) -> None:
        """Begin a step."""
        self.launched.append(batch)

    def wait(self) -> R:
        """End it.

        Raises:
            IndexError: nothing was launched; otherwise what ``scripted`` says.
        """
        batch = self.launched[-1]
        if not self.scripted:
            return self._compute(batch)
        answer = self.scripted.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


# A network that loses, repeats and delays messages by a plan: no socket, no clock, the same every time.

T = TypeVar("T")


class Fault(Enum):
    """What happens to one message."""

    NONE = "it arrives"
    LOSE = "it never arrives"
    REPEAT = "it arrives twice"
    DELAY = "it arrives after the next message that is not delayed"
    REPLACE_LAST = "the message before it arrives once more, and it does not"


@dataclass
class FaultyNetwork(Generic[T]):
    """Carries messages one way; message ``i`` meets ``plan[i]``, and those beyond the plan meet no fault.

    ``carry`` returns what arrives now; ``settle`` what was still under way. ``num_lost`` counts what never will be.
    """

    plan: Sequence[Fault] = ()
    num_carried: int = 0
    num_lost: int = 0
    _delayed: list[T] = field(default_factory=list)
    _last: list[T] = field(default_factory=list)

    def carry(self, message: T) -> list[T]:
        """Send one message; returns what arrives, in order."""
        fault = self.plan[self.num_carried] if self.num_carried < len(self.plan) else Fault.NONE
        self.num_carried += 1
        if fault is Fault.DELAY:
            self._delayed.append(message)
            return []
        if fault is Fault.LOSE:
            self.num_lost += 1
            return []
        if fault is Fault.REPLACE_LAST:
            self.num_lost += 1
            return list(self._last)
        self._last = [message]
        return [message, *([message] if fault is Fault.REPEAT else []), *self.settle()]

    def settle(self) -> list[T]:
        """What was delayed and comes now."""
        arriving, self._delayed = self._delayed, []
        return arriving


# Sinks that keep everything, and fail when they are told to.


class _Failing:
    """Raises ``error`` from every call while it is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_closed = 0

    def _act(self) -> None:
        if self.error is not None:
            raise self.error


class ListEventSink(_Failing):
    """A ``KvEventSink``; ``stats`` says that ``num_dropped`` batches were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[EventBatch] = []
        self.num_idled = 0
        self.num_dropped = 0

    @property
    def events(self) -> list[KVCacheEvent]:
        """All events in order."""
        return [event for batch in self.batches for event in batch.events]

    def publish(self, events: EventBatch) -> None:
        self._act()
        self.batches.append(events)

    def idle(self) -> None:
        self._act()
        self.num_idled += 1

    def stats(self) -> PublisherStats:
        self._act()
        return PublisherStats(
            batches_sent=len(self.batches), events_sent=len(self.events), batches_dropped=self.num_dropped
        )

    def shutdown(self) -> None:
        self.num_closed += 1
        self._act()


class ListMetricsSink(_Failing):
    """A ``MetricsSink``."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: list[SchedulerStats] = []

    def record(self, stats: SchedulerStats) -> None:
        self._act()
        self.stats.append(stats)


class ListKvMetricsSink(_Failing):
    """A ``KvMetricsSink``."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[KvMetrics] = []

    def send(self, metrics: KvMetrics) -> None:
        self._act()
        self.sent.append(metrics)

    def close(self) -> None:
        self.num_closed += 1
        self._act()


class ListLoadSink(_Failing):
    """A ``LoadSink``."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[LoadSnapshot] = []

    def send(self, load: LoadSnapshot) -> None:
        self._act()
        self.sent.append(load)

    def close(self) -> None:
        self.num_closed += 1
        self._act()


class ListOutputSink(_Failing):
    """An ``OutputSink``; takes nothing while ``is_full``."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[OutputBatch] = []
        self.is_full = False

    @property
    def deltas(self) -> list[OutputDelta]:
        """The news of all requests in order."""
        return [delta for batch in self.batches for delta in batch.deltas]

    def is_ready(self) -> bool:
        self._act()
        return not self.is_full

    def send(self, batch: OutputBatch) -> bool:
        self._act()
        self.batches.append(batch)
        return True

    def close(self) -> None:
        self.num_closed += 1
        self._act()


# Sources whose answers are plain attributes.


@dataclass
class FakeRequest:
    """A ``QueuedRequest``. Requests of equal counts are equal, so that a queue which compares them is caught."""

    num_input_tokens: int = 100
    num_cached_tokens: int = 0


@dataclass
class FakeQueues:
    """A ``QueueSource``."""

    running: Any = field(default_factory=list)
    waiting: Any = field(default_factory=list)
    max_running_requests: int = 8
    num_chunked_tokens_left: int = 0


@dataclass
class FakePool:
    """A ``PoolSource``."""

    page_size: int = 16
    capacity_tokens: int = 1600
    used_tokens: int = 400


@dataclass
class FakeRates:
    """A ``RateSource``."""

    gen_throughput: float = 12.5
    cache_hit_rate: float = 0.75


@dataclass
class FakeParts:
    """A ``LoadPartsSource``."""

    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None

    def queue_load(self) -> QueueLoad | None:
        return self.queues

    def disaggregation_load(self) -> DisaggregationLoad | None:
        return self.disaggregation

    def lora_load(self) -> LoraLoad | None:
        return self.lora

    def speculative_load(self) -> SpeculativeLoad | None:
        return self.speculative

    def memory_load(self) -> MemoryLoad | None:
        return self.memory


@dataclass
class FakeLoad:
    """A ``LoadSource``."""

    load: LoadSnapshot = field(default_factory=LoadSnapshot)

    def get_loads(self) -> LoadSnapshot:
        return self.load


class ScriptedEvents:
    """A ``KvEventSource`` that gives one list of events a drain, then nothing."""

    def __init__(self, *steps: Sequence[KVCacheEvent]) -> None:
        self.steps = list(steps)

    def take_events(self) -> Sequence[KVCacheEvent]:
        return self.steps.pop(0) if self.steps else ()
