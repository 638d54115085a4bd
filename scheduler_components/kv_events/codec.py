"""Batches to bytes and back, in both dialects. Sources: SGLang 0.5.23 and vLLM 0.33, as measured (ARCHITECTURE.md).

Writing takes a batch whole; when one event cannot be encoded, it alone is refused. Reading takes the common case
(our array family) in one typed decode, and everything else event by event, so that one bad or unknown event
costs itself and never its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from scheduler_components.errors import ConfigError, DecodeError
from scheduler_components.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockSize,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    TokenId,
)

__all__ = [
    "STORED_POSITIONS",
    "array_event_fields",
    "lower_to_arrays",
    "map_event_fields",
    "lower_to_maps",
    "WireEvent",
    "check_event",
    "read_event",
    "signed_hash",
    "read_map_batch",
    "halves",
    "DIALECTS",
    "ENCODE_ERRORS",
    "MAX_PAYLOAD_BYTES",
    "BatchDecoder",
    "BatchEncoder",
    "DecodedBatch",
    "RefusedEvent",
]

# The array dialect: ``["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium?, lora_name?, ...]``.
#
# Trailing None are trimmed. Reading is more forgiving than writing: hashes may be unsigned or bytes, positions that
# are not known yet are skipped, and SGLang's short-lived ``BlockStoredWithMetadata`` (an array whose position 7 is a
# map) is taken.

STORED_POSITIONS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "cache_salt",
    "session_id",
)
"""Positions after the tag. The first seven are fixed by released peers; the rest were only ever appended."""

_REMOVED_POSITIONS = ("block_hashes", "medium", "group_idx")
_METADATA_POSITION = 6
_decode = msgspec.msgpack.Decoder().decode


def lower_to_arrays(events: Iterable[KVCacheEvent]) -> list[tuple[Any, ...]]:
    """Write events as the arrays that go on the wire: all in one loop, which is half of what encoding small ones costs.

    Raises:
        TypeError: one is none of the three events; an unknown tag would cost some readers the whole batch.
        ValueError: tokens that do not fill the blocks, which readers drop.
    """
    lowered: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, BlockStored):
            hashes, tokens, size = event.block_hashes, event.token_ids, event.block_size
            if len(tokens) != len(hashes) * size:
                raise ValueError("tokens do not fill the blocks")
            fixed = ("BlockStored", hashes, event.parent_block_hash, tokens, size, event.lora_id)
            # Looks at fields cost less than a tuple of them and its comparison, and most events have no option.
            if (
                event.medium is None
                and event.lora_name is None
                and event.extra_keys is None
                and event.group_idx is None
                and event.cache_salt is None
                and event.session_id is None
            ):
                lowered.append(fixed)
            else:
                lowered.append(fixed + _options_of(event))
        elif isinstance(event, BlockRemoved):
            lowered.append(("BlockRemoved", event.block_hashes, *_trimmed((event.medium, event.group_idx))))
        elif isinstance(event, AllBlocksCleared):
            lowered.append(("AllBlocksCleared",))
        else:
            raise TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")
    return lowered


def _options_of(event: BlockStored) -> tuple[Any, ...]:
    return _trimmed(
        (event.medium, event.lora_name, event.extra_keys, event.group_idx, event.cache_salt, event.session_id)
    )


def _trimmed(options: tuple[Any, ...]) -> tuple[Any, ...]:
    while options and options[-1] is None:
        options = options[:-1]
    return options


def array_event_fields(raw: bytes | msgspec.Raw) -> tuple[str, dict[str, Any]]:
    """Read one array event into (tag, field values by name); unknown trailing positions are skipped.

    Raises:
        DecodeError: not an array that starts with a text tag.
    """
    try:
        items = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"event is not msgpack: {error}") from error
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise DecodeError("event is not an array that starts with a tag")
    tag, values = items[0], items[1:]
    if tag == "BlockStoredWithMetadata":
        fields = dict(zip(STORED_POSITIONS, values[:_METADATA_POSITION], strict=False))
        metadata = values[_METADATA_POSITION] if len(values) > _METADATA_POSITION else None
        return "BlockStored", fields | (metadata if isinstance(metadata, dict) else {})
    positions = _REMOVED_POSITIONS if tag == "BlockRemoved" else STORED_POSITIONS
    return tag, dict(zip(positions, values, strict=False))


# The map dialect: ``{"type": "BlockStored", "block_hashes": ..., ...}`` of SGLang >= 0.5.2x and vLLM >= 0.2x.
#
# Fields that are None are left out. vLLM's own typed decoder asks for ``medium`` and ``lora_name`` in every stored
# event and ``medium`` in every removed one; the ``vllm`` flavour writes them as nil.


class _Map(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type"):
    """What goes on the wire: fields with a default are left out where they are None."""


class _Stored(_Map, frozen=True, tag="BlockStored"):
    block_hashes: Any
    parent_block_hash: Any
    token_ids: Any
    block_size: Any
    lora_id: Any
    medium: Any = None
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None
    cache_salt: Any = None
    session_id: Any = None


class _StoredForVllm(_Map, frozen=True, tag="BlockStored"):
    block_hashes: Any
    parent_block_hash: Any
    token_ids: Any
    block_size: Any
    lora_id: Any
    medium: Any
    lora_name: Any
    extra_keys: Any = None
    group_idx: Any = None
    cache_salt: Any = None
    session_id: Any = None


class _Removed(_Map, frozen=True, tag="BlockRemoved"):
    block_hashes: Any
    medium: Any = None
    group_idx: Any = None


class _RemovedForVllm(_Map, frozen=True, tag="BlockRemoved"):
    block_hashes: Any
    medium: Any
    group_idx: Any = None


class _Cleared(_Map, frozen=True, tag="AllBlocksCleared"):
    pass


def lower_to_maps(events: Iterable[KVCacheEvent], *, vllm: bool) -> list[msgspec.Struct]:
    """Write events as what msgspec encodes to the maps that go on the wire.

    Raises:
        TypeError: one is none of the three events; an unknown tag would cost some readers the whole batch.
        ValueError: tokens that do not fill the blocks, which readers drop.
    """
    return [_lower(event, vllm=vllm) for event in events]


def _lower(event: KVCacheEvent, *, vllm: bool) -> msgspec.Struct:
    if isinstance(event, BlockStored):
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            raise ValueError("tokens do not fill the blocks")
        return (_StoredForVllm if vllm else _Stored)(*msgspec.structs.astuple(event))
    if isinstance(event, BlockRemoved):
        return (_RemovedForVllm if vllm else _Removed)(*msgspec.structs.astuple(event))
    if isinstance(event, AllBlocksCleared):
        return _Cleared()
    raise TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")


def map_event_fields(raw: bytes | msgspec.Raw) -> tuple[str, dict[str, Any]]:
    """Read one map event into (tag, field values by name).

    Raises:
        DecodeError: not a map with a text ``type``.
    """
    try:
        fields = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"event is not msgpack: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise DecodeError('event is not a map with a "type"')
    return fields.pop("type"), fields


# Reading one event of either dialect, forgiving what peers are known to vary.

WireEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""What a reader knows; a peer's other events are errors, each of its own."""

_INT64_LIMIT = 1 << 63
_UINT64 = 1 << 64


def check_event(event: KVCacheEvent) -> None:
    """Refuse an event whose tokens do not fill its blocks; ranges of single fields are part of their types.

    Raises:
        DecodeError: with the numbers that do not agree.
    """
    if isinstance(event, BlockStored) and len(event.token_ids) != len(event.block_hashes) * event.block_size:
        raise DecodeError(
            f"{len(event.token_ids)} tokens do not fill {len(event.block_hashes)} blocks of {event.block_size}"
        )


_EVENT_TYPES: dict[str, Any] = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}


def read_event(raw: bytes) -> WireEvent:
    """Read one event.

    Raises:
        DecodeError: not one of the three, or a field of it is wrong.
    """
    is_map = raw[0] & 0xF0 == 0x80 or raw[0] in (0xDE, 0xDF)
    tag, fields = map_event_fields(raw) if is_map else array_event_fields(raw)
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    if tag not in _EVENT_TYPES:
        raise DecodeError(f"unknown event {tag!r:.60}")
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise DecodeError("block_hashes is not an array")
    fields["block_hashes"] = [signed_hash(value) for value in hashes]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = signed_hash(fields["parent_block_hash"])
    if tag == "BlockStored":
        fields.setdefault("parent_block_hash", None)
        fields.setdefault("lora_id", None)
    event = _convert(_EVENT_TYPES[tag], fields)
    check_event(event)
    return event


def _convert(kind: Any, fields: dict[str, Any]) -> BlockStored | BlockRemoved:
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    for name in _FORGIVEN:
        if name in known and not isinstance(known[name], str | int | list | None):
            del known[name]
    try:
        values = msgspec.convert(known, _FIELD_TYPES[kind])
    except (msgspec.ValidationError, RecursionError) as error:
        raise DecodeError(str(error)) from error
    event: BlockStored | BlockRemoved = kind(**{name: getattr(values, name) for name in kind.__struct_fields__})
    return event


def _map_twin(kind: Any) -> Any:
    """The same fields as ``kind``, read by name: msgspec reads an array-like struct from arrays only."""
    fields = []
    for field in msgspec.structs.fields(kind):
        fields.append((field.name, field.type) if field.required else (field.name, field.type, field.default))
    return msgspec.defstruct(f"{kind.__name__}Fields", fields, frozen=True)


_FIELD_TYPES = {kind: _map_twin(kind) for kind in _EVENT_TYPES.values()}
_FORGIVEN = ("medium", "lora_name", "extra_keys", "group_idx", "cache_salt", "session_id")


def signed_hash(value: object) -> int:
    """Fold a peer's block hash to a signed 64-bit integer.

    Unsigned integers (vLLM) wrap; bytes (newer vLLM) give their last 8, big-endian, as the smg gateway folds them.

    Raises:
        DecodeError: neither an integer of 64 bits nor bytes.
    """
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big", signed=len(value) >= 8)
    if isinstance(value, int) and not isinstance(value, bool):
        return value - _UINT64 if value >= _INT64_LIMIT else value
    raise DecodeError(f"a hash is {type(value).__name__}, not an integer")


# Reading a whole batch of the map dialect in one typed decode: what today's SGLang and vLLM send.
#
# msgspec reads maps into structs of their own, since ``BlockStored`` and its like are read from arrays. What does not
# fit at once is an error here, and the caller reads the batch event by event.

_PeersHash = int | bytes


class _ReadMap(msgspec.Struct, frozen=True, gc=False, tag_field="type"):
    """Fields that are not known are skipped."""


class _ReadStored(_ReadMap, frozen=True, tag="BlockStored"):
    block_hashes: tuple[_PeersHash, ...]
    token_ids: tuple[TokenId, ...]
    block_size: BlockSize
    parent_block_hash: _PeersHash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[str | int, ...] | None, ...] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class _ReadRemoved(_ReadMap, frozen=True, tag="BlockRemoved"):
    block_hashes: tuple[_PeersHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _ReadCleared(_ReadMap, frozen=True, tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[_ReadStored | _ReadRemoved | _ReadCleared]
    attn_dp_rank: int | None = None


_decode_maps = msgspec.msgpack.Decoder(_MapBatch).decode


def read_map_batch(payload: bytes) -> tuple[float, tuple[WireEvent, ...], int | None]:
    """Read ``[ts, events, rank]`` of maps; whether tokens fill their blocks is for the caller to check.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError, DecodeError: something is not as expected.
    """
    batch = _decode_maps(payload)
    return batch.ts, tuple([_event(fields) for fields in batch.events]), batch.attn_dp_rank


def _event(fields: _ReadStored | _ReadRemoved | _ReadCleared) -> WireEvent:
    if type(fields) is _ReadStored:
        parent = fields.parent_block_hash
        return BlockStored(
            _signed(fields.block_hashes),
            None if parent is None else signed_hash(parent),
            fields.token_ids,
            fields.block_size,
            fields.lora_id,
            fields.medium,
            fields.lora_name,
            fields.extra_keys,
            fields.group_idx,
            fields.cache_salt,
            fields.session_id,
        )
    if type(fields) is _ReadRemoved:
        return BlockRemoved(_signed(fields.block_hashes), fields.medium, fields.group_idx)
    return AllBlocksCleared()


def _signed(hashes: tuple[_PeersHash, ...]) -> tuple[int, ...]:
    """Signed 64-bit integers, whatever the peer sent. Whether all are so already is asked at once: most are."""
    try:
        are_signed = not hashes or max(hashes) < _INT64_LIMIT  # type: ignore[operator]
    except TypeError:
        are_signed = False  # bytes
    return hashes if are_signed else tuple(map(signed_hash, hashes))  # type: ignore[return-value]


# Cutting events in two, for batches that are too large for a reader.


def halves(events: Sequence[KVCacheEvent]) -> tuple[tuple[KVCacheEvent, ...], tuple[KVCacheEvent, ...]] | None:
    """``events`` as two runs, to be applied one after the other; None for what is one block or less.

    A single event is cut between its blocks, the second half below the first.
    """
    if len(events) > 1:
        middle = len(events) // 2
        return tuple(events[:middle]), tuple(events[middle:])
    event = events[0]
    if not isinstance(event, BlockStored | BlockRemoved) or len(event.block_hashes) < 2:
        return None
    hashes, middle = event.block_hashes, len(event.block_hashes) // 2
    if isinstance(event, BlockRemoved):
        return (replace(event, block_hashes=hashes[:middle]),), (replace(event, block_hashes=hashes[middle:]),)
    tokens, cut, keys = event.token_ids, middle * event.block_size, event.extra_keys
    first = replace(
        event, block_hashes=hashes[:middle], token_ids=tokens[:cut], extra_keys=None if keys is None else keys[:middle]
    )
    second = replace(
        event,
        block_hashes=hashes[middle:],
        parent_block_hash=hashes[middle - 1],
        token_ids=tokens[cut:],
        extra_keys=None if keys is None else keys[middle:],
    )
    return (first,), (second,)


DIALECTS = ("array", "map", "vllm")
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
"""The largest payload a reader takes: 8,192 tokens are 40 KB, so this is two orders above any honest batch."""

_MAX_EVENTS = MAX_PAYLOAD_BYTES // 18
"""The smallest event takes 18 bytes; a longer list would cost a reader many times its bytes before it fails."""

_MAX_BAD_EVENTS = 1_000
"""A batch with more of them is bad itself: reporting each would cost a reader a thousand times its bytes."""
ENCODE_ERRORS = (TypeError, ValueError, OverflowError, msgspec.MsgspecError)
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_NOT_SOUND = (DecodeError, *_DECODE_ERRORS)


_LOWER: dict[str, Callable[[Iterable[KVCacheEvent]], list[Any]]] = {
    "array": lower_to_arrays,
    "map": partial(lower_to_maps, vllm=False),
    "vllm": partial(lower_to_maps, vllm=True),
}


class RefusedEvent(msgspec.Struct, frozen=True):
    """An event that was left out of its batch, and why."""

    name: str
    reason: str


class BatchEncoder:
    """Encodes batches in one dialect; keeps a reusable msgspec encoder, so one encoder serves one thread at a time.

    Args:
        dialect: ``"array"`` (smallest, quickest, read by every measured consumer), ``"map"``, or ``"vllm"`` (maps
            with the nil fields that vLLM's typed decoder asks for).

    Raises:
        ConfigError: unknown dialect.
    """

    __slots__ = ("_encode", "_lower")

    def __init__(self, dialect: str = "array") -> None:
        if dialect not in DIALECTS:
            raise ConfigError("dialect", dialect, "is not known", f"give one of {', '.join(DIALECTS)}")
        self._encode = msgspec.msgpack.Encoder().encode
        self._lower = _LOWER[dialect]

    def encode(self, batch: EventBatch, rank: int) -> bytes:
        """Encode ``[ts, events, rank]``; ``rank`` is used where the batch carries none.

        Raises:
            TypeError, ValueError, OverflowError: some event cannot be encoded; see ``encode_sound``.
        """
        owner = rank if batch.attn_dp_rank is None else batch.attn_dp_rank
        ts = float(batch.ts)
        if not math.isfinite(ts):
            raise ValueError(f"batch time {ts} is not finite")
        return self._encode((ts, self._lower(batch.events), owner))

    def encode_sound(
        self, batch: EventBatch, rank: int
    ) -> tuple[bytes | None, tuple[KVCacheEvent, ...], list[RefusedEvent]]:
        """Encode what can be encoded: (payload or None when nothing is left, events in it, events refused)."""
        sound: list[KVCacheEvent] = []
        refused: list[RefusedEvent] = []
        for event in batch.events:
            try:
                self.encode_event(event)
            except ENCODE_ERRORS as error:
                refused.append(RefusedEvent(type(event).__name__, str(error)))
            else:
                sound.append(event)
        if not sound:
            return None, (), refused
        kept = EventBatch(ts=_sound_time(batch.ts), events=tuple(sound), attn_dp_rank=batch.attn_dp_rank)
        return self.encode(kept, rank), kept.events, refused

    def encode_event(self, event: KVCacheEvent) -> bytes:
        """Encode one event alone, as it stands inside a batch.

        Raises:
            TypeError, ValueError, OverflowError: it cannot be encoded.
        """
        return self._encode(self._lower((event,))[0])


def _sound_time(ts: object) -> float:
    """``ts`` where it is a finite number, else 0: readers drop a batch whose time is none."""
    return float(ts) if isinstance(ts, int | float) and abs(ts) < _INT64_LIMIT else 0.0


class DecodedBatch(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A batch as a reader sees it.

    Array-like, so that a sound payload is decoded straight into what is returned. No payload can fill ``errors``.

    Attributes:
        ts: seconds since the epoch, as the publisher stamped it.
        events: the sound ones, in order; hashes are signed 64-bit integers whatever the peer sent.
        attn_dp_rank: the stream's index, None when the peer sent nil.
        errors: one per event that was left out.
    """

    ts: float
    events: tuple[WireEvent, ...]
    attn_dp_rank: int | None
    errors: tuple[DecodeError, ...] = ()


class _RawBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_EVENTS)]
    attn_dp_rank: int | None = None


class BatchDecoder:
    """Decodes payloads of both dialects from peers that are not trusted.

    Args:
        max_payload_bytes: larger payloads are refused unread.
    """

    __slots__ = ("_decode_arrays", "_decode_raw", "_decode_whole", "_max_payload_bytes")

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._decode_arrays = msgspec.msgpack.Decoder(DecodedBatch).decode
        # A stream is of one dialect: which one, its first batch tells.
        self._decode_whole: Callable[[bytes], DecodedBatch] = self._decode_arrays
        self._decode_raw = msgspec.msgpack.Decoder(_RawBatch).decode

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload; bad events are reported in ``errors``, each alone.

        Raises:
            DecodeError: the batch itself is unreadable: not ``[ts, events, rank]``, no finite time, too large, or
                more than a thousand bad events.
        """
        if len(payload) > self._max_payload_bytes:
            raise DecodeError(f"payload of {len(payload)} bytes is over the limit of {self._max_payload_bytes}")
        try:
            batch = self._decode_whole(payload)
        except _NOT_SOUND:
            return self._decode_otherwise(payload)
        # The checks of _check_time and check_event, without their calls: whatever they refuse is read event by event.
        if not math.isfinite(batch.ts):
            return self._decode_by_event(payload)
        for event in batch.events:
            if type(event) is BlockStored and len(event.token_ids) != len(event.block_hashes) * event.block_size:
                return self._decode_by_event(payload)
        return batch

    def _decode_otherwise(self, payload: bytes) -> DecodedBatch:
        """The stream may be of the other dialect, which is read at once from then on; else each event counts alone."""
        other: Callable[[bytes], DecodedBatch] = self._decode_arrays
        if self._decode_whole is other:
            other = self._decode_maps
        try:
            other(payload)
        except _NOT_SOUND:
            pass
        else:
            self._decode_whole = other
        return self._decode_by_event(payload)

    @staticmethod
    def _decode_maps(payload: bytes) -> DecodedBatch:
        return DecodedBatch(*read_map_batch(payload))

    def _decode_by_event(self, payload: bytes) -> DecodedBatch:
        try:
            batch = self._decode_raw(payload)
        except _DECODE_ERRORS as error:
            raise DecodeError(f"batch is not [ts, events, rank]: {error}") from error
        _check_time(batch.ts)
        events: list[WireEvent] = []
        errors: list[DecodeError] = []
        for raw in batch.events:
            try:
                events.append(read_event(bytes(raw)))
            except DecodeError as error:
                errors.append(DecodeError(error.reason))  # a new one, for that one holds its frames
                if len(errors) > _MAX_BAD_EVENTS:
                    raise DecodeError(f"more than {_MAX_BAD_EVENTS} bad events, such as: {error.reason}") from None
        return DecodedBatch(batch.ts, tuple(events), batch.attn_dp_rank, tuple(errors))


def _check_time(ts: float) -> None:
    if not math.isfinite(ts):
        raise DecodeError(f"batch time {ts} is not finite")
