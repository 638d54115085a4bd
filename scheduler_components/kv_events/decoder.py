"""BatchDecoder: bytes of every dialect to batches.

The decoder reads the common case in one typed decode, and everything else event by event, so a bad or unknown event
costs only itself and not its batch. It is more tolerant than the encoder: hashes may be unsigned or bytes, and it skips
unknown fields and positions. Its readers are derived from the structs in ``events``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec.structs import astuple

from scheduler_components.errors import DecodeError
from scheduler_components.events import (
    FULL_ATTENTION_KINDS,
    WIRE_EVENTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    WireEvent,
    signed_block_hash,
)
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES
from scheduler_components.kv_events.dialects import OPTIONS
from scheduler_components.kv_events.native_events import event_fields

__all__ = ["BatchDecoder", "BlockStoredRawTokens", "DecodedBatch", "decode_event"]

_MAX_EVENTS = MAX_PAYLOAD_BYTES // 18
"""The smallest event takes 18 bytes. A longer list would cost a reader many times its bytes before it fails."""

_MAX_BAD_EVENTS = 1_000
"""A batch with more bad events is bad itself, because reporting each would cost a reader a thousand times its bytes."""

_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_INVALID = (DecodeError, *_DECODE_ERRORS)


_BY_TAG: dict[str, type[WireEvent]] = {kind.__name__: kind for kind in WIRE_EVENTS}

_INT64_LIMIT = 1 << 63

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
