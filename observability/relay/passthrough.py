"""Forwarding events as the received bytes, including fields that this kit does not know.

A ``PassthroughDecoder`` decodes a source's batches. Each decoded event carries its bytes and otherwise equals the event
of any other decoder, so that the merger ignores the bytes. ``SourceEncoding`` returns the rows to publish: the bytes,
and for events of the relay itself (removals after a restart, a clear of one source) bytes in the same encoding.

Hashes that are bytes are forwarded as the integers to which all decoders of this kit convert them, because a removal by
the relay has only the integer. An event that only a tolerant decoder can read (an option of a wrong type, a form that
SGLang no longer uses) is forwarded as decoded, with this kit's fields alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import msgspec
from msgspec.structs import astuple, replace

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, DecodeError, KVCacheEvent, KVEventBatch
from scheduler_components.events import WireEvent, true_runs
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, DecodedBatch
from scheduler_components.kv_events.codec import slice_event
from scheduler_components.kv_events.decoder import decode_event

__all__ = ["RawCleared", "PassthroughDecoder", "RawRemoved", "RawStored", "SourceEncoding", "split_removal"]


class RawStored(BlockStored, frozen=True):
    """A stored event with its received bytes."""

    raw: bytes = b""


class RawRemoved(BlockRemoved, frozen=True):
    """A removed event with its received bytes."""

    raw: bytes = b""


class RawCleared(AllBlocksCleared, frozen=True):
    """A cleared event with its received bytes."""

    raw: bytes = b""


RawEvent: TypeAlias = RawStored | RawRemoved | RawCleared
_RAW_KINDS = frozenset({RawStored, RawRemoved, RawCleared})


class _RawBatch(msgspec.Struct, array_like=True):
    """A payload with undecoded events."""

    ts: msgspec.Raw
    events: list[msgspec.Raw]


_read_batch = msgspec.msgpack.Decoder(_RawBatch).decode
_read = msgspec.msgpack.Decoder().decode
_write = msgspec.msgpack.Encoder().encode


def _can_split(payload: bytes) -> bool:
    """Return False if an unknown field holds a value that cannot be decoded: such an event could not be split."""
    try:
        _read(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class PassthroughDecoder(BatchDecoder):
    """Decodes the payloads of one source's stream, and keeps the bytes of each event."""

    __slots__ = ("_encoder", "_has_integers")

    def __init__(self) -> None:
        super().__init__()
        self._encoder = BatchEncoder("native")
        self._has_integers = False  # an engine encodes all hashes alike, so one integer ends the checks

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload. Each event that can be forwarded unchanged carries its bytes.

        Raises:
            DecodeError: as ``BatchDecoder.decode``.
        """
        batch = self.decode_typed(payload)
        if batch is None or not _can_split(payload):
            batch = self.decode_each_event(payload)
            return replace(batch, events=tuple(self._decode_each(payload)))
        raws = _read_batch(payload).events
        return replace(batch, events=tuple(map(self._with_bytes, batch.events, map(bytes, raws))))

    def _decode_each(self, payload: bytes) -> Iterator[WireEvent]:
        for raw in _read_batch(payload).events:
            try:
                event = decode_event(bytes(raw))
            except DecodeError:
                continue  # ``errors`` of the batch name the event
            _, _, refused = self._encoder.encode_valid(KVEventBatch(0.0, (cast("KVCacheEvent", raw),)), 0)
            yield event if refused else self._with_bytes(event, bytes(raw))

    def _with_bytes(self, event: WireEvent, raw: bytes) -> WireEvent:
        if isinstance(event, AllBlocksCleared):
            return RawCleared(raw)
        if not self._has_integers:
            raw = self._with_integers(event, raw)
        values: tuple[Any, ...] = (*astuple(event), raw)
        return RawStored(*values) if isinstance(event, BlockStored) else RawRemoved(*values)

    def _with_integers(self, event: BlockStored | BlockRemoved, raw: bytes) -> bytes:
        fields: Any = _read(raw)
        at: Any = "block_hashes" if isinstance(fields, dict) else 1
        if all(isinstance(each, int) for each in fields[at]):
            self._has_integers = bool(fields[at])
            return raw
        fields[at] = event.block_hashes
        if isinstance(event, BlockStored):
            fields["parent_block_hash" if isinstance(fields, dict) else 2] = event.parent_block_hash
        return _write(fields)


def split_removal(event: BlockRemoved, gone: AbstractSet[int]) -> Iterator[BlockRemoved]:
    """Yield events that remove the blocks of ``event`` in ``gone``. For a raw event, yield one per run of blocks."""
    if not isinstance(event, RawRemoved):
        yield replace(event, block_hashes=tuple([each for each in event.block_hashes if each in gone]))
        return
    for first, stop in true_runs([each in gone for each in event.block_hashes]):
        cut = slice_event(cast("KVCacheEvent", msgspec.Raw(event.raw)), first, stop)
        yield replace(event, block_hashes=event.block_hashes[first:stop], raw=bytes(cast("msgspec.Raw", cut)))


_ARRAY_FIRST_BYTES = frozenset(range(0x90, 0xA0)) | {0xDC, 0xDD}
_UNSIGNED = 2**64


@dataclass(slots=True)
class SourceEncoding:
    """The encoding of a stream's sources, inferred from their events and used for the relay's own events.

    Attributes:
        is_array: events are arrays; None before the first event.
        is_unsigned: hashes are unsigned; None until a hash shows it.
    """

    is_array: bool | None = None
    is_unsigned: bool | None = None
    _encoders: dict[bool, BatchEncoder] = field(
        default_factory=lambda: {True: BatchEncoder("array"), False: BatchEncoder("vllm")}
    )

    def rows(self, events: Sequence[KVCacheEvent]) -> list[KVCacheEvent]:
        """Return ``events`` as bytes (``msgspec.Raw``) once a source has sent some, else unchanged."""
        return [self._row(event) for event in events]

    def _row(self, event: KVCacheEvent) -> KVCacheEvent:
        if type(event) in _RAW_KINDS:
            if self.is_unsigned is None:
                self._infer_from(cast("RawEvent", event))
            return cast("KVCacheEvent", msgspec.Raw(cast("RawEvent", event).raw))
        if self.is_array is None:
            return event
        written = self._encoders[self.is_array].encode_event(_unsigned(event) if self.is_unsigned else event)
        return cast("KVCacheEvent", msgspec.Raw(written))

    def _infer_from(self, event: RawEvent) -> None:
        self.is_array = event.raw[0] in _ARRAY_FIRST_BYTES
        if isinstance(event, RawCleared):
            return
        fields: Any = _read(event.raw)
        for block_hash in fields["block_hashes"] if isinstance(fields, dict) else fields[1]:
            if not 0 <= block_hash < _UNSIGNED // 2:
                self.is_unsigned = block_hash > 0
                return


def _unsigned(event: KVCacheEvent) -> KVCacheEvent:
    if isinstance(event, BlockStored | BlockRemoved):
        event = replace(event, block_hashes=tuple([each % _UNSIGNED for each in event.block_hashes]))
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        event = replace(event, parent_block_hash=event.parent_block_hash % _UNSIGNED)
    return event
