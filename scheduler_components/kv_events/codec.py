"""Batches to bytes and back, in both dialects. Sources: SGLang 0.5.23 and vLLM 0.33, as measured (ARCHITECTURE.md).

Writing takes a batch whole; when one event cannot be encoded, it alone is refused. Reading takes the common case
(our array family) in one typed decode, and everything else event by event, so that one bad or unknown event
costs itself and never its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import msgspec

from scheduler_components.errors import ConfigError, DecodeError
from scheduler_components.kv_events.array_dialect import lower_to_arrays
from scheduler_components.kv_events.map_dialect import lower_to_maps
from scheduler_components.kv_events.event_reader import WireEvent, read_event
from scheduler_components.kv_events.events import BlockStored, EventBatch, KVCacheEvent
from scheduler_components.kv_events.map_reader import read_map_batch

__all__ = [
    "DIALECTS",
    "ENCODE_ERRORS",
    "MAX_PAYLOAD_BYTES",
    "BatchDecoder",
    "BatchEncoder",
    "DecodedBatch",
    "RefusedEvent",
]

DIALECTS = ("array", "map", "vllm")
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
"""The largest payload a reader takes: 8,192 tokens are 40 KB, so this is two orders above any honest batch."""

_MAX_EVENTS = MAX_PAYLOAD_BYTES // 18
"""The smallest event takes 18 bytes; a longer list would cost a reader many times its bytes before it fails."""

_MAX_BAD_EVENTS = 1_000
"""A batch with more of them is bad itself: reporting each would cost a reader a thousand times its bytes."""

_INT64_LIMIT = 1 << 63
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
