"""Strict decoding of one payload: report everything that a typed reader of a measured peer rejects."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from scheduler_components import DecodeError, KVCacheEvent
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.testing.rules import Violation

__all__ = ["StrictlyDecodedBatch", "decode_strictly"]

_MAX_SHOWN = 60
_elements = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_anything = msgspec.msgpack.Decoder().decode
_READ_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class StrictlyDecodedBatch(msgspec.Struct, frozen=True):
    """A payload, decoded as far as possible.

    Attributes:
        events: the decoded events, hashes as signed integers.
        violations: of the payload itself, without earlier payloads.
        dialects: of its events, ``array`` or ``map``.
        is_snapshot: the time is 0.0, which marks the batches of this kit's snapshots.
    """

    events: tuple[KVCacheEvent, ...]
    violations: tuple[Violation, ...]
    dialects: frozenset[str] = frozenset()
    is_snapshot: bool = False


def decode_strictly(payload: bytes, rank: int) -> StrictlyDecodedBatch:
    """Decode one payload of the stream of ``rank``; never raise."""
    try:
        parts = _elements(payload)
        if len(parts) != 3:
            seen = Violation("batch", f"an array of {len(parts)} elements: Dynamo loses the whole batch")
            return StrictlyDecodedBatch((), (seen,))
        ts, owner, raw_events = _anything(parts[0]), _anything(parts[2]), _elements(parts[1])
        decoded = BatchDecoder().decode(payload)
    except (*_READ_ERRORS, DecodeError) as error:
        rule = "batch-time" if "time" in str(error) else "batch"
        return StrictlyDecodedBatch((), (Violation(rule, str(error)),))
    violations = [Violation("event", error.reason) for error in decoded.errors]
    if type(ts) not in (int, float) or not math.isfinite(ts):
        violations.append(Violation("batch-time", f"the time is {ts!r}"))
    if owner != rank and not (owner is None and rank == 0):
        violations.append(Violation("batch-rank", f"rank {owner!r} on the stream of rank {rank}"))
    events = [_event(raw) for raw in raw_events]
    violations += [violation for event in events for violation in _hash_types(event)]
    dialects = frozenset("map" if isinstance(event, dict) else "array" for event in events)
    return StrictlyDecodedBatch(decoded.events, tuple(violations), dialects, is_snapshot=ts == 0.0)


def _event(raw: msgspec.Raw) -> object:
    try:
        return _anything(raw)
    except _READ_ERRORS:
        return None  # The decoder has reported this event.


def _hash_types(event: object) -> Iterator[Violation]:
    if isinstance(event, dict):
        hashes, parent = event.get("block_hashes"), event.get("parent_block_hash")
    elif isinstance(event, list) and len(event) > 1:
        hashes, parent = event[1], event[2] if event[0] != "BlockRemoved" and len(event) > 2 else None
    else:
        return
    for value in [*(hashes if isinstance(hashes, list) else ()), *([] if parent is None else [parent])]:
        if type(value) is not int:
            yield Violation("hash-type", f"a hash is {type(value).__name__}: {value!r:.{_MAX_SHOWN}}")
            return
