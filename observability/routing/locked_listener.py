"""LockedListener: lets the polling thread of a subscriber feed a router that another thread uses."""

from __future__ import annotations

from contextlib import AbstractContextManager

from observability.kv_stream import NullStreamListener, StreamListener
from scheduler_components.kv_events import DecodedBatch

__all__ = ["LockedListener"]


class LockedListener(NullStreamListener):
    """Passes on the changes of a view under a lock. Every other use of the router needs the same lock.

    Args:
        inner: a ``RouterListener``.
        lock: a reentrant lock is not needed.
    """

    def __init__(self, inner: StreamListener, lock: AbstractContextManager[object]) -> None:
        self._inner, self._lock = inner, lock
        self._in_snapshot: set[int] = set()

    def close(self) -> None:
        """Pass on nothing more, although the subscriber may still be polled. A snapshot that has begun is discarded."""
        with self._lock:
            for rank in self._in_snapshot:
                self._inner.on_snapshot_end(rank, was_used=False)
            self._inner = NullStreamListener()

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        with self._lock:
            self._inner.on_batch_applied(rank, seq, batch, replayed=replayed)

    def on_view_cleared(self, rank: int, reason: str) -> None:
        with self._lock:
            self._inner.on_view_cleared(rank, reason)

    def on_snapshot_begin(self, rank: int) -> None:
        with self._lock:
            self._in_snapshot.add(rank)
            self._inner.on_snapshot_begin(rank)

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        with self._lock:
            self._in_snapshot.discard(rank)
            self._inner.on_snapshot_end(rank, was_used=was_used)
