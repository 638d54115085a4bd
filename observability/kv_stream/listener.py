"""The interface of a program that observes every change of a stream's view."""

from __future__ import annotations

from typing import Protocol

from observability.kv_stream.stream_state import StreamState
from scheduler_components import DecodeError
from scheduler_components.kv_events import DecodedBatch

__all__ = ["NullStreamListener", "StreamListener"]


class StreamListener(Protocol):
    """Receives every change in order, on the polling thread. An exception from it ends that poll.

    A listener may query the subscriber, which answers with the batches applied so far. It must not wait for another
    thread that queries: such queries are answered between two messages.

    Batches between ``on_snapshot_begin`` and ``on_snapshot_end`` go to a staging view. That view begins empty, and
    replaces the current one if the snapshot is used. Chunks of its folded state carry the number of the last batch that
    the state covers.

    It has seven members, because a listener that missed one of these changes could not keep a copy of the view.
    """

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """The subscriber applied a batch; ``batch.errors`` names the events that it left out."""
        ...

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        """The subscriber could not decode a batch. Its number counts as applied."""
        ...

    def on_gap(self, rank: int, expected: int, seq: int) -> None:
        """Live batch ``seq`` came instead of ``expected``. A replay follows if the publisher offers it."""
        ...

    def on_view_cleared(self, rank: int, reason: str) -> None:
        """The subscriber cleared the view of this rank. A publisher's own AllBlocksCleared does not count."""
        ...

    def on_snapshot_begin(self, rank: int) -> None: ...

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        """The snapshot replaced the view of this rank, or was discarded."""
        ...

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None: ...


class NullStreamListener:
    """Ignores every change. Subclass it to observe a few of them."""

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        pass

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        pass

    def on_gap(self, rank: int, expected: int, seq: int) -> None:
        pass

    def on_view_cleared(self, rank: int, reason: str) -> None:
        pass

    def on_snapshot_begin(self, rank: int) -> None:
        pass

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        pass

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        pass
