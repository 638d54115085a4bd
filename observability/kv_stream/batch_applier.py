"""Decoding batches, applying them to a view and reporting each change to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, assert_never

import msgspec

from observability.kv_stream.instructions import (
    Apply,
    ApplyStaged,
    Clear,
    Staging,
    ViewInstruction,
)
from observability.kv_stream.stream_state import CursorCounters, StreamState, ViewFeedback
from observability.kv_stream.stream_stats import StreamStats
from observability.kv_stream.view import BlockView
from scheduler_components import AllBlocksCleared, DecodeError
from scheduler_components.kv_events import BatchDecoder, DecodedBatch

__all__ = ["BatchApplier", "NullStreamListener", "StreamListener"]


_CURSOR_STATS = tuple(set(CursorCounters.__slots__) & set(StreamStats.__struct_fields__))
"""The cursor's counters that ``StreamStats`` has under the same name."""


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


@dataclass(slots=True, kw_only=True)
class BatchApplier:
    """Applies the batches of one rank to a view that may hold other ranks too.

    Attributes:
        rank: number of the stream in the view. A batch that names another rank is applied and counted.
        wall_clock: seconds since the epoch, for the lag and the age of the newest batch.
        batches, events, decode_errors, rank_mismatches: counters of the batches and chunks.
        lag_s, last_error: of the latest batch or chunk.
        newest_ts, staged_ts: time stamp of the newest batch in the view, and in the staging view.
        staging: the view in which a snapshot is built, None without one.
        state: the state that the listener knows.
    """

    rank: int
    view: BlockView
    decoder: BatchDecoder
    listener: StreamListener
    wall_clock: Callable[[], float]
    batches: int = field(default=0, init=False)
    events: int = field(default=0, init=False)
    decode_errors: int = field(default=0, init=False)
    rank_mismatches: int = field(default=0, init=False)
    lag_s: float | None = field(default=None, init=False)
    newest_ts: float | None = field(default=None, init=False)
    staged_ts: float | None = field(default=None, init=False)
    last_error: str = field(default="", init=False)
    staging: BlockView | None = None
    state: StreamState = field(default=StreamState.CONNECTING, init=False)

    def carry_out(self, instruction: ViewInstruction) -> ViewFeedback | None:
        """Carry out one instruction on the view, and return what its cursor must know of it, if anything."""
        if isinstance(instruction, Apply):
            return self._apply_to(self.view, instruction.seq, instruction.payload, replayed=instruction.replayed)
        if isinstance(instruction, ApplyStaged):
            is_snapshot_chunk = instruction.is_snapshot_chunk
            return self.apply_staged(instruction.seq, instruction.payload, is_snapshot_chunk=is_snapshot_chunk)
        if instruction is Staging.START:
            self.start_staging()
        elif instruction is Staging.COMMIT:
            self.commit_staging()
        elif instruction is Staging.ABORT:
            self.abort_staging()
        elif isinstance(instruction, Clear):
            self.view.clear(self.rank)
            self.newest_ts = None
            self.listener.on_view_cleared(self.rank, instruction.reason)
        else:
            assert_never(instruction)
        return None

    def report_state(self, state: StreamState) -> None:
        """Report a new state to the listener."""
        old, self.state = self.state, state
        self.listener.on_state_changed(self.rank, old, state)

    def apply(self, seq: int, payload: bytes, *, replayed: bool) -> ViewFeedback | None:
        """Apply one payload to the view. An unreadable payload raises no error; it returns ``ViewFeedback.DAMAGED``."""
        return self._apply_to(self.view, seq, payload, replayed=replayed)

    # --- staging ---

    def start_staging(self) -> None:
        """Create an empty staging view."""
        self._discard_staging()
        self.staging = self.view.create_staging()
        self.staged_ts = None
        self.listener.on_snapshot_begin(self.rank)

    def apply_staged(self, seq: int, payload: bytes, *, is_snapshot_chunk: bool) -> ViewFeedback | None:
        """Apply one payload to the staging view, as ``apply``."""
        assert self.staging is not None
        return self._apply_to(self.staging, seq, payload, replayed=True, is_snapshot_chunk=is_snapshot_chunk)

    def prepare_swap(self) -> Iterator[None]:
        """Do the long part of ``commit_staging`` in slices. The view stays as it is."""
        if self.staging is not None:
            yield from self.view.prepare_replace(self.rank, self.staging)

    def commit_staging(self) -> None:
        """Replace this rank's blocks by those of the staging view."""
        assert self.staging is not None
        self.view.replace(self.rank, self.staging)
        self.staging = None
        self.newest_ts = self.staged_ts
        self.listener.on_snapshot_end(self.rank, was_used=True)

    def abort_staging(self) -> None:
        """Discard the staging view."""
        self._discard_staging()
        self.listener.on_snapshot_end(self.rank, was_used=False)

    def _discard_staging(self) -> None:
        if self.staging is not None:
            self.view.discard_staging(self.staging)
            self.staging = None

    def stats(
        self, cursor_counters: CursorCounters, *, state: StreamState, last_seq: int, endpoint: str
    ) -> StreamStats:
        """Return the statistics of the stream. The owner of its sockets adds those of the transport."""
        blocks = self.view.counters(self.rank)
        return StreamStats(
            rank=self.rank,
            endpoint=endpoint,
            state=state,
            last_seq=last_seq,
            batches=self.batches,
            events=self.events,
            blocks_stored=blocks.stored_blocks,
            blocks_removed=blocks.removed_blocks,
            blocks_held=self.view.block_count(self.rank),
            decode_errors=self.decode_errors,
            rank_mismatches=self.rank_mismatches,
            unknown_removals=blocks.unknown_removals,
            unknown_media=blocks.unknown_media,
            lag_s=self.lag_s,
            newest_batch_age_s=None if self.newest_ts is None else self.wall_clock() - self.newest_ts,
            last_error=self.last_error,
            **{name: getattr(cursor_counters, name) for name in _CURSOR_STATS},
        )

    def _apply_to(
        self, view: BlockView, seq: int, payload: bytes, *, replayed: bool, is_snapshot_chunk: bool = False
    ) -> ViewFeedback | None:
        try:
            batch = self.decoder.decode(payload)
        except DecodeError as error:
            self.decode_errors += 1
            self.last_error = f"batch {seq}: {error.reason}"
            self.listener.on_batch_unreadable(self.rank, seq, error)
            return ViewFeedback.DAMAGED
        self.batches += 1
        self.events += len(batch.events)
        if batch.attn_dp_rank is not None and batch.attn_dp_rank != self.rank:
            self.rank_mismatches += 1
        if not replayed:
            self.lag_s = self.wall_clock() - batch.ts
        if not is_snapshot_chunk:
            if view is self.view:
                self.newest_ts = batch.ts
            else:
                self.staged_ts = batch.ts
        view.apply(self.rank, batch.events)
        if is_snapshot_chunk and batch.events and isinstance(batch.events[0], AllBlocksCleared):
            # The first chunk begins with a clear so that it can be applied to any view. No clear happened.
            batch = msgspec.structs.replace(batch, events=batch.events[1:])
        if batch.events or batch.errors or not is_snapshot_chunk:
            self.listener.on_batch_applied(self.rank, seq, batch, replayed=replayed)
        return self._feedback_of(seq, batch)

    def _feedback_of(self, seq: int, batch: DecodedBatch) -> ViewFeedback | None:
        if batch.errors:
            self.decode_errors += len(batch.errors)
            self.last_error = f"batch {seq}: {batch.errors[-1].reason}"
            return ViewFeedback.DAMAGED
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                return ViewFeedback.CLEARED
        return None
