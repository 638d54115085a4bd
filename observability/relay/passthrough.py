"""Events that go on as the bytes that came, fields that this kit does not know included. Pure.

A ``PassthroughDecoder`` reads a source's batches; each event of one carries its bytes, and is otherwise what any reader
makes of it. So the merger needs not know of them. ``SourceEncoding`` gives what is published: the bytes, and for what
the
relay itself says (a restart's removals, a clear of one source) bytes of the same form.

Hashes that are bytes go on as the integers that all readers of this kit make of them: a removal that the relay must
write itself knows no more of a block. And an event that is read only because readers forgive much (an option of a wrong
type, a form that SGLang has given up) goes on as what was read, in this kit's fields alone.
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
from scheduler_components.kv_events.codec import decode_event, slice_event

__all__ = ["RawCleared", "PassthroughDecoder", "RawRemoved", "RawStored", "SourceEncoding", "split_removal"]


class RawStored(BlockStored, frozen=True):
    """A stored event with the bytes that it came as."""

    raw: bytes = b""


class RawRemoved(BlockRemoved, frozen=True):
    """A removed event with the bytes that it came as."""

    raw: bytes = b""


class RawCleared(AllBlocksCleared, frozen=True):
    """A cleared event with the bytes that it came as."""

    raw: bytes = b""


RawEvent: TypeAlias = RawStored | RawRemoved | RawCleared
_RAW_KINDS = frozenset({RawStored, RawRemoved, RawCleared})


class _RawBatch(msgspec.Struct, array_like=True):
    """A payload of which the events are not read."""

    ts: msgspec.Raw
    events: list[msgspec.Raw]


_read_batch = msgspec.msgpack.Decoder(_RawBatch).decode
_read = msgspec.msgpack.Decoder().decode
_write = msgspec.msgpack.Encoder().encode


def _can_be_cut(payload: bytes) -> bool:
    """False where a field that nobody here knows holds what cannot be read: such an event could not be cut."""
    try:
        _read(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class PassthroughDecoder:
    """Decodes the payloads of one source's stream; see ``BatchDecoder.decode``, which reads the same."""

    __slots__ = ("_decoder", "_encoder", "_has_integers")

    def __init__(self) -> None:
        self._decoder = BatchDecoder()
        self._encoder = BatchEncoder("native")
        self._has_integers = False  # an engine writes its hashes all alike: once one is a number, nobody looks again

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload; each event that may go on as it came carries its bytes.

        Raises:
            DecodeError: as ``BatchDecoder.decode``.
        """
        batch = self._decoder.decode_typed(payload)
        if batch is None or not _can_be_cut(payload):
            batch = self._decoder.decode_each_event(payload)
            return replace(batch, events=tuple(self._read_each(payload)))
        raws = _read_batch(payload).events
        return replace(batch, events=tuple(map(self._kept, batch.events, map(bytes, raws))))

    def _read_each(self, payload: bytes) -> Iterator[WireEvent]:
        for raw in _read_batch(payload).events:
            try:
                event = decode_event(bytes(raw))
            except DecodeError:
                continue  # the batch's ``errors`` name it
            _, _, refused = self._encoder.encode_valid(KVEventBatch(0.0, (cast("KVCacheEvent", raw),)), 0)
            yield event if refused else self._kept(event, bytes(raw))

    def _kept(self, event: WireEvent, raw: bytes) -> WireEvent:
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
    """Yield what removes those blocks of ``event`` that are in ``gone``; of bytes, each run of them is cut out."""
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
    """How a stream's sources write, as far as it was seen: what the relay itself says is written alike.

    Attributes:
        is_array: whether events are arrays; None before the first.
        is_unsigned: whether hashes are; None until one was seen that tells.
    """

    is_array: bool | None = None
    is_unsigned: bool | None = None
    _encoders: dict[bool, BatchEncoder] = field(
        default_factory=lambda: {True: BatchEncoder("array"), False: BatchEncoder("vllm")}
    )

    def rows(self, events: Sequence[KVCacheEvent]) -> list[KVCacheEvent]:
        """What to publish of ``events``: bytes (``msgspec.Raw``), once any have come; else the events themselves."""
        return [self._row(event) for event in events]

    def _row(self, event: KVCacheEvent) -> KVCacheEvent:
        if type(event) in _RAW_KINDS:
            if self.is_unsigned is None:
                self._look_at(cast("RawEvent", event))
            return cast("KVCacheEvent", msgspec.Raw(cast("RawEvent", event).raw))
        if self.is_array is None:
            return event
        written = self._encoders[self.is_array].encode_event(_unsigned(event) if self.is_unsigned else event)
        return cast("KVCacheEvent", msgspec.Raw(written))

    def _look_at(self, event: RawEvent) -> None:
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
