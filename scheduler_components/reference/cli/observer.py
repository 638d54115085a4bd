"""The observer: a thread that knows an engine by its URL alone, and follows its event streams as a router would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from observability.kv_stream import StreamStats, Subscriber, Tier, discover, open_subscriber
from scheduler_components.kv_events import StreamAddress
from scheduler_components.reference.cli.run_report import StreamEvidence

__all__ = [
    "Observer",
    "open_observer",
]

_POLL_S = 0.1  # how long a request to stop may wait

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Observer:
    """Made by ``open_observer``.

    Attributes:
        addresses: the streams that the engine advertises.
        subscriber: belongs to ``thread``; its statistics and view may be read from any.
        thread: the one that follows.
    """

    addresses: tuple[StreamAddress, ...]
    subscriber: Subscriber
    thread: ThreadPoolExecutor
    _stopping: bool = False
    _following: Future[None] = field(init=False)

    def start(self) -> None:
        """Begin to follow."""
        self._following = self.thread.submit(self._follow)

    def stop(self) -> None:
        """Ask the thread to stop; the view stays readable."""
        self._stopping = True

    def stats(self) -> dict[int, StreamStats]:
        """Each stream's state and counters, by rank."""
        return self.subscriber.stats()

    async def settle(self, last_sequences: Mapping[int, int], *, timeout_s: float) -> list[StreamEvidence]:
        """Follow every stream up to its last batch, then stop; what was seen by then, whether or not it got there.

        Args:
            last_sequences: rank of the stream to the number of the last batch that was published on it.
            timeout_s: for all streams together.
        """
        self.stop()
        await asyncio.wrap_future(self._following)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        for rank, sequence in last_sequences.items():
            left_s = max(0.0, deadline_s - loop.time())
            await loop.run_in_executor(self.thread, self.subscriber.wait_until, rank, sequence, left_s)
        stats = self.stats()
        return [
            StreamEvidence(
                stats=stats[rank],
                published_sequence=sequence,
                blocks=frozenset(self.subscriber.blocks(rank)),
                host_blocks=frozenset(self.subscriber.blocks(rank, Tier.HOST)),
                stored_blocks=frozenset(self.subscriber.blocks(rank, Tier.STORAGE)),
            )
            for rank, sequence in last_sequences.items()
        ]

    def _follow(self) -> None:
        while not self._stopping:
            self.subscriber.poll(_POLL_S)


@asynccontextmanager
async def open_observer(url: str) -> AsyncIterator[Observer]:
    """Discover the streams of the engine at ``url`` and follow them until the block is left.

    Raises:
        NoStreamsError: the engine publishes no events that could be followed.
        StartError, DecodeError: it cannot be reached, or what it advertises cannot be dialled.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="observer") as thread:
        addresses = await _in_thread(thread, lambda: discover(url))
        subscriber = await _in_thread(thread, lambda: open_subscriber(addresses))
        observer = Observer(addresses=addresses, subscriber=subscriber, thread=thread)
        observer.start()
        try:
            yield observer
        finally:
            observer.stop()
            thread.submit(subscriber.close).result()  # after the poll that is under way


async def _in_thread(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work)
