"""DialectWriter: convert events to the values that msgspec encodes, in each of the kit's own dialects.

A reader drops an event with a token id of -1, and some readers drop its whole batch. So the encoder checks every value
of an event that a user made. The snapshot needs the changes of the cached blocks. One pass over the events checks them,
collects their changes and makes their rows. Three passes, or a call per event, would take longer (benchmarks, codec:
"encode, array, 64 events").

- **Rows.** Most events set no option, or only their medium. They become tuples, or structs with exactly these fields.
  All other events become an array without trailing None, or a map without None.
- **Checks.** Packing tokens and hashes with ``struct`` is the fastest check of many integers: 3 ns each, as long as
  encoding one. If it fails, ``validated_event`` looks again and names the field. The events of this kit's caches were
  checked when their tokens entered the cache (``ValidatedEvents``), so they are converted without checks. One error
  stays undetected: True and False among the tokens, which Python treats as 1 and 0. Finding them would cost as much as
  packing.
- **Changes.** Consecutive events of one kind at one location become one ``BlockChange``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from struct import Struct
from struct import error as PackError
from typing import Any, TypeAlias, get_type_hints

import msgspec
from msgspec.structs import astuple

from scheduler_components.events import (
    LOCAL_GPU,
    VLLM_NIL_FIELDS,
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

__all__ = [
    "DIALECT_WRITERS",
    "OPTIONS",
    "REQUIRED",
    "BlockChange",
    "BlockChanges",
    "DialectWriter",
    "dialect_writer",
    "first_token_mismatch",
    "TOKEN_PACKERS",
    "pack_changes",
    "validated_event",
    "unknown_event",
]

REQUIRED = {kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.required) for kind in WIRE_EVENTS}
OPTIONS = {kind: kind.__struct_fields__[len(REQUIRED[kind]) :] for kind in WIRE_EVENTS}


class BlockChange(msgspec.Struct, frozen=True, gc=False):
    """The change of consecutive events of one kind at one location.

    The garbage collector does not track it, because a replay buffer holds many.

    Attributes:
        kind: stored, removed, or cleared, which has no hashes.
        location: location of the blocks.
        hashes: the block hashes, eight bytes each in the machine's byte order.
    """

    kind: type[WireEvent]
    location: BlockLocation
    hashes: bytes


BlockChanges: TypeAlias = tuple[BlockChange, ...]
"""The changes of a batch, in order."""


# Check many integers together.

_MAX_PACKERS = 1024


class _Packers(dict[int, Callable[..., bytes]]):
    """For each count, the function that packs that many integers; it raises ``struct.error`` for other values."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code

    def __missing__(self, count: int) -> Callable[..., bytes]:
        if len(self) >= _MAX_PACKERS:
            self.clear()
        pack = self[count] = Struct(f"{count}{self._code}").pack
        return pack


TOKEN_PACKERS = _Packers("I")
_pack_hashes = _Packers("n" if Struct("n").size == 8 else "q")  # native "n" takes a third of the time of "q"
_PACKED_BOOL = bytes(7)
"""Part of a packed True and of a packed False, which pack like 1 and 0. Real hashes never contain seven zero bytes."""


def _are_hashes(values: Sequence[Any]) -> bool:
    """Return True for signed 64-bit integers. Return False or raise struct.error for other values."""
    return _PACKED_BOOL not in _pack_hashes[len(values)](*values) or {*map(type, values)} == {int}


def pack_changes(changes: list[tuple[type[WireEvent], BlockLocation, list[int]]]) -> BlockChanges | None:
    """Return the changes with packed hashes. Return None or raise struct.error if one is no signed 64-bit integer."""
    packed = []
    for kind, location, hashes in changes:
        row = _pack_hashes[len(hashes)](*hashes)
        if _PACKED_BOOL in row and {*map(type, hashes)} != {int}:
            return None
        packed.append(BlockChange(kind, location, row))
    return tuple(packed)


# Check the options of an event.

_PLAIN_TYPES = frozenset({int, str})


def _are_plain_keys(value: Sequence[Any]) -> bool:
    """Return True if all extra keys are numbers and strings, which is the common case."""
    return all(each is None or (type(each) is tuple and _PLAIN_TYPES.issuperset(map(type, each))) for each in value)


def _are_integers(value: Sequence[Any]) -> bool:
    return {*map(type, value)} == {int}


_WRITTEN = {kind: get_type_hints(kind, include_extras=True) for kind in WIRE_EVENTS}
_OPTION_TYPES = {
    kind: [{str | None: str, int | None: int}.get(_WRITTEN[kind][name], tuple) for name in OPTIONS[kind]]
    for kind in WIRE_EVENTS
}
_SEQUENCES = tuple(
    (BlockStored.__struct_fields__.index(name), _WRITTEN[BlockStored][name], has_plain_items)
    for name, has_plain_items in (("extra_keys", _are_plain_keys), ("lookahead_token_ids", _are_integers))
)
"""Options with items: position, type, and a fast check. msgspec's check takes ten microseconds, and accepts every value
that passes the fast one.
"""


_MAX_VALID_TYPES = 1024
_valid_types: set[tuple[type, ...]] = set()
"""The types of the values of events whose options are valid. Engines use few combinations."""


def _are_valid_options(kind: type[WireEvent], values: tuple[Any, ...]) -> bool:
    """Return whether readers accept the options of an event of ``kind`` with these values."""
    types = tuple(map(type, values))
    if types not in _valid_types:
        options, wanted = types[len(REQUIRED[kind]) :], _OPTION_TYPES[kind]
        if not all(each is type(None) or each is other for each, other in zip(options, wanted, strict=True)):
            return False
        if len(_valid_types) < _MAX_VALID_TYPES:
            _valid_types.add(types)
    if kind is BlockStored:
        for index, written, has_plain_items in _SEQUENCES:
            value = values[index]
            if value is not None and not has_plain_items(value):
                try:
                    msgspec.convert(value, written)
                except (msgspec.ValidationError, RecursionError):
                    return False
    return True


def unknown_event(event: object) -> TypeError:
    """Return the error for an event of another class. Its tag would cost some readers the whole batch."""
    return TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")


def _is_valid(event: KVCacheEvent) -> bool:
    """Return True if all readers accept every value; False if the event needs a closer check."""
    try:
        return dialect_writer("array").rows_with_changes((event,), are_validated=False) is not None
    except PackError:
        return False


def first_token_mismatch(events: Iterable[KVCacheEvent]) -> BlockStored | None:
    """Return the first stored event whose tokens do not fill its blocks, or None. Readers drop such an event."""
    for event in events:
        if isinstance(event, BlockStored) and len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return event
    return None


# Closer checks: validate the values of an event that failed the fast check.


def validated_event(event: KVCacheEvent) -> KVCacheEvent:
    """Return ``event`` as it can be encoded: unsigned 64-bit hashes become signed ones.

    Raises:
        TypeError: the event is of another class.
        ValueError: a reader would refuse the event; the message names the field.
    """
    kind = _wire_kind(event)
    if _is_valid(event):
        return event
    values: dict[str, Any] = {name: getattr(event, name) for name in kind.__struct_fields__}
    if kind is not AllBlocksCleared:
        hashes = values["block_hashes"]
        values["block_hashes"] = tuple(map(_wrapped, hashes)) if isinstance(hashes, tuple) else hashes
        if kind is BlockStored:
            values["parent_block_hash"] = _wrapped(values["parent_block_hash"])
    valid = kind(**values)
    if _is_valid(valid):
        return valid
    for name, value in values.items():
        _check_field(name, value, _WRITTEN[kind][name])
    if first_token_mismatch((valid,)) is not None:
        raise ValueError("tokens do not fill the blocks")
    return valid


def _check_field(name: str, value: object, wanted: Any) -> None:
    if isinstance(value, set | frozenset | bytearray):  # msgspec would accept them as arrays
        raise ValueError(f"{name}: {type(value).__name__} is not a tuple")
    try:
        msgspec.convert(value, wanted)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from error


def _wrapped(block_hash: object) -> object:
    is_unsigned = type(block_hash) is int and 2**63 <= block_hash < 2**64
    return signed_block_hash(block_hash) if is_unsigned else block_hash


def _wire_kind(event: KVCacheEvent) -> type[WireEvent]:
    """Return the event's class, also for a subclass; TypeError for any other class."""
    for kind in WIRE_EVENTS:
        if isinstance(event, kind):
            return kind
    raise unknown_event(event)


# The rows of a dialect.

_RowOf: TypeAlias = Callable[[type[WireEvent], tuple[Any, ...]], Any]
"""Returns the row of an event of a kind with these values."""


def _row_struct(kind: type[WireEvent], names: Iterable[str], **config: Any) -> Callable[..., Any]:
    """Return a struct that msgspec encodes as an event with exactly these fields. Fields without a value are nil."""
    required = REQUIRED[kind]
    fields = [(name, Any) if name in required else (name, Any, None) for name in names]
    return msgspec.defstruct(f"{kind.__name__}Row", fields, frozen=True, gc=False, tag=kind.__name__, **config)


def _array_of(kind: type[WireEvent], values: tuple[Any, ...]) -> Any:
    """Return an event as the array dialect has it: without trailing options that are None."""
    stop, num_required = len(values), len(REQUIRED[kind])
    while stop > num_required and values[stop - 1] is None:
        stop -= 1
    return (kind.__name__, *values[:stop])


_MAX_MAP_FIELDS = 14
"""Maximum fields in addition to the type: msgspec writes a longer header for a struct that could have sixteen keys."""


def _map_of(nil_fields: frozenset[str]) -> _RowOf:
    """Return a function that returns an event as a map dialect has it: without options that are None."""
    rows = {
        kind: msgspec.defstruct(
            f"{kind.__name__}Map",
            [
                (name, Any) if name in REQUIRED[kind] or name in nil_fields else (name, Any, None)
                for name in kind.__struct_fields__[:_MAX_MAP_FIELDS]
            ],
            frozen=True,
            gc=False,
            omit_defaults=True,
            tag_field="type",
            tag=kind.__name__,
        )
        for kind in WIRE_EVENTS
    }

    def map_of(kind: type[WireEvent], values: tuple[Any, ...]) -> Any:
        late = values[_MAX_MAP_FIELDS:]
        if late.count(None) == len(late):
            return rows[kind](*values[:_MAX_MAP_FIELDS])
        row: dict[str, Any] = {"type": kind.__name__}
        for name, value in zip(kind.__struct_fields__, values, strict=True):
            if value is not None or name in nil_fields or name in REQUIRED[kind]:
                row[name] = value
        return row

    return map_of


class DialectWriter:
    """Convert the events of a batch to rows in one dialect: one row per event, for msgspec to encode.

    Args:
        row_of: returns the row of any event with valid values.
        nil_fields: options that are always written, also if they are None.
        config: of the structs that become rows, as ``msgspec.defstruct`` takes it.
    """

    __slots__ = ("_cleared", "_is_array", "_removed", "_removed_on_medium", "_row", "_stored", "_stored_on_medium")

    validate = staticmethod(validated_event)

    def __init__(self, row_of: _RowOf, nil_fields: frozenset[str] = frozenset(), **config: Any) -> None:
        def with_options(kind: type[WireEvent], *options: str) -> Callable[..., Any]:
            names = [name for name in OPTIONS[kind] if name in options or name in nil_fields]
            return _row_struct(kind, (*REQUIRED[kind], *names), **config)

        self._row = row_of
        self._is_array = row_of is _array_of  # a tuple is made in half the time of a struct
        self._stored, self._stored_on_medium = with_options(BlockStored), with_options(BlockStored, "medium")
        self._removed, self._removed_on_medium = with_options(BlockRemoved), with_options(BlockRemoved, "medium")
        self._cleared = row_of(AllBlocksCleared, ())

    def row(self, event: KVCacheEvent) -> Any:
        """Return the row of an event with valid values; TypeError for an event of another class."""
        kind: Any = type(event)
        if kind not in WIRE_EVENTS:
            raise unknown_event(event)
        return self._row(kind, astuple(event))

    def rows_with_changes(
        self, events: Sequence[Any], *, are_validated: bool, with_changes: bool = True
    ) -> tuple[list[Any], BlockChanges] | None:
        """Return the rows and the changes of events; None if an event needs a closer check (``validate``).

        Args:
            events: of one batch.
            are_validated: the values were checked before.
            with_changes: False may return no changes, in less time.

        Raises:
            struct.error: an event needs a closer check.
        """
        stored, stored_on_medium = self._stored, self._stored_on_medium
        removed, removed_on_medium = self._removed, self._removed_on_medium
        is_array = self._is_array
        rows: list[Any] = []
        changes: list[tuple[type[WireEvent], BlockLocation, list[int]]] = []
        parents: list[int] = []
        hashes: list[int] = []
        last_kind: object = None  # of the last change
        last_place: object = None
        num_tokens = valid_size = None  # of the previous event
        pack_tokens: Any = None
        only_rows = are_validated and not with_changes  # otherwise packing the changes checks the hashes
        for event in events:
            kind = type(event)
            if kind is BlockStored:
                block_hashes, parent, token_ids = event.block_hashes, event.parent_block_hash, event.token_ids
                block_size, lora_id = event.block_size, event.lora_id
                place = medium = event.medium
                if not are_validated:
                    if type(block_hashes) is not tuple or type(token_ids) is not tuple:
                        return None
                    if block_size is not valid_size:
                        if type(block_size) is not int or block_size < 1:
                            return None
                        valid_size = block_size
                    count = len(token_ids)
                    if count != len(block_hashes) * block_size or (lora_id is not None and type(lora_id) is not int):
                        return None
                    if count != num_tokens:
                        num_tokens, pack_tokens = count, TOKEN_PACKERS[count]
                    pack_tokens(*token_ids)
                    if parent is not None:
                        parents.append(parent)
                has_options = not (
                    event.lora_name is None
                    and event.extra_keys is None
                    and event.group_idx is None
                    and event.cache_salt is None
                    and event.session_id is None
                    and event.kv_cache_spec_kind is None
                    and event.kv_cache_spec_sliding_window is None
                    and event.locality is None
                    and event.ownership is None
                    and event.lookahead_token_ids is None
                )
                if not has_options:
                    if is_array and medium is None:
                        rows.append(("BlockStored", block_hashes, parent, token_ids, block_size, lora_id))
                    elif is_array:
                        rows.append(("BlockStored", block_hashes, parent, token_ids, block_size, lora_id, medium))
                    elif medium is None:
                        rows.append(stored(block_hashes, parent, token_ids, block_size, lora_id))
                    else:
                        rows.append(stored_on_medium(block_hashes, parent, token_ids, block_size, lora_id, medium))
            elif kind is BlockRemoved:
                block_hashes = event.block_hashes
                place = medium = event.medium
                if type(block_hashes) is not tuple:
                    return None
                has_options = not (event.group_idx is None and event.locality is None and event.ownership is None)
                if not has_options:
                    rows.append(removed(block_hashes) if medium is None else removed_on_medium(block_hashes, medium))
            elif kind is AllBlocksCleared:
                rows.append(self._cleared)
                changes.append((AllBlocksCleared, LOCAL_GPU, []))
                last_kind = None
                continue
            else:
                return None
            if has_options:
                values = astuple(event)
                if not (are_validated or _are_valid_options(kind, values)):
                    return None
                rows.append(self._row(kind, values))
                place = _place_of(event)
            if only_rows:
                continue
            if place is not last_place or kind is not last_kind:
                if medium is not None and type(medium) is not str:
                    return None
                if place != last_place or kind is not last_kind:
                    hashes = []
                    location = (
                        LOCAL_GPU if place is None else place if type(place) is tuple else (place, None, None, None)
                    )
                    changes.append((kind, location, hashes))
                    last_kind, last_place = kind, place
            hashes += block_hashes
        packed = pack_changes(changes)
        return None if packed is None or not (not parents or _are_hashes(parents)) else (rows, packed)


def _place_of(event: BlockStored | BlockRemoved) -> BlockLocation | str | None:
    """Return the location of an event's blocks; only its medium if that is all."""
    if event.group_idx is None and event.locality is None and event.ownership is None:
        return event.medium
    return block_location(event.medium, event.group_idx, event.locality, event.ownership)


# The dialects.


def _of_maps(nil_fields: frozenset[str]) -> DialectWriter:
    return DialectWriter(_map_of(nil_fields), nil_fields, tag_field="type")


DIALECT_WRITERS: Mapping[str, Callable[[], DialectWriter]] = {
    "array": lambda: DialectWriter(_array_of, array_like=True),
    "map": lambda: _of_maps(frozenset()),
    "vllm": lambda: _of_maps(VLLM_NIL_FIELDS),
}
"""Makes the writer of each dialect."""


@cache
def dialect_writer(dialect: str) -> DialectWriter:
    """Return the writer of a dialect. The first call declares its structs."""
    return DIALECT_WRITERS[dialect]()
