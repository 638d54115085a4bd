"""Fakes of the ports: a clock, sources whose answers are attributes, sinks that keep everything, a device, a network.

Nothing here opens a socket, starts a thread or reads a clock. A sink's ``error`` makes each of its calls raise it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from scheduler_components import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodeError,
    EventBatch,
    KVCacheEvent,
    LoadSnapshot,
    OutputBatch,
    OutputDelta,
    PublisherStats,
)
from scheduler_components.cache import hash_pages
from scheduler_components.testing.interfaces import BLOCK_SIZE, kv_value, token_after
from scheduler_components.values import InputKind, InputMessage, RequestRejection

__all__ = [
    # sources
    "FakeClock",
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
    # what stands around a scheduler
    "ChainEventGenerator",
    "Fault",
    "FaultyNetwork",
    "InstantDevice",
    "PagedModel",
]

B = TypeVar("B")
R = TypeVar("R")
T = TypeVar("T")


# Sources.


class FakeClock:
    """Give it where a component takes ``clock``; set or add to ``now_s`` to let time pass, backwards too."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


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
class FakeLoad:
    """A ``LoadSource``."""

    load: LoadSnapshot = field(default_factory=LoadSnapshot)

    def get_loads(self) -> LoadSnapshot:
        return self.load


class ScriptedEventSource:
    """A ``KvEventSource`` that gives one list of events per call, then nothing."""

    def __init__(self, *steps: Sequence[KVCacheEvent]) -> None:
        self.steps = list(steps)

    def take_events(self) -> Sequence[KVCacheEvent]:
        return self.steps.pop(0) if self.steps else ()


class ListInputSource:
    """An ``InputSource``: ``frames`` are the messages that have come and nobody has taken."""

    def __init__(self, frames: Iterable[bytes] = ()) -> None:
        self.frames = deque(frames)

    def poll(self, most: int) -> Sequence[bytes]:
        return [self.frames.popleft() for _ in range(min(most, len(self.frames)))]


class TextInputReader:
    """An ``MessageDecoder`` of messages like ``request:rid:rest``; what it gives the scheduler is the text."""

    def read(self, frame: bytes) -> InputMessage[str]:
        kind, _, rest = frame.decode(errors="replace").partition(":")
        if kind not in list(InputKind):
            raise DecodeError(f"no kind of message: {kind!r}")
        return InputMessage(InputKind(kind), frame.decode(), rest.partition(":")[0])


# Sinks.


class _Failing:
    """What the sinks share.

    Attributes:
        error: raised from every call while it is set.
        num_closed: calls of ``close`` or ``shutdown``.
    """

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


class ListSink(_Failing, Generic[T]):
    """A ``MetricsSink``, ``KvMetricsSink`` or ``LoadSink``: keeps every value in ``sent``."""

    wants_load = wants_metrics = True

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[T] = []

    def send(self, value: T) -> None:
        self._act()
        self.sent.append(value)

    def record(self, value: T) -> None:
        """``send``, as a ``MetricsSink`` calls it."""
        self.send(value)

    def close(self) -> None:
        self.num_closed += 1
        self._act()


class ListRefusalSink(_Failing):
    """A ``RejectionSink``: the answers to requests that were not let in."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[RequestRejection] = []

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:  # noqa: ARG002
        self._act()
        self.refused.append(refusal)


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


# What stands around a scheduler: its device, its network, and a history of its events.


class InstantDevice(Generic[B, R]):
    """``launch`` keeps the batch, ``wait`` computes its answer; a scheduler with such a device takes no time.

    Args:
        compute: a batch's answer.

    Attributes:
        scripted: answers or errors given first, one per step, instead of computed ones.
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


class PagedModel:
    """Answers ``interfaces.next_token`` as long as the pages of a request hold its KV, and other tokens otherwise.

    A page that was given away too early, shared before it was computed, or never computed changes what comes out.

    Args:
        page_size: tokens per page.

    Attributes:
        kv: the value of each position of each page that was ever written.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[int, list[int]] = {}

    def forward(self, token_ids: Sequence[int], pages: Sequence[int], start: int) -> int:
        """Compute positions ``start`` to ``len(token_ids)`` into their pages; returns the token after them.

        Args:
            token_ids: from the first position of the request on.
            pages: one index per page of them, in order.
            start: positions before it are read from the pages as they are.

        Raises:
            IndexError: there is no page for a position.
            ValueError: no position is left to compute, and so nothing tells the next token.
        """
        if start >= len(token_ids):
            raise ValueError(f"all {len(token_ids)} positions are computed; leave the last one out of a cached prefix")
        kv: list[int] = []
        for position, token in enumerate(token_ids):
            page = self.kv.setdefault(pages[position // self.page_size], [0] * self.page_size)
            place = position % self.page_size
            if position >= start:
                page[place] = kv_value(token, kv[-1] if kv else 0)
            kv.append(page[place])
        return token_after(kv)


class Fault(Enum):
    """What happens to one message."""

    NONE = "it arrives"
    DROP = "it never arrives"
    DUPLICATE = "it arrives twice"
    DELAY = "it arrives after the next message that is not delayed"
    DROP_AND_DUPLICATE_LAST = "the message before it arrives once more, and it does not"


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

    def send(self, message: T) -> list[T]:
        """Send one message; returns what arrives, in order."""
        fault = self.plan[self.num_carried] if self.num_carried < len(self.plan) else Fault.NONE
        self.num_carried += 1
        if fault is Fault.DELAY:
            self._delayed.append(message)
            return []
        if fault is Fault.DROP:
            self.num_lost += 1
            return []
        if fault is Fault.DROP_AND_DUPLICATE_LAST:
            self.num_lost += 1
            return list(self._last)
        self._last = [message]
        return [message, *([message] if fault is Fault.DUPLICATE else []), *self.flush()]

    def flush(self) -> list[T]:
        """What was delayed and comes now."""
        arriving, self._delayed = self._delayed, []
        return arriving


class ChainEventGenerator:
    """Makes events that break no rule of the wire: a chain of blocks that grows, loses its end, and grows again.

    Attributes:
        standing: the hashes that whoever applied all events so far holds, root first.
    """

    def __init__(self) -> None:
        self.live_hashes: list[int] = []
        self._tokens: list[int] = []

    def store(self, *tokens: int) -> BlockStored:
        """Append one block of ``BLOCK_SIZE`` tokens to the chain; the tokens default to the block's depth."""
        depth = len(self.live_hashes)
        page = tokens or (depth, depth + 1)
        parent = self.live_hashes[-1] if self.live_hashes else None
        self._tokens += page
        self.live_hashes.append(hash_pages(self._tokens, BLOCK_SIZE)[-1])
        return BlockStored((self.live_hashes[-1],), parent, page, BLOCK_SIZE, None)

    def remove(self) -> BlockRemoved:
        """Remove the chain's last block."""
        del self._tokens[-BLOCK_SIZE:]
        return BlockRemoved((self.live_hashes.pop(),))

    def clear(self) -> AllBlocksCleared:
        """Remove everything."""
        self.live_hashes.clear()
        self._tokens.clear()
        return AllBlocksCleared()

    def next(self, number: int) -> KVCacheEvent:
        """Event ``number`` of a mixed run: mostly stores, every fifth a removal, every fortieth a clear."""
        if number % 40 == 39:
            return self.clear()
        if number % 5 == 4 and self.live_hashes:
            return self.remove()
        return self.store()
