"""From payload to view: decode one batch of one rank, apply its events, count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from observability.kv_stream.listener import StreamListener
from observability.kv_stream.view import BlockView
from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.codec import BatchDecoder, DecodedBatch
from scheduler_components.kv_events.events import AllBlocksCleared

__all__ = ["ApplierCounters", "BatchApplier", "Outcome"]


class Outcome(Enum):
    """What a batch means for the trust in the view."""

    ADDED = "added"
    CLEARED = "cleared"
    DAMAGED = "damaged"


@dataclass(slots=True)
class ApplierCounters:
    """Counters of one stream's batches and chunks; ``lag_s`` and ``last_error`` are those of the latest."""

    batches: int = 0
    events: int = 0
    decode_errors: int = 0
    rank_mismatches: int = 0
    lag_s: float | None = None
    last_error: str = ""


@dataclass(slots=True, kw_only=True)
class BatchApplier:
    """Applies the batches of one rank to a view that may hold other ranks too.

    Attributes:
        rank: the stream's number in the view. A batch that names another is applied here all the same, and counted.
        wall_clock: seconds since the epoch, for the lag.
        aside: the view that a snapshot is built in, None without one.
    """

    rank: int
    view: BlockView
    decoder: BatchDecoder
    listener: StreamListener
    wall_clock: Callable[[], float]
    counters: ApplierCounters = field(default_factory=ApplierCounters)
    aside: BlockView | None = None

    def begin_aside(self) -> None:
        """Begin a snapshot, from nothing."""
        self.aside = BlockView()
        self.listener.snapshot_begun(self.rank)

    def apply_aside(self, seq: int, payload: bytes, *, is_base: bool) -> Outcome:
        """Apply one payload to the snapshot; never raises for what is in it."""
        assert self.aside is not None
        return self._apply_to(self.aside, seq, payload, replayed=True, is_base=is_base)

    def swap_in(self) -> None:
        """Replace this rank's blocks by those of the snapshot."""
        assert self.aside is not None
        self.view.replace(self.rank, self.aside)
        self.aside = None
        self.listener.snapshot_ended(self.rank, was_used=True)

    def drop_aside(self) -> None:
        """Forget the snapshot."""
        self.aside = None
        self.listener.snapshot_ended(self.rank, was_used=False)

    def apply(self, seq: int, payload: bytes, *, replayed: bool) -> Outcome:
        """Apply one payload to the view; never raises for what is in it."""
        return self._apply_to(self.view, seq, payload, replayed=replayed)

    def _apply_to(self, view: BlockView, seq: int, payload: bytes, *, replayed: bool, is_base: bool = False) -> Outcome:
        counters = self.counters
        try:
            batch = self.decoder.decode(payload)
        except DecodeError as error:
            counters.decode_errors += 1
            counters.last_error = f"batch {seq}: {error.reason}"
            self.listener.batch_unreadable(self.rank, seq, error)
            return Outcome.DAMAGED
        counters.batches += 1
        counters.events += len(batch.events)
        if batch.attn_dp_rank is not None and batch.attn_dp_rank != self.rank:
            counters.rank_mismatches += 1
        if not replayed:
            counters.lag_s = self.wall_clock() - batch.ts
        view.apply(self.rank, batch.events)
        if is_base and batch.events[:1] == (AllBlocksCleared(),):
            # That the base begins from nothing is how it is written, and nothing that happened.
            batch = msgspec.structs.replace(batch, events=batch.events[1:])
        if batch.events or batch.errors or not is_base:
            self.listener.batch_applied(self.rank, seq, batch, replayed=replayed)
        return self._judge(seq, batch)

    def _judge(self, seq: int, batch: DecodedBatch) -> Outcome:
        if batch.errors:
            self.counters.decode_errors += len(batch.errors)
            self.counters.last_error = f"batch {seq}: {batch.errors[-1].reason}"
            return Outcome.DAMAGED
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                return Outcome.CLEARED
        return Outcome.ADDED
