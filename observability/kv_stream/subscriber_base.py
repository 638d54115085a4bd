"""The common part of all subscribers: queries from any thread, and waiting for a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from observability.kv_stream.rank_set import RankSet
from observability.kv_stream.stream_stats import MAX_STREAMS, StreamPosition, StreamStats
from observability.kv_stream.view import BlockView
from scheduler_components import ConfigError
from scheduler_components.events import Tier

__all__ = ["FollowedStream", "StreamQueries", "SubscriberBase", "check_ranks"]

_SWEEP_PAUSE_S = 0.001
"""Pause between two slices of a sweep, in which other threads get the processor and the lock."""


def check_ranks(ranks: Sequence[int]) -> None:
    """Check the ranks of a subscriber's addresses.

    Raises:
        ConfigError: no address, too many, or two with one rank.
    """
    if not 0 < len(ranks) <= MAX_STREAMS:
        raise ConfigError("addresses", len(ranks), "is not a number of streams", f"give 1 to {MAX_STREAMS} addresses")
    if len(set(ranks)) != len(ranks):
        raise ConfigError("addresses", ranks, "name a rank twice", "give each stream its own rank")


class FollowedStream(Protocol):
    """The part of a stream that queries read."""

    @property
    def position(self) -> StreamPosition: ...

    def stats(self) -> StreamStats: ...


class StreamQueries:
    """Queries on the view and the streams of a subscriber, from any thread.

    A query waits until one message is applied, not until a whole snapshot is. A listener may query too.
    """

    def __init__(
        self, streams: Mapping[int, FollowedStream], view: BlockView, lock: AbstractContextManager[None]
    ) -> None:
        self._followed = streams
        self._view = view
        self._lock = lock

    def positions(self) -> dict[int, StreamPosition]:
        """Return the position of each stream's view, by rank."""
        with self._lock:
            return {rank: stream.position for rank, stream in self._followed.items()}

    def stats(self) -> dict[int, StreamStats]:
        """Return each stream's state and counters, by rank."""
        with self._lock:
            return {rank: stream.stats() for rank, stream in self._followed.items()}

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE, *, group_idx: int | None = None) -> Set[int]:
        """Return a copy of the hashes that ``rank`` holds on ``tier``; see ``BlockView.blocks``."""
        with self._lock:
            return self._view.blocks(rank, tier, group_idx=group_idx)

    def match_lengths(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> dict[int, int]:
        """Return how many of a prompt's leading blocks each rank holds; see ``BlockView.match_lengths``."""
        with self._lock:
            return self._view.match_lengths(hashes, tier, group_idx=group_idx)

    def best_ranks(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> tuple[int, RankSet]:
        """Return the longest prefix that any rank holds, and the ranks that hold it; see ``BlockView.best_ranks``."""
        with self._lock:
            return self._view.best_ranks(hashes, tier, group_idx=group_idx)

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """Return the ranks that hold one block on ``tier``."""
        with self._lock:
            return self._view.ranks_holding(block_hash, tier)


class SubscriberBase(StreamQueries, ABC):
    """Follows streams and keeps one view of them.

    ``poll`` and ``wait_until`` belong to one thread, which also closes. The queries may be called from any thread.

    The subscribers of each transport inherit from this class, because users call all of its methods on either one.
    """

    def __init__(
        self,
        streams: Mapping[int, FollowedStream],
        view: BlockView,
        lock: AbstractContextManager[None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(streams, view, lock)
        self._clock = clock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` for input, then apply it. Return True if there was any."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection; the view and the counters stay readable. Safe to call twice."""

    def wait_until(self, rank: int, seq: int, timeout_s: float) -> bool:
        """Poll until the view of ``rank`` has batch ``seq`` and no recovery is in progress; False after ``timeout_s``.

        The stream is then ``LIVE`` or ``PARTIAL``; ``stats`` shows which. ``seq`` -1 waits for the first contact, after
        which a ZeroMQ stream may also be ``SYNCING``: nothing was published yet.
        """
        stream = self._followed[rank]
        deadline_s = self._clock() + timeout_s
        while True:
            position = stream.position
            if position.is_settled and position.last_seq >= seq:
                return True
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return False
            self.poll(left_s)

    def _sweep(self) -> None:
        """Sweep out a slice of the cleared blocks."""
        if not self._view.is_swept:
            with self._lock:
                self._view.sweep()

    def _until_sweep_s(self, due_in_s: float) -> float:
        """Return ``due_in_s``, or less while a sweep is in progress."""
        return due_in_s if self._view.is_swept else min(due_in_s, _SWEEP_PAUSE_S)
