"""Following streams from an asyncio program, such as a router.

A thread polls and decodes, so that a snapshot of many blocks does not delay the event loop. The loop receives the
changed positions.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from observability.kv_stream.batch_applier import StreamListener
from observability.kv_stream.follower import FollowPolicy
from observability.kv_stream.stream_stats import StreamPosition
from observability.kv_stream.subscriber_base import StreamQueries
from observability.kv_stream.view import BlockView
from observability.kv_stream.zmq_subscriber import Subscriber, open_subscriber
from scheduler_components.kv_events import CurveClientKeys, StreamAddress

__all__ = ["AsyncSubscriber", "open_async_subscriber"]

_POLL_S = 0.05
"""How long closing may wait for a thread without input."""


class AsyncSubscriber(StreamQueries):
    """Follows streams for one event loop. ``open_async_subscriber`` creates it.

    Its queries are those of ``Subscriber``. They wait for at most one message to be applied, even during a snapshot.

    ``async for position in subscriber`` yields each stream's position after it has changed. Changes that the program
    has not read are merged: a slow reader gets the newest position, and no queue grows. The view has every change.
    """

    def __init__(self, subscriber: Subscriber, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(subscriber._followed, subscriber._view, subscriber._lock)
        self._subscriber = subscriber
        self._loop = loop
        self._handover_lock = threading.Lock()
        self._handover: dict[int, StreamPosition] = {}  # from the thread, not yet taken by the loop; under the lock
        self._changed: dict[int, StreamPosition] = {}
        self._has_changed = asyncio.Event()
        self._is_closing = False
        self._following: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncSubscriber:
        return self

    async def __anext__(self) -> StreamPosition:
        """Wait for the next change.

        Raises:
            StopAsyncIteration: the subscriber was closed.
        """
        while not self._changed:
            if not await self._wait_for_change():
                raise StopAsyncIteration
        return self._changed.pop(next(iter(self._changed)))

    async def wait_until(self, rank: int, seq: int, timeout_s: float) -> bool:
        """Wait until the view of ``rank`` has batch ``seq`` and no recovery is in progress; False after ``timeout_s``.

        See ``Subscriber.wait_until``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_at(rank, seq):
                    if not await self._wait_for_change():
                        return self._is_at(rank, seq)
        except TimeoutError:
            return self._is_at(rank, seq)
        return True

    def _is_at(self, rank: int, seq: int) -> bool:
        position = self.positions()[rank]
        return position.is_settled and position.last_seq >= seq

    async def _wait_for_change(self) -> bool:
        """Wait for a change; False when there will be none. Raise the error that ended the polling thread."""
        if self._following is None or self._following.done():
            if self._following is not None:
                self._following.result()
            return False
        await self._has_changed.wait()
        return True

    def start(self, thread: ThreadPoolExecutor) -> None:
        """Start to poll on the thread that opened the subscriber."""
        self._following = self._loop.run_in_executor(thread, self._follow)
        self._following.add_done_callback(lambda _: self._wake())

    async def stop(self) -> None:
        """Stop polling and wait for the thread."""
        self._is_closing = True
        if self._following is not None:
            await asyncio.wait([self._following])

    def _follow(self) -> None:
        before: dict[int, StreamPosition] = {}
        while not self._is_closing:
            self._subscriber.poll(_POLL_S)
            now = self.positions()
            changes = {rank: position for rank, position in now.items() if before.get(rank) != position}
            before = now
            if changes:
                self._hand_over(changes)

    def _hand_over(self, changes: dict[int, StreamPosition]) -> None:
        with self._handover_lock:
            is_first = not self._handover
            self._handover.update(changes)
        if is_first:  # otherwise the loop has not yet taken the earlier ones, and takes these with them
            self._loop.call_soon_threadsafe(self._take_changes)

    def _take_changes(self) -> None:
        with self._handover_lock:
            changes, self._handover = self._handover, {}
        self._changed.update(changes)
        self._wake()

    def _wake(self) -> None:
        """Wake every waiting coroutine. One that waits from now on waits for the next change."""
        has_changed, self._has_changed = self._has_changed, asyncio.Event()
        has_changed.set()


@asynccontextmanager
async def open_async_subscriber(
    addresses: Iterable[StreamAddress],
    *,
    policy: FollowPolicy | None = None,
    listener: StreamListener | None = None,
    keys: CurveClientKeys | None = None,
    view: BlockView | None = None,
) -> AsyncIterator[AsyncSubscriber]:
    """Follow streams until the end of the block. The parameters are those of ``open_subscriber``.

    The polling thread calls ``listener``, which may query the subscriber.

    Raises:
        ConfigError: as ``open_subscriber``.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-subscriber") as thread:
        opened = await loop.run_in_executor(
            thread, lambda: open_subscriber(addresses, policy=policy, listener=listener, keys=keys, view=view)
        )
        subscriber = AsyncSubscriber(opened, loop)
        subscriber.start(thread)
        try:
            yield subscriber
        finally:
            await subscriber.stop()
            await loop.run_in_executor(thread, opened.close)
