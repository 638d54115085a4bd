"""Following streams from an asyncio program, such as a router: a thread polls, the event loop is told what changed.

The thread decodes, not the loop, so that a snapshot of many blocks delays no request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from observability.kv_stream.follower import FollowPolicy, StreamListener, StreamPosition, StreamStats
from observability.kv_stream.view import RankSet
from observability.kv_stream.zmq_subscriber import Subscriber, open_subscriber
from scheduler_components.events import Tier
from scheduler_components.kv_events import CurveClientKeys, StreamAddress

__all__ = ["AsyncSubscriber", "open_async_subscriber"]

_POLL_S = 0.05
"""How long closing may wait for a thread that has nothing to read."""


class AsyncSubscriber:
    """Made by ``open_async_subscriber``; used on its event loop, and by its listener.

    A query waits for at most one message to be applied, also while a snapshot of many comes.

    ``async for position in subscriber`` gives each stream's position when it has changed. Changes that nobody has
    taken are merged: a slow reader gets the newest, and nothing piles up. What it missed is in the view.
    """

    def __init__(self, subscriber: Subscriber, loop: asyncio.AbstractEventLoop) -> None:
        self._subscriber = subscriber
        self._loop = loop
        self._lock = threading.Lock()
        self._told: dict[int, StreamPosition] = {}  # by the thread, not yet taken by the loop; guarded by the lock
        self._changed: dict[int, StreamPosition] = {}
        self._news = asyncio.Event()
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
            if not await self._wait_for_news():
                raise StopAsyncIteration
        return self._changed.pop(next(iter(self._changed)))

    async def wait_until(self, rank: int, seq: int, timeout_s: float) -> bool:
        """Wait until the view of ``rank`` has batch ``seq`` and no recovery is under way; False after ``timeout_s``.

        See ``Subscriber.wait_until``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_at(rank, seq):
                    if not await self._wait_for_news():
                        return self._is_at(rank, seq)
        except TimeoutError:
            return self._is_at(rank, seq)
        return True

    def _is_at(self, rank: int, seq: int) -> bool:
        position = self._subscriber.positions()[rank]
        return position.is_settled and position.last_seq >= seq

    async def _wait_for_news(self) -> bool:
        """Wait for a change; False when there will be none. Raises what ended the following thread."""
        if self._following is None or self._following.done():
            if self._following is not None:
                self._following.result()
            return False
        await self._news.wait()
        return True

    def stats(self) -> dict[int, StreamStats]:
        """Each stream's state and counters, by rank."""
        return self._subscriber.stats()

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE, *, group_idx: int | None = None) -> Set[int]:
        """A copy of the hashes that ``rank`` holds on ``tier``; see ``BlockView.blocks``."""
        return self._subscriber.blocks(rank, tier, group_idx=group_idx)

    def match_lengths(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> dict[int, int]:
        """How many of a prompt's leading blocks each rank holds; see ``BlockView.match_lengths``."""
        return self._subscriber.match_lengths(hashes, tier, group_idx=group_idx)

    def best_ranks(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> tuple[int, RankSet]:
        """The longest prefix that any rank holds, and the ranks that do; see ``BlockView.best_ranks``."""
        return self._subscriber.best_ranks(hashes, tier, group_idx=group_idx)

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """The ranks that hold one block on ``tier``."""
        return self._subscriber.ranks_holding(block_hash, tier)

    def start(self, thread: ThreadPoolExecutor) -> None:
        """Begin to follow, on the thread that opened the subscriber."""
        self._following = self._loop.run_in_executor(thread, self._follow)
        self._following.add_done_callback(lambda _: self._wake())

    async def stop(self) -> None:
        """End the following and wait for its thread."""
        self._is_closing = True
        if self._following is not None:
            await asyncio.wait([self._following])

    def _follow(self) -> None:
        before: dict[int, StreamPosition] = {}
        while not self._is_closing:
            self._subscriber.poll(_POLL_S)
            now = self._subscriber.positions()
            changes = {rank: position for rank, position in now.items() if before.get(rank) != position}
            before = now
            if changes:
                self._tell(changes)

    def _tell(self, changes: dict[int, StreamPosition]) -> None:
        with self._lock:
            is_first = not self._told
            self._told.update(changes)
        if is_first:  # else the loop has not yet taken the earlier ones
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._lock:
            told, self._told = self._told, {}
        self._changed.update(told)
        self._wake()

    def _wake(self) -> None:
        """Wake everybody who waits; whoever waits from now on waits for something newer."""
        news, self._news = self._news, asyncio.Event()
        news.set()


@asynccontextmanager
async def open_async_subscriber(
    addresses: Iterable[StreamAddress],
    *,
    policy: FollowPolicy | None = None,
    listener: StreamListener | None = None,
    keys: CurveClientKeys | None = None,
) -> AsyncIterator[AsyncSubscriber]:
    """Follow streams until the block is left; the parameters are those of ``open_subscriber``.

    ``listener`` is called on the following thread, and may ask the subscriber.

    Raises:
        ConfigError: as ``open_subscriber``.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-subscriber") as thread:
        opened = await loop.run_in_executor(
            thread, lambda: open_subscriber(addresses, policy=policy, listener=listener, keys=keys)
        )
        subscriber = AsyncSubscriber(opened, loop)
        subscriber.start(thread)
        try:
            yield subscriber
        finally:
            await subscriber.stop()
            await loop.run_in_executor(thread, opened.close)
