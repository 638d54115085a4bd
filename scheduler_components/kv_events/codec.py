"""BatchEncoder and BatchDecoder: batches to bytes and back, in every dialect.

A payload is msgpack ``[ts, [event, ...], rank]``. An event is an array (``["BlockStored", hashes, parent, ...]``,
without trailing None) or a map (``{"type": "BlockStored", "block_hashes": ..., ...}``, without None). The ``vllm``
variant of the map writes the nil fields that vLLM's typed decoder requires. The forms are those of SGLang 0.5.23 and
vLLM 0.33, as measured (ARCHITECTURE.md).

The fields come from the structs in ``events``; this module derives the readers of both dialects from them, ``dialects``
the writers.

The encoder refuses an event that readers would refuse or misread, by name, and encodes the others. The decoder reads
the common case in one typed decode, and everything else event by event, so a bad or unknown event costs only itself and
not its batch. The decoder is more tolerant than the encoder: hashes may be unsigned or bytes, and it skips unknown
fields and positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from struct import error as PackError
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec.structs import astuple, replace

from scheduler_components.errors import ConfigError, DecodeError
from scheduler_components.events import (
    FULL_ATTENTION_KINDS,
    WIRE_EVENTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
    ValidatedEvents,
    WireEvent,
    signed_block_hash,
)
from scheduler_components.kv_events.dialects import (
    DIALECT_WRITERS,
    OPTIONS,
    BlockChanges,
    DialectWriter,
    dialect_writer,
    first_token_mismatch,
    validated_event,
)
from scheduler_components.kv_events.native_events import (
    NativeDialectWriter,
    event_fields,
    native_writer,
    slice_raw_event,
    summarize_event,
)

__all__ = [
    "DIALECTS",
    "ENCODE_ERRORS",
    "MAX_PAYLOAD_BYTES",
    "BatchDecoder",
    "BatchEncoder",
    "DecodedBatch",
    "RefusedEvent",
    "BlockStoredRawTokens",
    "first_token_mismatch",
    "split_events",
    "slice_event",
    "batch_rank",
    "decode_event",
    "validated_event",
    "oversize_reason",
]

MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
"""The largest payload that a reader accepts. 8,192 tokens take 40 KB, so regular batches are two orders of magnitude
smaller.
"""

_MAX_EVENTS = MAX_PAYLOAD_BYTES // 18
"""The smallest event takes 18 bytes. A longer list would cost a reader many times its bytes before it fails."""

_MAX_BAD_EVENTS = 1_000
"""A batch with more bad events is bad itself, because reporting each would cost a reader a thousand times its bytes."""

ENCODE_ERRORS = (TypeError, ValueError, OverflowError, msgspec.MsgspecError)
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_INVALID = (DecodeError, *_DECODE_ERRORS)

_INT64_LIMIT = 1 << 63

_BY_TAG: dict[str, type[WireEvent]] = {kind.__name__: kind for kind in WIRE_EVENTS}


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
    """Return the stored event of the blocks ``first`` to ``stop - 1`` of ``event``."""
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


# Reading events.

_PEERS_HASH = int | bytes
_PEERS_TYPES: dict[str, Any] = {
    "block_hashes": tuple[_PEERS_HASH, ...],
    "parent_block_hash": _PEERS_HASH | None,
    "block_size": Annotated[int, msgspec.Meta(ge=0)],
    "extra_keys": tuple[tuple[Any, ...] | None, ...] | None,
}
"""Peers write hashes as signed or unsigned integers, or as bytes; a block size of 0 without tokens; any extra keys."""


class BlockStoredRawTokens(BlockStored, frozen=True, tag=BlockStored.__name__):
    """A stored event whose tokens were counted but not decoded: ``token_ids`` is the list's msgpack as received."""

    token_ids: msgspec.Raw  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Skip the conversion of lists: all fields are immutable."""


def _reader(kind: type[WireEvent], *, decode_tokens: bool = True) -> Any:
    """Return a map struct with the fields of ``kind``, in the same order.

    msgspec reads array-like structs only from arrays. A field that may be None may be missing, because peers omit it.
    """
    hints = get_type_hints(kind, include_extras=True) | _PEERS_TYPES
    if not decode_tokens:
        hints["token_ids"] = msgspec.Raw
    fields: list[Any] = []
    for name in kind.__struct_fields__:
        may_be_none = type(None) in getattr(hints[name], "__args__", ())
        fields.append((name, hints[name], None) if may_be_none else (name, hints[name]))
    return msgspec.defstruct(
        f"{kind.__name__}Read", fields, frozen=True, gc=False, kw_only=True, tag_field="type", tag=kind.__name__
    )


_READERS = {kind: _reader(kind) for kind in WIRE_EVENTS}
_UNREAD_TOKENS = _reader(BlockStored, decode_tokens=False)
_STORED: dict[type, type[BlockStored]] = {_READERS[BlockStored]: BlockStored, _UNREAD_TOKENS: BlockStoredRawTokens}


def _event_of(read: Any) -> WireEvent:
    """Return the event of a decoded reader struct. Both events with blocks begin with their hashes."""
    stored = _STORED.get(type(read))
    if stored is not None:
        values: tuple[Any, ...] = astuple(read)
        hashes, parent = _signed(values[0]), values[1]
        if parent is not None:
            parent = _signed_hash(parent)
        if hashes is values[0] and parent is values[1]:  # the common case, which copies nothing
            return stored(*values)
        return stored(hashes, parent, *values[2:])
    if type(read) is _READERS[BlockRemoved]:
        hashes, *others = astuple(read)
        return BlockRemoved(_signed(hashes), *others)
    return AllBlocksCleared()


def _signed_hash(value: object) -> int:
    try:
        return signed_block_hash(value)
    except TypeError as error:
        raise DecodeError(str(error)) from None


def _signed(hashes: Sequence[Any]) -> tuple[int, ...]:
    """Return the hashes as signed 64-bit integers. One check covers the common case, in which all already are."""
    try:
        are_signed = type(hashes) is tuple and (not hashes or max(hashes) < _INT64_LIMIT)
    except TypeError:
        are_signed = False  # bytes
    return hashes if are_signed else tuple(map(_signed_hash, hashes))  # type: ignore[return-value]


def decode_event(raw: bytes) -> WireEvent:
    """Decode one event of either dialect, with the variations that peers are known to send.

    Raises:
        DecodeError: an unknown event, or an invalid field.
    """
    tag, fields = event_fields(raw)
    kind = _BY_TAG.get(tag)
    if kind is None:
        raise DecodeError(f"unknown event {tag!r:.60}")
    if kind is AllBlocksCleared:
        return AllBlocksCleared()
    if not isinstance(fields.get("block_hashes"), list):
        raise DecodeError("block_hashes is not an array")
    try:
        # msgpack has bytes; without builtin_types, msgspec would read a string as base64
        event = _event_of(msgspec.convert(_known_fields(kind, fields), _READERS[kind], builtin_types=(bytes,)))
    except (msgspec.ValidationError, RecursionError) as error:
        raise DecodeError(str(error)) from error
    unfilled = _first_mismatch((event,))
    if unfilled is not None:
        num_tokens, num_blocks = len(unfilled.token_ids), len(unfilled.block_hashes)
        raise DecodeError(f"{num_tokens} tokens do not fill {num_blocks} blocks of {unfilled.block_size}")
    return event


def _first_mismatch(events: Iterable[KVCacheEvent]) -> BlockStored | None:
    """Return the first stored event whose tokens do not fill its blocks, or None.

    An engine's event may omit its tokens, or include those of blocks that a sliding window has passed.
    """
    for event in events:
        if (
            isinstance(event, BlockStored)
            and len(event.token_ids) != len(event.block_hashes) * event.block_size
            and event.token_ids
            and event.kv_cache_spec_kind in FULL_ATTENTION_KINDS
        ):
            return event
    return None


def _first_with_other_tokens(events: Iterable[WireEvent]) -> BlockStoredRawTokens | None:
    """Return the first event of that kind if tokens were not decoded: the header of their list gives their number."""
    for event in events:
        if type(event) is BlockStoredRawTokens:
            listed = memoryview(event.token_ids)
            first = listed[0]
            if first == 0xDC:
                count = listed[1] << 8 | listed[2]
            elif 0x90 <= first <= 0x9F:
                count = first & 0x0F
            elif first == 0xDD:
                count = int.from_bytes(listed[1:5], "big")
            else:
                return event  # not a list
            if (
                count != len(event.block_hashes) * event.block_size
                and count
                and event.kv_cache_spec_kind in FULL_ATTENTION_KINDS
            ):
                return event
    return None


def _known_fields(kind: type[WireEvent], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the event's fields that this kit knows. An option of a type that no option has counts as missing."""
    known = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
    for name in OPTIONS[kind]:
        if not isinstance(known.get(name), str | int | list | None):
            del known[name]
    return known


# Reading batches.


class DecodedBatch(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A batch as a reader receives it.

    It is array-like, so a valid payload is decoded directly into it. No payload can set ``errors``.

    Attributes:
        ts: seconds since 1970, as the publisher stamped it.
        events: the valid events, in order; hashes are signed 64-bit integers whatever the peer sent.
        attn_dp_rank: the stream's index, None if the peer sent nil.
        errors: one error for each omitted event.
    """

    ts: float
    events: tuple[WireEvent, ...]
    attn_dp_rank: int | None
    errors: tuple[DecodeError, ...] = ()


def _batch_reader(name: str, events: Any) -> Any:
    fields: list[Any] = [("ts", float), ("events", events), ("attn_dp_rank", int | None, None)]
    decoder: Any = msgspec.msgpack.Decoder(msgspec.defstruct(name, fields, array_like=True, frozen=True))
    return decoder.decode


class _UnreadTokensBatch(DecodedBatch, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A batch whose tokens are not decoded."""

    events: tuple[BlockStoredRawTokens | BlockRemoved | AllBlocksCleared, ...]


def _maps_reader(name: str, stored: Any) -> Callable[[bytes], DecodedBatch]:
    """Return a function that reads a batch of maps in one typed decode: what present SGLang and vLLM send."""
    kinds = (stored, _READERS[BlockRemoved], _READERS[AllBlocksCleared])
    read_batch = _batch_reader(name, list[reduce(or_, kinds)])  # type: ignore[misc]

    def read(payload: bytes) -> DecodedBatch:
        batch = read_batch(payload)
        return DecodedBatch(batch.ts, tuple([_event_of(each) for each in batch.events]), batch.attn_dp_rank)

    return read


_WholeRead = Callable[[bytes], DecodedBatch]
_WholeReaders = tuple[tuple[_WholeRead, _WholeRead], Callable[[Iterable[WireEvent]], BlockStored | None]]
"""The typed readers of arrays and of maps, and the function that finds an event to decode alone."""

_WITH_TOKENS: _WholeReaders = (
    (msgspec.msgpack.Decoder(DecodedBatch).decode, _maps_reader("MapBatch", _READERS[BlockStored])),
    _first_mismatch,
)
_WITHOUT_TOKENS: _WholeReaders = (
    (msgspec.msgpack.Decoder(_UnreadTokensBatch).decode, _maps_reader("MapBatchOfUnreadTokens", _UNREAD_TOKENS)),
    _first_with_other_tokens,
)
_read_raw = _batch_reader("RawBatch", Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_EVENTS)])


class BatchDecoder:
    """Decode payloads of every dialect from untrusted peers.

    Args:
        max_payload_bytes: larger payloads are refused unread.
        decode_tokens: False returns stored events as ``BlockStoredRawTokens`` and decodes large ones in a fifth of the
            time. Tokens are counted but not checked, so an event with an invalid token is accepted. Batches that must
            be decoded event by event have tokens all the same.
    """

    __slots__ = ("_decode_whole", "_first_mismatch", "_max_payload_bytes", "_readers")

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES, *, decode_tokens: bool = True) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._readers, self._first_mismatch = _WITH_TOKENS if decode_tokens else _WITHOUT_TOKENS
        # A stream has one dialect; the first batch shows which.
        self._decode_whole = self._readers[0]

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload. ``errors`` reports each bad event.

        Raises:
            DecodeError: the batch itself is unreadable: not ``[ts, events, rank]``, no finite time, too large, or more
                than a thousand bad events.
        """
        batch = self.decode_typed(payload)
        return self.decode_each_event(payload) if batch is None else batch

    def decode_typed(self, payload: bytes) -> DecodedBatch | None:
        """Decode one payload in one typed decode; None if it must be decoded event by event.

        Raises:
            DecodeError: the payload is too large.
        """
        if len(payload) > self._max_payload_bytes:
            raise DecodeError(f"payload of {len(payload)} bytes is over the limit of {self._max_payload_bytes}")
        batch: DecodedBatch | None
        try:
            batch = self._decode_whole(payload)
        except _INVALID:
            batch = self._decode_other_dialect(payload)
        if batch is None or not math.isfinite(batch.ts) or self._first_mismatch(batch.events) is not None:
            return None
        return batch

    def _decode_other_dialect(self, payload: bytes) -> DecodedBatch | None:
        """Try the other dialect, and try it first from now on if it fits; None if neither fits."""
        arrays, maps = self._readers
        other = maps if self._decode_whole is arrays else arrays
        try:
            batch = other(payload)
        except _INVALID:
            return None
        self._decode_whole = other
        return batch

    @staticmethod
    def decode_each_event(payload: bytes) -> DecodedBatch:
        """Decode one payload event by event; see ``decode``."""
        try:
            batch = _read_raw(payload)
        except _DECODE_ERRORS as error:
            raise DecodeError(f"batch is not [ts, events, rank]: {error}") from error
        if not math.isfinite(batch.ts):
            raise DecodeError(f"batch time {batch.ts} is not finite")
        events: list[WireEvent] = []
        errors: list[DecodeError] = []
        for raw in batch.events:
            try:
                events.append(decode_event(bytes(raw)))
            except DecodeError as error:
                errors.append(DecodeError(error.reason))  # a new error, because the raised one holds its frames
                if len(errors) > _MAX_BAD_EVENTS:
                    raise DecodeError(f"more than {_MAX_BAD_EVENTS} bad events, such as: {error.reason}") from None
        return DecodedBatch(batch.ts, tuple(events), batch.attn_dp_rank, tuple(errors))
