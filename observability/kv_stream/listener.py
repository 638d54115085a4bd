"""The port of whoever wants to see what happens to a stream, besides its state in the view."""

from __future__ import annotations

from typing import Protocol

from observability.kv_stream.instructions import StreamState
from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.codec import DecodedBatch

__all__ = ["NullListener", "StreamListener"]


class StreamListener(Protocol):
    """Told of everything in the order in which it happens, on the thread that polls; what it raises ends that poll.

    Batches between ``snapshot_begun`` and ``snapshot_ended`` are applied to a view aside, which begins empty and
    replaces the present one when it was used. Chunks of its base carry the number of the last batch in the base.
    """

    def batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """A batch was applied to the view; ``batch.errors`` names the events that were left out of it."""
        ...

    def batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        """A batch could not be decoded at all; its number counts as seen."""
        ...

    def gap_seen(self, rank: int, expected: int, seq: int) -> None:
        """Live batch ``seq`` came where ``expected`` should have; a replay is asked for where there is one."""
        ...

    def view_cleared(self, rank: int, reason: str) -> None:
        """The view of this rank begins anew; not called for a publisher's own AllBlocksCleared."""
        ...

    def snapshot_begun(self, rank: int) -> None: ...

    def snapshot_ended(self, rank: int, *, was_used: bool) -> None:
        """The snapshot replaced the view of this rank, or came to nothing."""
        ...

    def state_changed(self, rank: int, old: StreamState, new: StreamState) -> None: ...


class NullListener:
    """Wants to know nothing."""

    def batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """Nothing to do."""

    def batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        """Nothing to do."""

    def gap_seen(self, rank: int, expected: int, seq: int) -> None:
        """Nothing to do."""

    def view_cleared(self, rank: int, reason: str) -> None:
        """Nothing to do."""

    def state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        """Nothing to do."""

    def snapshot_begun(self, rank: int) -> None:
        """Nothing to do."""

    def snapshot_ended(self, rank: int, *, was_used: bool) -> None:
        """Nothing to do."""
