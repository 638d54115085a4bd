"""RouterListener: feeds a router with the KV events that a subscriber receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from observability.kv_stream import BlockView, StreamState
from observability.routing.cost_model import ReplicaId
from observability.routing.kv_router import KvRouter
from scheduler_components import DecodeError
from scheduler_components.kv_events import DecodedBatch

__all__ = ["RouterListener"]


@dataclass(slots=True, kw_only=True)
class RouterListener:
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

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        pass

    def on_gap(self, rank: int, expected: int, seq: int) -> None:
        pass

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

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        pass

    def _discard(self, rank: int) -> None:
        staging = self._staging.pop(rank, None)
        if staging is not None:
            self.router.view.discard_staging(staging)
