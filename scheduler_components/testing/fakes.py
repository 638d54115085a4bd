"""Fakes of the ports: sources whose answers are attributes, and sinks that keep everything.

Nothing here opens a socket, starts a thread or reads a clock. A sink's ``error`` makes each of its calls raise it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from scheduler_components import DecodeError, EventBatch, KVCacheEvent
from scheduler_components.values import (
    InputKind,
    InputMessage,
    LoadSnapshot,
    OutputBatch,
    OutputDelta,
    PublisherStats,
    RequestRejection,
)

__all__ = [
    # sources
    "FakeLoad",
    "FakePool",
    "FakeQueues",
    "FakeRequest",
    "ListInputSource",
    "ScriptedEventSource",
    "TextInputReader",
    # sinks
    "ListEventSink",
    "ListOutputSink",
    "ListRefusalSink",
    "ListSink",
]

T = TypeVar("T")


# Sources.


@dataclass
class FakeRequest:
    """A ``QueuedRequest``. Requests with equal counts are equal, so that tests find a queue that compares requests."""

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
class FakeLoad:
    """A ``LoadSource``."""

    load: LoadSnapshot = field(default_factory=LoadSnapshot)

    def get_loads(self) -> LoadSnapshot:
        return self.load


class ScriptedEventSource:
    """A ``KvEventSource`` that returns one list of events per call, then none."""

    def __init__(self, *steps: Sequence[KVCacheEvent]) -> None:
        self.steps = list(steps)

    def take_events(self) -> Sequence[KVCacheEvent]:
        return self.steps.pop(0) if self.steps else ()


class ListInputSource:
    """An ``InputSource``: ``frames`` are the messages that have not been polled."""

    def __init__(self, frames: Iterable[bytes] = ()) -> None:
        self.frames = deque(frames)

    def poll(self, most: int) -> Sequence[bytes]:
        return [self.frames.popleft() for _ in range(min(most, len(self.frames)))]


class TextInputReader:
    """A ``MessageDecoder`` of messages like ``request:rid:rest``; the scheduler receives the text."""

    def read(self, frame: bytes) -> InputMessage[str]:
        kind, _, rest = frame.decode(errors="replace").partition(":")
        if kind not in list(InputKind):
            raise DecodeError(f"unknown kind of message: {kind!r}")
        return InputMessage(InputKind(kind), frame.decode(), rest.partition(":")[0])


# Sinks.


class _FailingSink:
    """Base of the sinks.

    Attributes:
        error: every call raises it while it is set.
        num_closed: calls of ``close`` or ``shutdown``.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_closed = 0

    def _act(self) -> None:
        if self.error is not None:
            raise self.error


class ListEventSink(_FailingSink):
    """A ``KvEventSink``; ``stats`` reports ``num_dropped`` dropped batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[EventBatch] = []
        self.num_idled = 0
        self.num_dropped = 0

    @property
    def events(self) -> list[KVCacheEvent]:
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


class ListSink(_FailingSink, Generic[T]):
    """A ``MetricsSink`` or ``ReportSink`` that keeps every value in ``sent``."""

    wants_reports = True

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[T] = []

    def send(self, value: T) -> None:
        self._act()
        self.sent.append(value)

    def record(self, value: T) -> None:
        """Keep a value, as a ``MetricsSink``."""
        self.send(value)

    def close(self) -> None:
        self.num_closed += 1
        self._act()


class ListRefusalSink(_FailingSink):
    """Keeps the rejections: its ``reject`` is for an ``InputBlocker``."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[RequestRejection] = []

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:
        self._act()
        self.refused.append(refusal)


class ListOutputSink(_FailingSink):
    """An ``OutputSink`` that is not ready while ``is_full``."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[OutputBatch] = []
        self.is_full = False

    @property
    def deltas(self) -> list[OutputDelta]:
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
