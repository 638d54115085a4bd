"""DialectWriter: convert events to the values that msgspec encodes, in each of the kit's own dialects.

A reader drops an event with a token id of -1, and some readers drop its whole batch. So the encoder checks every value
of an event that a user made. The snapshot needs the changes of the cached blocks. One pass over the events checks them,
collects their changes and makes their rows. Three passes, or a call per event, would take longer (benchmarks, codec:
"encode, array, 64 events").

- **Rows.** Most events set no option, or only their medium. They become tuples, or structs with exactly these fields.
  All other events become an array without trailing None, or a map without None. One pass over their options
  (``_num_stored_fields``) checks the types and finds the last one that is set.
- **Checks.** Packing tokens and hashes with ``struct`` is the fastest check of many integers: 3 ns each, as long as
  encoding one. If it fails, ``validated_event`` looks again and names the field. The events of this kit's caches were
  checked when their tokens entered the cache (``ValidatedEvents``), so they are converted without checks. One error
  stays undetected: True and False among the tokens, which Python treats as 1 and 0. Finding them would cost as much as
  packing.
- **Changes.** Consecutive events of one kind at one location become one ``BlockChange``. All hashes of the batch are
  packed together, and each change has its part of the bytes.
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


def pack_changes(
    changes: Sequence[tuple[type[WireEvent], BlockLocation, int]], hashes: list[int], parents: Sequence[int] = ()
) -> BlockChanges | None:
    """Return the changes with packed hashes. Return None or raise struct.error if one is no signed 64-bit integer.

    Args:
        changes: kind, location, and the number of the first hash.
        hashes: of all changes, in order. The call appends ``parents``.
        parents: further hashes to check.
    """
    stop = len(hashes)
    if parents:
        hashes += parents
    packed = _pack_hashes[len(hashes)](*hashes)
    if packed.find(_PACKED_BOOL) >= 0 and {*map(type, hashes)} != {int}:
        return None
    if len(changes) == 1:  # the common case
        kind, location, _ = changes[0]
        return (BlockChange(kind, location, packed[: 8 * stop]),)
    stops = [first for _, _, first in changes[1:]]
    stops.append(stop)
    return tuple(
        [
            BlockChange(kind, location, packed[8 * first : 8 * stop])
            for (kind, location, first), stop in zip(changes, stops, strict=False)
        ]
    )


# Check the options of an event.

_WRITTEN = {kind: get_type_hints(kind, include_extras=True) for kind in WIRE_EVENTS}
_PLAIN_TYPES = frozenset({int, str})


def _are_extra_keys(keys: object) -> bool:
    """Return True for the keys of blocks. msgspec's check takes ten microseconds, so it sees only unusual ones."""
    if type(keys) is not tuple:
        return False
    for each in keys:
        if each is not None and not (type(each) is tuple and _PLAIN_TYPES.issuperset(map(type, each))):
            return _is_valid_option("extra_keys", keys)
    return True


def _are_lookahead_tokens(tokens: object) -> bool:
    return type(tokens) is tuple and ({*map(type, tokens)} == {int} or _is_valid_option("lookahead_token_ids", tokens))


def _is_valid_option(name: str, value: tuple[Any, ...]) -> bool:
    try:
        msgspec.convert(value, _WRITTEN[BlockStored][name])
    except (msgspec.ValidationError, RecursionError):
        return False
    return True


# The next functions check one option after the other by its name. A loop over the names takes five times as long, and a
# table by the types of all options half as long again (benchmarks, codec: "64 events with all fields").


def _num_stored_fields(values: tuple[Any, ...]) -> int:
    """Return the number of fields of a stored event up to its last set option; 0 if readers refuse an option.

    The medium is not checked.
    """
    count = _num_fields_of_identity(values)
    if not count:
        return 0
    _, _, _, _, _, _, _, _, _, _, _, kind, window, locality, ownership, lookahead = values
    if kind is not None:
        if type(kind) is not str:
            return 0
        count = 12
    if window is not None:
        if type(window) is not int:
            return 0
        count = 13
    if locality is not None:
        if type(locality) is not str:
            return 0
        count = 14
    if ownership is not None:
        if type(ownership) is not str:
            return 0
        count = 15
    if lookahead is not None:
        if not _are_lookahead_tokens(lookahead):
            return 0
        count = 16
    return count


def _num_fields_of_identity(values: tuple[Any, ...]) -> int:
    """Return the same for the options that say whose block it is: those up to the session."""
    _, _, _, _, _, _, lora_name, extra_keys, group_idx, cache_salt, session_id, _, _, _, _, _ = values
    count = 6
    if lora_name is not None:
        if type(lora_name) is not str:
            return 0
        count = 7
    if extra_keys is not None:
        if not _are_extra_keys(extra_keys):
            return 0
        count = 8
    if group_idx is not None:
        if type(group_idx) is not int:
            return 0
        count = 9
    if cache_salt is not None:
        if type(cache_salt) is not str:
            return 0
        count = 10
    if session_id is not None:
        if type(session_id) is not str:
            return 0
        count = 11
    return count


def _num_removed_fields(values: tuple[Any, ...]) -> int:
    """Return the same for a removed event."""
    _, _, group_idx, locality, ownership = values
    count = 2
    if group_idx is not None:
        if type(group_idx) is not int:
            return 0
        count = 3
    if locality is not None:
        if type(locality) is not str:
            return 0
        count = 4
    if ownership is not None:
        if type(ownership) is not str:
            return 0
        count = 5
    return count


def unknown_event(event: object) -> TypeError:
    """Return the error for an event of another class. Its tag would cost some readers the whole batch."""
    return TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")


def _is_valid(event: KVCacheEvent) -> bool:
    """Return True if all readers accept every value; False if the event needs a closer check."""
    try:
        return dialect_writer("array").rows_with_changes((event,), False) is not None
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

_RowMaker: TypeAlias = Callable[[tuple[Any, ...], int], Any]
"""Returns the row of an event of one kind: of all its values, and the number of fields up to its last set option."""


def _row_struct(kind: type[WireEvent], names: Iterable[str], **config: Any) -> Callable[..., Any]:
    """Return a struct that msgspec encodes as an event with exactly these fields. Fields without a value are nil."""
    required = REQUIRED[kind]
    fields = [(name, Any) if name in required else (name, Any, None) for name in names]
    return msgspec.defstruct(f"{kind.__name__}Row", fields, frozen=True, gc=False, tag=kind.__name__, **config)


def _array_maker(kind: type[WireEvent]) -> _RowMaker:
    """Return the rows of the array dialect: an array without trailing options that are None."""
    tag: tuple[Any, ...] = (kind.__name__,)
    return lambda values, count: tag + values[:count]


_MAX_MAP_FIELDS = 14
"""Maximum fields in addition to the type: msgspec writes a longer header for a struct that could have sixteen keys."""


def _map_maker(kind: type[WireEvent], nil_fields: frozenset[str]) -> _RowMaker:
    """Return the rows of a map dialect: a map without options that are None, except ``nil_fields``."""
    written = nil_fields.union(REQUIRED[kind])
    row_struct: Any = msgspec.defstruct(
        f"{kind.__name__}Map",
        [(name, Any) if name in written else (name, Any, None) for name in kind.__struct_fields__[:_MAX_MAP_FIELDS]],
        frozen=True,
        gc=False,
        omit_defaults=True,
        tag_field="type",
        tag=kind.__name__,
    )

    def make_row(values: tuple[Any, ...], count: int) -> Any:
        if count <= _MAX_MAP_FIELDS:
            return row_struct(*values[:_MAX_MAP_FIELDS])
        row: dict[str, Any] = {"type": kind.__name__}
        for name, value in zip(kind.__struct_fields__, values, strict=True):
            if value is not None or name in written:
                row[name] = value
        return row

    return make_row


class DialectWriter:
    """Convert the events of a batch to rows in one dialect: one row per event, for msgspec to encode.

    Args:
        makers: by kind, makes the row of any event with valid values.
        nil_fields: options that are always written, also if they are None.
        is_array: whether events become arrays, and not maps.
    """

    __slots__ = ("_cleared", "_is_array", "_makers", "_removed", "_removed_on_medium", "_stored", "_stored_on_medium")

    validate = staticmethod(validated_event)

    def __init__(
        self,
        makers: Mapping[type[WireEvent], _RowMaker],
        *,
        nil_fields: frozenset[str] = frozenset(),
        is_array: bool = False,
    ) -> None:
        config: dict[str, Any] = {"array_like": True} if is_array else {"tag_field": "type"}

        def with_options(kind: type[WireEvent], *options: str) -> Callable[..., Any]:
            names = [name for name in OPTIONS[kind] if name in options or name in nil_fields]
            return _row_struct(kind, (*REQUIRED[kind], *names), **config)

        self._makers = makers
        self._is_array = is_array  # a tuple is made in half the time of a struct
        self._stored, self._stored_on_medium = with_options(BlockStored), with_options(BlockStored, "medium")
        self._removed, self._removed_on_medium = with_options(BlockRemoved), with_options(BlockRemoved, "medium")
        self._cleared = makers[AllBlocksCleared]((), 0)

    def row(self, event: KVCacheEvent) -> Any:
        """Return the row of an event with valid values; TypeError for an event of another class."""
        kind: Any = type(event)
        if kind not in WIRE_EVENTS:
            raise unknown_event(event)
        values = astuple(event)
        count = len(values)
        while count > len(REQUIRED[kind]) and values[count - 1] is None:
            count -= 1
        return self._makers[kind](values, count)

    def rows_with_changes(
        self, events: Sequence[Any], are_validated: bool, with_changes: bool = True
    ) -> tuple[list[Any], BlockChanges] | None:
        """Return the rows and changes of events. None and struct.error say that an event needs a closer check."""
        rows: list[Any] = []
        changes: list[tuple[type[WireEvent], BlockLocation, int]] = []
        hashes: list[int] = []
        parents: list[int] = []
        pack_tokens: Any = None
        row: Any
        last_kind = last_place = valid_size = num_tokens = None  # of the last change, and of the last checked event
        is_array, only_rows = self._is_array, are_validated and not with_changes
        for event in events:
            kind = type(event)
            if kind is BlockStored:
                block_hashes, parent, token_ids = event.block_hashes, event.parent_block_hash, event.token_ids
                block_size, lora_id = event.block_size, event.lora_id
                place = medium = event.medium
                if not are_validated:
                    if type(block_hashes) is not tuple or type(token_ids) is not tuple:
                        return None
                    count = len(token_ids)
                    if block_size is not valid_size or count != num_tokens:
                        valid_size, num_tokens, pack_tokens = block_size, count, _token_packer(block_size, count)
                    if count != len(block_hashes) * block_size or (lora_id is not None and type(lora_id) is not int):
                        return None
                    pack_tokens(*token_ids)
                    parents.append(-1 if parent is None else parent)
                if (
                    event.lora_name is None and event.extra_keys is None and event.group_idx is None
                    and event.cache_salt is None and event.session_id is None and event.kv_cache_spec_kind is None
                    and event.kv_cache_spec_sliding_window is None and event.locality is None
                    and event.ownership is None and event.lookahead_token_ids is None
                ):  # fmt: skip
                    if is_array:
                        row = ("BlockStored", block_hashes, parent, token_ids, block_size, lora_id, medium)
                        row = row if medium is not None else row[:-1]
                    elif medium is None:
                        row = self._stored(block_hashes, parent, token_ids, block_size, lora_id)
                    else:
                        row = self._stored_on_medium(block_hashes, parent, token_ids, block_size, lora_id, medium)
                else:
                    row, place = self._row_with_options(event)
            elif kind is BlockRemoved and type(event.block_hashes) is tuple:
                block_hashes, place = event.block_hashes, event.medium
                if event.group_idx is None and event.locality is None and event.ownership is None:
                    row = self._removed(block_hashes) if place is None else self._removed_on_medium(block_hashes, place)
                else:
                    row, place = self._row_with_options(event)
            else:
                row, place, block_hashes = self._cleared_row(event), None, ()
            rows.append(row)
            if only_rows:
                continue
            if kind is not last_kind or (place is not last_place and place != last_place):
                changes.append((kind, _location(event, place), len(hashes)))
                last_kind, last_place = kind, place
            hashes += block_hashes
        packed = () if only_rows else pack_changes(changes, hashes, parents)
        return None if packed is None else (rows, packed)

    def _cleared_row(self, event: Any) -> Any:
        if type(event) is not AllBlocksCleared:
            raise PackError("another event needs a closer check")
        return self._cleared

    def _row_with_options(self, event: Any) -> tuple[Any, Any]:
        """Return the row and the place of an event with options other than its medium."""
        values = astuple(event)
        num_fields = _num_stored_fields(values) if type(event) is BlockStored else _num_removed_fields(values)
        if not num_fields:
            raise PackError("an option needs a closer check")
        row = (
            (type(event).__name__, *values[:num_fields])
            if self._is_array
            else self._makers[type(event)](values, num_fields)
        )
        medium, group_idx, locality, ownership = event.medium, event.group_idx, event.locality, event.ownership
        if group_idx is None and locality is None and ownership is None:
            return row, medium
        return row, block_location(medium, group_idx, locality, ownership)


def _token_packer(block_size: Any, count: int) -> Callable[..., bytes]:
    """Return what packs the tokens of an event, after a check of its block size."""
    if type(block_size) is not int or block_size < 1:
        raise PackError("the block size needs a closer check")
    return TOKEN_PACKERS[count]


def _location(event: Any, place: Any) -> BlockLocation:
    """Return the location of an event: its place, unless that is only a medium."""
    if event.__class__ is AllBlocksCleared:
        return LOCAL_GPU
    if event.medium is not None and type(event.medium) is not str:
        raise PackError("the medium needs a closer check")
    if place is not event.medium:
        return place  # type: ignore[no-any-return]
    return LOCAL_GPU if place is None else (place, None, None, None)


# The dialects.


def _of_arrays() -> DialectWriter:
    return DialectWriter({kind: _array_maker(kind) for kind in WIRE_EVENTS}, is_array=True)


def _of_maps(nil_fields: frozenset[str]) -> DialectWriter:
    return DialectWriter({kind: _map_maker(kind, nil_fields) for kind in WIRE_EVENTS}, nil_fields=nil_fields)


DIALECT_WRITERS: Mapping[str, Callable[[], DialectWriter]] = {
    "array": _of_arrays,
    "map": lambda: _of_maps(frozenset()),
    "vllm": lambda: _of_maps(VLLM_NIL_FIELDS),
}
"""Makes the writer of each dialect."""


@cache
def dialect_writer(dialect: str) -> DialectWriter:
    """Return the writer of a dialect. The first call declares its structs."""
    return DIALECT_WRITERS[dialect]()
