"""BatchEncoder: batches to bytes, in every dialect. ``decoder`` reads them.

A payload is msgpack ``[ts, [event, ...], rank]``. An event is an array (``["BlockStored", hashes, parent, ...]``,
without trailing None) or a map (``{"type": "BlockStored", "block_hashes": ..., ...}``, without None). The ``vllm``
variant of the map writes the nil fields that vLLM's typed decoder requires. The forms are those of SGLang 0.5.23 and
vLLM 0.33, as measured (ARCHITECTURE.md). The fields come from the structs in ``events``, the writers from ``dialects``.

The encoder refuses an event that readers would refuse or misread, by name, and encodes the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from struct import error as PackError
from typing import Any

import msgspec
from msgspec.structs import replace

from scheduler_components.errors import ConfigError
from scheduler_components.events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
    ValidatedEvents,
)
from scheduler_components.kv_events.dialects import (
    DIALECT_WRITERS,
    BlockChanges,
    DialectWriter,
    dialect_writer,
    first_token_mismatch,
    validated_event,
)
from scheduler_components.kv_events.native_events import (
    NativeDialectWriter,
    native_writer,
    slice_raw_event,
    summarize_event,
)

__all__ = [
    "DIALECTS",
    "ENCODE_ERRORS",
    "MAX_PAYLOAD_BYTES",
    "BatchEncoder",
    "RefusedEvent",
    "first_token_mismatch",
    "split_events",
    "slice_event",
    "batch_rank",
    "validated_event",
    "oversize_reason",
]

MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
"""The largest payload that a reader accepts. 8,192 tokens take 40 KB, so regular batches are two orders of magnitude
smaller.
"""

ENCODE_ERRORS = (TypeError, ValueError, OverflowError, msgspec.MsgspecError)
_INT64_LIMIT = 1 << 63


# Writing batches.

DIALECTS = (*DIALECT_WRITERS, "native")


def batch_rank(batch: Any) -> int | None:
    """Return the rank of a batch of this kit or of an engine; None lets the publisher stamp its own.

    Raises:
        AttributeError: the object is no batch of events.
    """
    try:
        return batch.attn_dp_rank  # type: ignore[no-any-return]
    except AttributeError:
        return batch.data_parallel_rank  # type: ignore[no-any-return]  # vLLM's name


class RefusedEvent(msgspec.Struct, frozen=True):
    """An event that was omitted from its batch, and the reason."""

    name: str
    reason: str


class BatchEncoder:
    """Encode batches in one dialect. An encoder reuses its buffer, so it serves one thread at a time.

    Args:
        dialect: ``"array"`` (smallest and fastest, read by every measured consumer), ``"map"``, ``"vllm"`` (maps with
            the nil fields that vLLM's typed decoder requires), or ``"native"``: events of an engine's own classes are
            written as that engine writes them, ``msgspec.Raw`` events unchanged, and this kit's events as in
            ``"vllm"``.

    Raises:
        ConfigError: unknown dialect.
    """

    __slots__ = ("_encode", "_writer")

    def __init__(self, dialect: str = "array") -> None:
        if dialect not in DIALECTS:
            raise ConfigError("dialect", dialect, "is not known", f"give one of {', '.join(DIALECTS)}")
        self._encode = msgspec.msgpack.Encoder().encode
        dialect_writer("array")  # made now, because it checks the events of every dialect
        self._writer: DialectWriter | NativeDialectWriter = (
            native_writer() if dialect == "native" else dialect_writer(dialect)
        )

    def encode(self, batch: EventBatch, rank: int) -> bytes:
        """Encode ``[ts, events, rank]``. ``rank`` is used if the batch carries none.

        Raises:
            TypeError, ValueError, OverflowError: an event cannot be encoded, or has a value that readers refuse; see
                ``encode_valid``.
        """
        return self._write(batch, self._rows(batch.events, False)[0], rank)

    def encode_with_changes(self, batch: EventBatch, rank: int) -> tuple[bytes, BlockChanges | None]:
        """Encode a batch, and return its changes of the cached blocks as well.

        The changes are None if the stream must decode them from the payload.

        Raises:
            TypeError, ValueError, OverflowError: as ``encode``.
        """
        rows, changes = self._rows(batch.events, True)
        return self._write(batch, rows, rank), changes

    def _rows(self, events: Sequence[KVCacheEvent], with_changes: bool) -> tuple[Sequence[Any], BlockChanges | None]:
        writer = self._writer
        written: tuple[Sequence[Any], BlockChanges | None] | None
        try:
            written = writer.rows_with_changes(events, type(events) is ValidatedEvents, with_changes)
        except PackError:
            written = None
        return written or ([writer.row(writer.validate(event)) for event in events], None)

    def _write(self, batch: EventBatch, rows: Sequence[Any], rank: int) -> bytes:
        owner = batch.attn_dp_rank if type(batch) is KVEventBatch else batch_rank(batch)
        if owner is None:
            owner = rank
        if type(owner) is not int or not 0 <= owner < _INT64_LIMIT:
            raise ValueError(f"attn_dp_rank {owner!r:.60} is not a rank")
        ts = float(batch.ts)
        if not math.isfinite(ts):
            raise ValueError(f"batch time {ts} is not finite")
        return self._encode((ts, rows, owner))

    def encode_valid(
        self, batch: EventBatch, rank: int
    ) -> tuple[bytes | None, tuple[KVCacheEvent, ...], list[RefusedEvent]]:
        """Encode the valid events of a batch.

        Returns:
            The payload (None without valid events), the events in it, and the refused events.
        """
        valid: list[KVCacheEvent] = []
        refused: list[RefusedEvent] = []
        for event in batch.events:
            try:
                checked = self._writer.validate(event)
                self.encode_event(checked)
            except ENCODE_ERRORS as error:
                refused.append(RefusedEvent(type(event).__name__, str(error)))
            else:
                valid.append(checked)
        if not valid:
            return None, (), refused
        kept = EventBatch(ts=_valid_time(batch.ts), events=ValidatedEvents(valid), attn_dp_rank=batch_rank(batch))
        return self.encode(kept, rank), kept.events, refused

    def encode_event(self, event: KVCacheEvent) -> bytes:
        """Encode one event as it is encoded inside a batch, without checking its values.

        Raises:
            TypeError, ValueError, OverflowError: the event cannot be encoded.
        """
        return self._encode(self._writer.row(event))


def _valid_time(ts: object) -> float:
    """Return ``ts`` if it is a finite number, else 0, because readers drop a batch without a finite time."""
    return float(ts) if isinstance(ts, int | float) and abs(ts) < _INT64_LIMIT else 0.0


def slice_stored_event(event: BlockStored, first: int, stop: int) -> BlockStored:
    hashes, size, keys = event.block_hashes, event.block_size, event.extra_keys
    return replace(
        event,
        block_hashes=hashes[first:stop],
        parent_block_hash=hashes[first - 1] if first else event.parent_block_hash,
        token_ids=event.token_ids[first * size : stop * size],
        extra_keys=None if keys is None else keys[first:stop],
    )


def slice_event(event: KVCacheEvent, first: int, stop: int) -> KVCacheEvent:
    """Return the event of the blocks ``first`` to ``stop - 1`` of ``event``; for an engine's event, its bytes."""
    if isinstance(event, BlockStored):
        return slice_stored_event(event, first, stop)
    if isinstance(event, BlockRemoved):
        return replace(event, block_hashes=event.block_hashes[first:stop])
    return slice_raw_event(event, first, stop)  # type: ignore[return-value]


def split_events(events: Sequence[KVCacheEvent]) -> tuple[tuple[KVCacheEvent, ...], tuple[KVCacheEvent, ...]] | None:
    """Cut ``events`` into two parts to be applied one after the other; None for one block or less.

    Used for batches that are too large for a reader. A single event is cut between its blocks.
    """
    if len(events) > 1:
        middle = len(events) // 2
        return tuple(events[:middle]), tuple(events[middle:])
    event, num_blocks = events[0], len(summarize_event(events[0]).block_hashes)
    if num_blocks < 2:
        return None
    return (slice_event(event, 0, num_blocks // 2),), (slice_event(event, num_blocks // 2, num_blocks),)


_MAX_SHARED_BYTES = 256 * 1024
"""Maximum bytes that every part of a cut event repeats (names and salts). Above it, the parts would add up to a
multiple of the event.
"""

_LARGEST_EVENT_BYTES = MAX_PAYLOAD_BYTES - 64
"""Maximum size of an event, so that it still fits into a snapshot chunk after AllBlocksCleared."""


def oversize_reason(events: Sequence[KVCacheEvent], encoder: BatchEncoder) -> str | None:
    """Return why too large ``events`` cannot be sent in parts that readers accept; None if they can."""
    if len(events) > 1:
        return None  # the caller checks each half again
    event, num_blocks = events[0], len(summarize_event(events[0]).block_hashes)
    least = len(encoder.encode_event(slice_event(event, 0, 1) if num_blocks > 1 else event))
    if least > _LARGEST_EVENT_BYTES:
        return f"one block of it takes {least} bytes, readers take {MAX_PAYLOAD_BYTES}"
    if num_blocks < 2:
        return None
    shared = len(encoder.encode_event(slice_event(event, 0, 0)))
    if shared > _MAX_SHARED_BYTES:
        return f"{num_blocks} blocks share {shared} bytes, which each part of it would repeat"
    return None
