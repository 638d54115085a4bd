"""Events of an engine's own classes: looked at, cut between blocks, and otherwise passed on as they are.

vLLM and SGLang declare the three events themselves, with fields that come and go by version. In the dialect ``native``
such a struct is written as msgspec writes it, so the payload is byte for byte that of the engine's own publisher. Such
an event is a ``msgspec.Struct`` of any module whose tag is one of the three, or ``msgspec.Raw``: the bytes of one
event, for a relay.

The fields that this kit knows are looked at by name before an event may take a number; of the others nothing is known,
and nothing is lost: an event that must be cut (a part of its blocks is gone, or it is too large) is cut as msgpack,
map or array. Its hashes are sliced, and so is every list with one entry per block or per token; all else is kept.

What differs from events of this kit, because engines' readers take it: hashes may be unsigned or bytes; an event may
tell no tokens (vLLM's offloading tiers, with a block size of 0 where even that is not known); and of a group that does
not attend to all blocks (a sliding window) an event tells the tokens of the blocks that it skips, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from struct import error as PackError
from typing import Any, NamedTuple, Protocol, TypeAlias, get_type_hints

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
    DIALECT_WRITERS,
    NOT_BLOCK_ALIGNED,
    REQUIRED,
    TOKEN_PACKERS,
    BlockChanges,
    compile_function,
    pack_changes,
    unknown_event,
    validated_event,
)

__all__ = ["NATIVE_WRITER", "NativeEvent", "EventSummary", "slice_raw_event", "event_fields", "summarize_event"]

NativeEvent: TypeAlias = "msgspec.Struct | msgspec.Raw"

_BY_TAG: dict[str, type[WireEvent]] = {kind.__name__: kind for kind in WIRE_EVENTS}
_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


# Reading one event's fields, whatever its form.

_METADATA_TAG = "BlockStoredWithMetadata"
_METADATA_INDEX = BlockStored.__struct_fields__.index("lora_name")
"""SGLang wrote, for a short time, stored events with a map of further fields in this place."""


def event_fields(raw: bytes) -> tuple[str, dict[str, Any]]:
    """Read one event into its tag and field values by name, which are not checked; unknown positions are skipped.

    Raises:
        DecodeError: it is no event at all.
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


# Looking at an event. As for this kit's own, a function is made from the fields, one per class: the first look at all
# values says only yes or no. Who asks why gets the field's name.

_HASH_TYPES = frozenset({int, bytes})
_HASH_FIELDS = frozenset({"block_hashes", "parent_block_hash"})
_LISTS = "(list, tuple)"


def _are_peers_hashes(values: Sequence[Any]) -> bool:
    """True for integers and bytes; an integer of more than 64 bits is refused when it is written."""
    return _HASH_TYPES.issuperset(map(type, values)) and b"" not in values


def _look_at_stored(names: Sequence[str]) -> list[str]:
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
        f"    if {NOT_BLOCK_ALIGNED.format('')}"
        + (" and event.kv_cache_spec_kind in FULL_ATTENTION_KINDS:" if "kv_cache_spec_kind" in names else ":"),
        "        return False",
        "parent = event.parent_block_hash",
        "if parent is not None and type(parent) is not int and not are_hashes((parent,)):",
        "    return False",
    ]


class _Look(Protocol):
    """Says of an event whether all of its values may go on the wire."""

    def __call__(self, event: Any, /) -> bool: ...


def _looker(kind: type[WireEvent], names: Sequence[str]) -> _Look:
    """Make what looks at events of a class that has the fields ``names``."""
    lines = ["def is_sound(event):"]
    if kind is BlockStored:
        lines += [f"    {line}" for line in _look_at_stored(names)]
    if kind is BlockRemoved:
        lines += ["    block_hashes = event.block_hashes"]
        lines += [f"    if type(block_hashes) not in {_LISTS}:", "        return False"]
    if kind is not AllBlocksCleared:
        # Most events of a decoding step have one block: it takes no call.
        lines += ["    if len(block_hashes) != 1 or type(block_hashes[0]) is not int:"]
        lines += ["        if not are_hashes(block_hashes):", "            return False"]
    hints = get_type_hints(kind)
    for name in set(names).difference(_HASH_FIELDS):
        if hints.get(name) == str | None:
            lines += [f"    if event.{name} is not None and not isinstance(event.{name}, str):", "        return False"]
        elif hints.get(name) == int | None:
            lines += [f"    if event.{name} is not None and type(event.{name}) is not int:", "        return False"]
    scope = {
        "FULL_ATTENTION_KINDS": FULL_ATTENTION_KINDS,
        "PackError": PackError,
        "are_hashes": _are_peers_hashes,
        "TOKEN_PACKERS": TOKEN_PACKERS,
    }
    return compile_function("is_sound", "\n".join([*lines, "    return True"]), scope)  # type: ignore[no-any-return]


class _Class(NamedTuple):
    """What is known of one class of an engine's events.

    Attributes:
        kind: which of the three it is.
        is_sound: says of an event whether all of its values may go on the wire.
        names: the fields that this kit knows.
        medium_group: gives of an event what it says of its location; equal for equal sites.
    """

    kind: type[WireEvent]
    is_sound: _Look
    names: tuple[str, ...]
    medium_group: Callable[[object], object]


_classes: dict[type, _Class] = {}
"""Made when a class is first met; an engine has three. Bounded by the classes of the process."""


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
        raise TypeError(f"{type(event).__name__} names its fields otherwise than the wire: {', '.join(missing)}")
    names = tuple(name for name in event.__struct_fields__ if name in kind.__struct_fields__)
    place = [name for name in _PLACE if name in names]
    medium_group: Callable[[object], object] = attrgetter(*place) if place else type
    known = _classes[type(event)] = _Class(kind, _looker(kind, names), names, medium_group)
    return known


_PLACE = ("medium", "group_idx", "locality", "ownership")


def _changes_of(events: Sequence[Any]) -> BlockChanges | None:
    """What events of an engine's classes change; None where others are among them, or hashes that must be converted."""
    changes: list[tuple[type[WireEvent], BlockLocation, list[int]]] = []
    hashes: list[int] = []
    last_known, last_place = None, None
    for event in events:
        known = _classes.get(type(event))
        if known is None:
            return None
        if known.kind is AllBlocksCleared:
            changes.append((AllBlocksCleared, LOCAL_GPU, []))
            last_known = None
            continue
        place = known.medium_group(event)
        if known is not last_known or place != last_place:
            last_known, last_place, hashes = known, place, []
            location = block_location(*(getattr(event, name) if name in known.names else None for name in _PLACE))
            changes.append((known.kind, location, hashes))
        hashes += event.block_hashes
    try:
        return pack_changes(changes)
    except PackError:
        return None


_WANTED: dict[type[WireEvent], dict[str, Any]] = {
    kind: get_type_hints(kind, include_extras=True)
    | {"block_hashes": tuple[int | bytes, ...], "parent_block_hash": int | bytes | None, "block_size": int}
    | dict.fromkeys(("extra_keys", "lookahead_token_ids"), Any)
    for kind in WIRE_EVENTS
}


def _check(kind: type[WireEvent], fields: dict[str, Any]) -> None:
    """Look at each field by name.

    Raises:
        ValueError: an engine's readers would refuse it; the message names the field.
    """
    for name, wanted in _WANTED[kind].items():
        if name not in fields:
            if name in REQUIRED[kind][:4] and name != "parent_block_hash":  # some leave a None out
                raise ValueError(f"{name} is missing")
            continue
        value = fields[name]
        if isinstance(value, set | frozenset | bytearray):  # msgspec takes them for arrays
            raise ValueError(f"{name}: {type(value).__name__} is no list")
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


def _sound_raw(event: msgspec.Raw) -> msgspec.Raw:
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


class NativeDialectWriter:
    """The lowering of the dialect ``native``: an engine's events are their own rows; this kit's become maps."""

    __slots__ = ()

    def sound(self, event: Any) -> Any:
        """Return ``event`` as it may go on the wire.

        Raises:
            TypeError: it is none of the three events.
            ValueError: an engine's readers would refuse it; the message names the field.
        """
        if isinstance(event, KVCacheEvent):
            return validated_event(event)
        if type(event) is msgspec.Raw:
            return _sound_raw(event)
        known = _class_of(event)
        if not known.is_sound(event):
            _check(known.kind, {name: getattr(event, name) for name in known.names})
            _signed(event.block_hashes)
            raise ValueError("a value is not what readers take")
        return event

    def checked_one(self, event: Any) -> Any:
        """Return the row of an event; raises as ``sound`` does."""
        known = _classes.get(type(event))
        return event if known is not None and known.is_sound(event) else self.trusted_one(self.sound(event))

    def trusted_one(self, event: Any) -> Any:
        """Return the row of an event that was looked at."""
        return _VLLM.trusted_one(event) if isinstance(event, KVCacheEvent) else event

    def checked(self, events: Sequence[Any]) -> tuple[list[Any], BlockChanges | None]:
        """Return the rows of events, and what they change where that is known; raises as ``sound`` does."""
        rows = []
        class_of = _classes.get
        for event in events:  # as ``checked_one``, without a call per event
            known = class_of(type(event))
            is_sound = known is not None and known.is_sound(event)
            rows.append(event if is_sound else self.trusted_one(self.sound(event)))
        return rows, _changes_of(events)

    def told(self, events: Sequence[Any]) -> tuple[list[Any], BlockChanges | None]:
        """Return the rows of events that were looked at, and what they change where that is known."""
        return self.trusted(events), _changes_of(events)

    def change_of(self, event: Any) -> BlockChanges | None:
        """What one event changes, where that is known."""
        return _changes_of((event,))

    def trusted(self, events: Sequence[Any]) -> list[Any]:
        """Return the rows of events that were looked at."""
        return [self.trusted_one(event) for event in events]


_VLLM = DIALECT_WRITERS["vllm"]  # its maps are read by the readers of both engines
NATIVE_WRITER = NativeDialectWriter()


# What an event tells of blocks, and cutting it between them.


class EventSummary(NamedTuple):
    """What decides which blocks stand, of one event that was looked at.

    Attributes:
        kind: which of the three events it is; the rest says nothing of AllBlocksCleared.
        location: where the blocks are.
        block_hashes: signed 64-bit integers.
        parent: of a stored event, the block before the first one.
    """

    kind: type[WireEvent]
    location: BlockLocation
    block_hashes: tuple[int, ...] = ()
    parent: int | None = None


def summarize_event(event: Any) -> EventSummary:
    """Say what an event tells: one of this kit's, an engine's, or the bytes of one."""
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
    """Return the bytes of an event (a row, or the bytes of one) of its blocks ``first`` to ``stop - 1``."""
    read = _decode(event if isinstance(event, bytes) else _encode(event))
    tag = read["type"] if isinstance(read, dict) else read[0]
    if isinstance(read, dict):
        fields = dict(read)
        if tag == BlockStored.__name__:
            fields.setdefault("parent_block_hash", None)  # some leave a None out
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
