"""Events of an engine's own classes: validate them, cut them between blocks, and otherwise pass them on unchanged.

vLLM and SGLang declare the three events themselves, with fields that change by version. The dialect ``native`` encodes
such a struct as msgspec does, so the payload equals that of the engine's own publisher byte for byte. Such an event is
a ``msgspec.Struct`` of any module whose tag is one of the three, or ``msgspec.Raw``: the bytes of one event, for a
relay.

Known fields are checked by name before an event can take a number. Unknown fields are preserved. An event is cut as
msgpack, map or array, if some of its blocks are gone or if it is too large: its hashes are sliced, and so is every list
with one entry per block or per token; all other fields are kept.

Engines' readers accept some values that are invalid in this kit's events: hashes may be unsigned or bytes; an event may
have no tokens (vLLM's offloading tiers, with a block size of 0 if even that is unknown); and in a group that does not
attend to all blocks (a sliding window) an event includes the tokens of the skipped blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from struct import error as PackError
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.events import (
    FULL_ATTENTION_KINDS,
    LOCAL_GPU,
    WIRE_EVENTS,
    AllBlocksCleared,
    BlockLocation,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    WireEvent,
    block_location,
    signed_block_hash,
)
from scheduler_components.kv_events.dialects import (
    REQUIRED,
    TOKEN_PACKERS,
    BlockChanges,
    dialect_writer,
    pack_changes,
    unknown_event,
    validated_event,
)

__all__ = [
    "native_writer",
    "EventSummary",
    "slice_raw_event",
    "event_fields",
    "summarize_event",
    "validated_native_event",
]


_BY_TAG: dict[str, type[WireEvent]] = {kind.__name__: kind for kind in WIRE_EVENTS}
_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


# Read the fields of one event in any form.

_METADATA_TAG = "BlockStoredWithMetadata"
_METADATA_INDEX = BlockStored.__struct_fields__.index("lora_name")
"""SGLang for a short time wrote stored events with a map of further fields at this position."""


def event_fields(raw: bytes) -> tuple[str, dict[str, Any]]:
    """Return an event's tag and its field values by name, unchecked. Unknown positions are skipped.

    Raises:
        DecodeError: the bytes are no event.
    """
    try:
        read = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"event is not msgpack: {error}") from error
    if isinstance(read, dict):
        tag = read.get("type")
        if not isinstance(tag, str):
            raise DecodeError('event is not a map with a "type"')
        return tag, read
    if not isinstance(read, list) or not read or not isinstance(read[0], str):
        raise DecodeError("event is not an array that starts with a tag")
    tag, values = read[0], read[1:]
    if tag == _METADATA_TAG:
        metadata = values[_METADATA_INDEX] if len(values) > _METADATA_INDEX else None
        fields = dict(zip(BlockStored.__struct_fields__, values[:_METADATA_INDEX], strict=False))
        return BlockStored.__name__, fields | (metadata if isinstance(metadata, dict) else {})
    names = _BY_TAG[tag].__struct_fields__ if tag in _BY_TAG else ()
    return tag, dict(zip(names, values, strict=False))


# Check an event.
#
# The classes of engines differ by version, so their fields are known only when the first event arrives. Reading fields
# by a list of names takes three times as long as reading attributes that the source names (benchmarks, native). So the
# check of a class is compiled from its fields, as ``dataclasses`` compiles ``__init__``. For SGLang's
# ``BlockRemoved(block_hashes, medium)`` it is:
#
#     def is_valid(event):
#         block_hashes = event.block_hashes
#         if type(block_hashes) not in (list, tuple):
#             return False
#         if len(block_hashes) != 1 or type(block_hashes[0]) is not int:
#             if not are_hashes(block_hashes):
#                 return False
#         if event.medium is not None and not isinstance(event.medium, str):
#             return False
#         return True
#
# The check returns only True or False; ``_check`` names the invalid field.

_HASH_TYPES = frozenset({int, bytes})
_HASH_FIELDS = frozenset({"block_hashes", "parent_block_hash"})
_LISTS = "(list, tuple)"


def _are_peers_hashes(values: Sequence[Any]) -> bool:
    """Return True for integers and bytes. Encoding refuses an integer of more than 64 bits."""
    return _HASH_TYPES.issuperset(map(type, values)) and b"" not in values


def _check_stored_lines(names: Sequence[str]) -> list[str]:
    return [
        "block_hashes, token_ids, block_size = event.block_hashes, event.token_ids, event.block_size",
        f"if type(block_hashes) not in {_LISTS} or type(token_ids) not in {_LISTS}:",
        "    return False",
        "if type(block_size) is not int or block_size < 0:",
        "    return False",
        "count = len(token_ids)",
        "if count:",
        "    try:",
        "        TOKEN_PACKERS[count](*token_ids)",
        "    except PackError:",
        "        return False",
        "    if len(token_ids) != len(block_hashes) * block_size"
        + (" and event.kv_cache_spec_kind in FULL_ATTENTION_KINDS:" if "kv_cache_spec_kind" in names else ":"),
        "        return False",
        "parent = event.parent_block_hash",
        "if parent is not None and type(parent) is not int and not are_hashes((parent,)):",
        "    return False",
    ]


_Check: TypeAlias = Callable[[Any], bool]
"""Returns whether all values of an event can be encoded."""


def _make_check(kind: type[WireEvent], names: Sequence[str]) -> _Check:
    """Return the check for events of a class with the fields ``names``."""
    lines = ["def is_valid(event):"]
    if kind is BlockStored:
        lines += [f"    {line}" for line in _check_stored_lines(names)]
    if kind is BlockRemoved:
        lines += ["    block_hashes = event.block_hashes"]
        lines += [f"    if type(block_hashes) not in {_LISTS}:", "        return False"]
    if kind is not AllBlocksCleared:
        # Most events of a decoding step have one block, which needs no call.
        lines += ["    if len(block_hashes) != 1 or type(block_hashes[0]) is not int:"]
        lines += ["        if not are_hashes(block_hashes):", "            return False"]
    hints = get_type_hints(kind)
    for name in set(names).difference(_HASH_FIELDS):
        if hints.get(name) == str | None:
            lines += [f"    if event.{name} is not None and not isinstance(event.{name}, str):", "        return False"]
        elif hints.get(name) == int | None:
            lines += [f"    if event.{name} is not None and type(event.{name}) is not int:", "        return False"]
    scope: dict[str, Any] = {
        "FULL_ATTENTION_KINDS": FULL_ATTENTION_KINDS,
        "PackError": PackError,
        "are_hashes": _are_peers_hashes,
        "TOKEN_PACKERS": TOKEN_PACKERS,
    }
    exec("\n".join([*lines, "    return True"]), scope)  # noqa: S102 - the source names fields and contains no input
    return scope["is_valid"]  # type: ignore[no-any-return]


class _Class(NamedTuple):
    """One class of an engine's events.

    Attributes:
        kind: the event of this kit that it corresponds to.
        is_valid: returns whether all values of an event can be encoded.
        names: the fields that this kit knows.
        medium_group: returns the location fields of an event; equal for equal locations.
    """

    kind: type[WireEvent]
    is_valid: _Check
    names: tuple[str, ...]
    medium_group: Callable[[object], object]


_classes: dict[type, _Class] = {}
"""Filled when an event of a class is first published. An engine has three classes."""


def _class_of(event: object) -> _Class:
    known = _classes.get(type(event))
    if known is not None:
        return known
    if not isinstance(event, msgspec.Struct):
        raise unknown_event(event)
    tag = event.__struct_config__.tag
    kind = _BY_TAG.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise TypeError(f"{type(event).__name__}, tagged {tag!r:.60}, is not a KV-cache event of the wire")
    missing = [name for name in REQUIRED[kind][:4] if name not in event.__struct_fields__]
    if missing or event.__struct_fields__ != event.__struct_encode_fields__:
        raise TypeError(f"{type(event).__name__} does not have the wire's fields: missing {', '.join(missing)}")
    names = tuple(name for name in event.__struct_fields__ if name in kind.__struct_fields__)
    place = [name for name in _LOCATION_FIELDS if name in names]
    medium_group: Callable[[object], object] = attrgetter(*place) if place else type
    known = _classes[type(event)] = _Class(kind, _make_check(kind, names), names, medium_group)
    return known


_LOCATION_FIELDS = ("medium", "group_idx", "locality", "ownership")


def _changes_of(events: Sequence[Any]) -> BlockChanges | None:
    """Return the changes of an engine's events; None with other events, or with hashes that need conversion."""
    changes: list[tuple[type[WireEvent], BlockLocation, int]] = []
    hashes: list[int] = []
    last_known, last_location_fields = None, None
    for event in events:
        known = _classes.get(type(event))
        if known is None:
            return None
        if known.kind is AllBlocksCleared:
            changes.append((AllBlocksCleared, LOCAL_GPU, len(hashes)))
            last_known = None
            continue
        place = known.medium_group(event)
        if known is not last_known or place != last_location_fields:
            last_known, last_location_fields = known, place
            location = block_location(
                *(getattr(event, name) if name in known.names else None for name in _LOCATION_FIELDS)
            )
            changes.append((known.kind, location, len(hashes)))
        hashes += event.block_hashes
    try:
        return pack_changes(changes, hashes)
    except PackError:
        return None


_WANTED: dict[type[WireEvent], dict[str, Any]] = {
    kind: get_type_hints(kind, include_extras=True)
    | {"block_hashes": tuple[int | bytes, ...], "parent_block_hash": int | bytes | None, "block_size": int}
    | dict.fromkeys(("extra_keys", "lookahead_token_ids"), Any)
    for kind in WIRE_EVENTS
}


def _check(kind: type[WireEvent], fields: dict[str, Any]) -> None:
    """Check each field by name.

    Raises:
        ValueError: an engine's readers would refuse the value; the message names the field.
    """
    for name, wanted in _WANTED[kind].items():
        if name not in fields:
            if name in REQUIRED[kind][:4] and name != "parent_block_hash":  # some peers omit a None
                raise ValueError(f"{name} is missing")
            continue
        value = fields[name]
        if isinstance(value, set | frozenset | bytearray):  # msgspec would accept them as arrays
            raise ValueError(f"{name}: {type(value).__name__} is not a list")
        try:
            msgspec.convert(str(value) if isinstance(value, str) else value, wanted, builtin_types=(bytes,))
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"{name}: {error}") from error
    if kind is BlockStored:
        _check_blocks(**{name: fields[name] for name in ("block_hashes", "token_ids", "block_size")}, fields=fields)


def _check_blocks(block_hashes: Any, token_ids: Any, block_size: int, fields: dict[str, Any]) -> None:
    if block_size < 0:
        raise ValueError(f"block_size: {block_size} is below 0")
    is_full = fields.get("kv_cache_spec_kind") in FULL_ATTENTION_KINDS
    if token_ids and is_full and len(token_ids) != len(block_hashes) * block_size:
        raise ValueError("tokens do not fill the blocks")


def _validated_raw(event: msgspec.Raw) -> msgspec.Raw:
    try:
        tag, fields = event_fields(bytes(event))
    except DecodeError as error:
        raise ValueError(error.reason) from error
    kind = _BY_TAG.get(tag)
    if kind is None:
        raise TypeError(f"unknown event {tag!r:.60}")
    _check(kind, fields)
    if kind is not AllBlocksCleared:
        _signed(fields["block_hashes"])
        if fields.get("parent_block_hash") is not None:
            signed_block_hash(fields["parent_block_hash"])
    return event


def validated_native_event(event: Any) -> Any:
    """Return ``event`` as it can be encoded.

    Raises:
        TypeError: the event is of another class.
        ValueError: an engine's readers would refuse it; the message names the field.
    """
    if isinstance(event, KVCacheEvent):
        return validated_event(event)
    if type(event) is msgspec.Raw:
        return _validated_raw(event)
    known = _class_of(event)
    if not known.is_valid(event):
        _check(known.kind, {name: getattr(event, name) for name in known.names})
        _signed(event.block_hashes)
        raise ValueError("a value is one that readers refuse")
    return event


class NativeDialectWriter:
    """The writer of the dialect ``native``: an engine's events are their own rows, and this kit's become maps."""

    __slots__ = ("_own_row",)

    validate = staticmethod(validated_native_event)

    def __init__(self) -> None:
        self._own_row = dialect_writer("vllm").row  # readers of both engines accept its maps

    def row(self, event: Any) -> Any:
        """Return the row of an event with valid values."""
        return self._own_row(event) if isinstance(event, KVCacheEvent) else event

    def rows_with_changes(
        self, events: Sequence[Any], are_validated: bool, with_changes: bool = True
    ) -> tuple[list[Any], BlockChanges | None]:
        """Return the rows of events, and their changes if known.

        Raises:
            TypeError, ValueError: as ``validated_native_event``.
        """
        if are_validated:
            return [self.row(event) for event in events], _changes_of(events) if with_changes else None
        rows = []
        class_of = _classes.get
        for event in events:
            known = class_of(type(event))
            is_valid = known is not None and known.is_valid(event)
            rows.append(event if is_valid else self.row(self.validate(event)))
        return rows, _changes_of(events) if with_changes else None


@cache
def native_writer() -> NativeDialectWriter:
    return NativeDialectWriter()


# Summarize an event, and cut it between blocks.


class EventSummary(NamedTuple):
    """The fields of a checked event that determine which blocks are cached.

    Attributes:
        kind: which of the three events it is; AllBlocksCleared has no other field.
        location: location of the blocks.
        block_hashes: signed 64-bit integers.
        parent: of a stored event, the hash of the block before the first one.
    """

    kind: type[WireEvent]
    location: BlockLocation
    block_hashes: tuple[int, ...] = ()
    parent: int | None = None


def summarize_event(event: Any) -> EventSummary:
    """Return the summary of an event of this kit, of an engine's event, or of the bytes of one."""
    if type(event) is msgspec.Raw:
        tag, fields = event_fields(bytes(event))
        kind = _BY_TAG[tag]
    else:
        kind = next((each for each in WIRE_EVENTS if isinstance(event, each)), None) or _class_of(event).kind
        fields = {name: getattr(event, name) for name in event.__struct_fields__}
    if kind is AllBlocksCleared:
        return EventSummary(kind, block_location(None, None, None, None))
    location = block_location(*(fields.get(name) for name in ("medium", "group_idx", "locality", "ownership")))
    parent = fields.get("parent_block_hash")
    hashes = _signed(fields["block_hashes"])
    return EventSummary(kind, location, hashes, None if parent is None else signed_block_hash(parent))


def _signed(hashes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(signed_block_hash, hashes))


def slice_raw_event(event: Any, first: int, stop: int) -> msgspec.Raw:
    """Return the bytes of the event (a row, or its bytes) for its blocks ``first`` to ``stop - 1``."""
    read = _decode(event if isinstance(event, bytes) else _encode(event))
    tag = read["type"] if isinstance(read, dict) else read[0]
    if isinstance(read, dict):
        fields = dict(read)
        if tag == BlockStored.__name__:
            fields.setdefault("parent_block_hash", None)  # some peers omit a None
    else:
        names = ("type", *_BY_TAG.get(tag, BlockStored).__struct_fields__)
        fields = {names[index] if index < len(names) else index: value for index, value in enumerate(read)}
    hashes, size = fields["block_hashes"], fields.get("block_size", 0)
    num_blocks, num_tokens = len(hashes), len(hashes) * size
    for name, value in fields.items():
        if name == "parent_block_hash":
            fields[name] = hashes[first - 1] if first else value
        elif isinstance(value, list) and len(value) == num_blocks:
            fields[name] = value[first:stop]
        elif isinstance(value, list) and len(value) == num_tokens:
            fields[name] = value[first * size : stop * size]
    return msgspec.Raw(_encode(fields if isinstance(read, dict) else list(fields.values())))
