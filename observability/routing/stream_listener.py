"""RouterListener feeds a router with the KV events of a subscriber, LockedListener under a lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from observability.kv_stream import BlockView, NullStreamListener, StreamListener
from observability.routing.cost_model import ReplicaId
from observability.routing.kv_router import KvRouter
from scheduler_components.kv_events import DecodedBatch

__all__ = ["LockedListener", "RouterListener"]


@dataclass(slots=True, kw_only=True)
class RouterListener(NullStreamListener):
    """A ``StreamListener`` that applies every change of a subscriber's view to the view of a router.

    Each subscriber needs its own. The subscriber itself needs no blocks: give it a ``CountingView``.

    Attributes:
        router: receives the changes, on the thread that polls the subscriber.
        replicas: rank of a stream to the replica. Streams of other ranks are ignored.
        clock: monotonic seconds, the same as in other calls of the router.
    """

    router: KvRouter
    replicas: Mapping[int, ReplicaId]
    clock: Callable[[], float]
    _staging: dict[int, BlockView] = field(default_factory=dict, init=False, repr=False)

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        replica = self.replicas.get(rank)
        if replica is not None:
            self.router.apply_events(replica, batch.events, self.clock(), staging=self._staging.get(rank))

    def on_view_cleared(self, rank: int, reason: str) -> None:
        replica = self.replicas.get(rank)
        if replica is not None:
            self.router.clear_blocks(replica)

    def on_snapshot_begin(self, rank: int) -> None:
        self._discard(rank)
        if rank in self.replicas:
            self._staging[rank] = self.router.view.create_staging()

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        if was_used and rank in self._staging:
            self.router.replace_blocks(self.replicas[rank], self._staging.pop(rank))
        self._discard(rank)

    def _discard(self, rank: int) -> None:
        staging = self._staging.pop(rank, None)
        if staging is not None:
            self.router.view.discard_staging(staging)


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
