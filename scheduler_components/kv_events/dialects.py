"""DialectWriter: convert events to the values that msgspec encodes, in each of the kit's own dialects.

An array on the wire omits trailing None and a map every None, and msgspec does the former for no struct. So the events
are converted to tuples, or to structs defined here. The converting functions are compiled from source that is generated
from the fields, as ``namedtuple`` generates its own. A loop over the events is half of the cost of encoding small ones,
and attributes named in the source take a third of the time of any loop over a list of names
(benchmarks/bench_codec.py).

A reader drops an event with a token id of -1, and some readers drop its whole batch. So the same pass over the events
checks every value. Packing tokens and hashes with ``struct`` is the fastest check of many integers (2.9 ns each;
encoding one takes 3). The events of this kit's caches were checked when their tokens entered the cache
(``ValidatedEvents``), so they are converted without checks.

One error stays undetected: True and False among the tokens, which Python treats as 1 and 0. Finding them would cost as
much as packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from struct import Struct
from struct import error as PackError
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import msgspec
from msgspec.structs import astuple

from scheduler_components.events import (
    LOCAL_GPU,
    VLLM_NIL_FIELDS,
    WIRE_EVENTS,
    AllBlocksCleared,
    BlockLocation,
    BlockStored,
    KVCacheEvent,
    WireEvent,
    block_location,
    signed_block_hash,
)

__all__ = [
    "NOT_BLOCK_ALIGNED",
    "DIALECT_WRITERS",
    "OPTIONS",
    "REQUIRED",
    "BlockChange",
    "BlockChanges",
    "DialectWriter",
    "dialect_writer",
    "compile_function",
    "first_token_mismatch",
    "TOKEN_PACKERS",
    "pack_changes",
    "validated_event",
    "unknown_event",
]

REQUIRED = {kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.required) for kind in WIRE_EVENTS}
OPTIONS = {kind: kind.__struct_fields__[len(REQUIRED[kind]) :] for kind in WIRE_EVENTS}

NOT_BLOCK_ALIGNED = "len({0}token_ids) != len({0}block_hashes) * {0}block_size"
"""Source text: calling a function for every event would cost half as much as the loop of the check."""


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


def compile_function(name: str, source: str, scope: dict[str, Any]) -> Any:
    """Compile the source of a function that was generated from the fields."""
    scope |= {kind.__name__: kind for kind in WIRE_EVENTS}
    exec(source, scope)  # noqa: S102 - the source contains no input
    return scope[name]


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


def _change_of(event: Any) -> BlockChanges | None:
    """Return the change of one event with valid values; None if the event is of another class."""
    kind = type(event)
    if kind not in WIRE_EVENTS:
        return None
    if kind is AllBlocksCleared:
        return (BlockChange(kind, LOCAL_GPU, b""),)
    hashes = event.block_hashes
    try:
        row = _pack_hashes[len(hashes)](*hashes)
    except PackError:
        return None
    return (BlockChange(kind, block_location(event.medium, event.group_idx, event.locality, event.ownership), row),)


# The form of one kind of event on the wire, as source.


class _Form(NamedTuple):
    """Expressions over the field names.

    Attributes:
        rows: for each number of options, an event of which only the first options are set.
        whole: an ``event`` whose options need no check.
    """

    rows: tuple[str, ...]
    whole: str


def _names(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _array_form(kind: type[WireEvent]) -> _Form:
    required, options = REQUIRED[kind], OPTIONS[kind]
    rows = [f"({kind.__name__!r}, {_names((*required, *options[:count]))})" for count in range(len(options) + 1)]
    return _Form(tuple(rows), "lower_one(event)")


_MAX_MAP_FIELDS = 14
"""Maximum fields in addition to the type: msgspec writes a longer header for a struct that could have sixteen keys."""


def _map_form(kind: type[WireEvent], nil_fields: frozenset[str]) -> _Form:
    writer, required, options = f"{kind.__name__}Map", REQUIRED[kind], OPTIONS[kind]
    num_nils = len(nil_fields.intersection(options))
    rows = []
    for count in range(len(options) + 1):
        given = _names((*required, *options[:count])) + "None, " * (num_nils - count)
        rows.append(f"{writer}({given})" if len(required) + count <= _MAX_MAP_FIELDS else "as_map(event)")
    late = kind.__struct_fields__[_MAX_MAP_FIELDS:]
    if not late:
        return _Form(tuple(rows), "lower_one(event)")
    is_short = " and ".join(f"event.{name} is None" for name in late)
    return _Form(tuple(rows), f"{writer}(*astuple(event)[:{_MAX_MAP_FIELDS}]) if {is_short} else as_map(event)")


def _map_writer(kind: type[WireEvent], nil_fields: frozenset[str]) -> Any:
    """Return a struct that msgspec encodes as the map: a field with a default is omitted if it is None."""
    fields = [
        (name, Any) if name in REQUIRED[kind] or name in nil_fields else (name, Any, None)
        for name in kind.__struct_fields__[:_MAX_MAP_FIELDS]
    ]
    return msgspec.defstruct(
        f"{kind.__name__}Map", fields, frozen=True, gc=False, omit_defaults=True, tag_field="type", tag=kind.__name__
    )


def _as_map(event: KVCacheEvent, *, nil_fields: frozenset[str]) -> dict[str, Any]:
    """Return the map of an event with more fields than a writer has."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    required = REQUIRED[type(event)]  # type: ignore[index]
    kept = {
        name: value for name, value in fields.items() if value is not None or name in nil_fields or name in required
    }
    return {"type": type(event).__name__} | kept


# The source of a converting function. With checks, it returns None or raises struct.error if an event needs a closer
# check.
#
# Each kind of event has a branch: its required fields, then one expression for each number of set options. Most events
# set none, or only their medium. The function for many events also returns their changes (``BlockChanges``). It
# combines consecutive events of one kind and location, so it does little more per event than to add its hashes.

_SEQUENCES = frozenset({"extra_keys", "lookahead_token_ids"})
"""Options with their own check function, because an error can be at any depth."""

_LOCATION_OPTIONS = ("group_idx", "locality", "ownership")
"""Options that determine the location of blocks in addition to the medium."""


def _checks_of_required(kind: type[WireEvent], *, is_one: bool) -> list[str]:
    hashes, parent = [], ["parents.append(parent_block_hash)"]
    if is_one:  # one event needs no list
        check = "if type({0}) is not int or not lowest <= {0} <= highest:"
        hashes = ["if len(block_hashes) == 1:", "    block_hash = block_hashes[0]", f"    {check.format('block_hash')}"]
        hashes += ["        return None", "elif not are_hashes(block_hashes):", "    return None"]
        parent = [check.format("parent_block_hash"), "    return None"]
    if kind is not BlockStored:
        return ["if type(block_hashes) is not tuple:", "    return None", *hashes]
    return [
        "if type(block_hashes) is not tuple or type(token_ids) is not tuple:",
        "    return None",
        "if block_size is not size:",  # usually that of the previous event
        "    if type(block_size) is not int or block_size < 1:",
        "        return None",
        "    size = block_size",
        "count = len(token_ids)",
        "if count != len(block_hashes) * block_size or lora_id is not None and type(lora_id) is not int:",
        "    return None",
        "if count != num_packed:",  # usually that of the previous event
        "    num_packed, pack = count, TOKEN_PACKERS[count]",
        "pack(*token_ids)",
        *hashes,
        "if parent_block_hash is not None:",
        *(f"    {line}" for line in parent),
    ]


def _check_of_option(kind: type[WireEvent], name: str) -> list[str]:
    if name in _SEQUENCES:
        return [f"if {name} is not None and not is_{name}({name}):", "    return None"]
    wanted = "str" if get_type_hints(kind)[name] == str | None else "int"
    return [f"if {name} is not None and type({name}) is not {wanted}:", "    return None"]


def _collect_changes(kind: type[WireEvent], place: str, location: str) -> list[str]:
    """Return lines that add the hashes to the previous event's change, or begin another.

    ``place`` is compared by identity.
    """
    return [
        f"if {place} is not {kind.__name__}_at:",
        "    hashes = []",
        f"    changes.append(({kind.__name__}, {location}, hashes))",
        "    BlockStored_at = BlockRemoved_at = nowhere",
        f"    {kind.__name__}_at = {place}",
        "hashes += block_hashes",
    ]


def _branch(kind: type[WireEvent], form: _Form, *, is_checked: bool, is_one: bool) -> list[str]:
    """Return the lines for an event of one kind."""
    required, options = REQUIRED[kind], OPTIONS[kind]
    take = "return {}" if is_one else "rows.append({})"
    lines = [f"{name} = event.{name}" for name in required]
    if is_checked and required:
        lines += _checks_of_required(kind, is_one=is_one)
    if not options:
        tell = (
            []
            if is_one
            else [f"changes.append(({kind.__name__}, here, ()))", "BlockStored_at = BlockRemoved_at = nowhere"]
        )
        return [*lines, *tell, take.format(form.rows[0])]
    check_of_medium = ["if medium is not None and type(medium) is not str:", "    return None"] if is_checked else []
    few = check_of_medium
    if not is_one:
        few = _collect_changes(kind, "medium", "here if medium is None else (medium, None, None, None)")
        few[1:1] = [f"    {line}" for line in check_of_medium]  # usually that of the previous event
    few += ["if medium is None:", f"    {take.format(form.rows[0])}", "else:", f"    {take.format(form.rows[1])}"]
    many = [f"{name} = event.{name}" for name in options[1:]]
    if is_checked:
        many += [line for name in options for line in _check_of_option(kind, name)]
    if not is_one:
        many += [
            "place = medium",
            f"if not ({_are_none(_LOCATION_OPTIONS)}):",
            f"    place = block_location(medium, {', '.join(_LOCATION_OPTIONS)})",
        ]
        many += [f"    if place == {kind.__name__}_at:", f"        place = {kind.__name__}_at"]
        many += _collect_changes(
            kind, "place", "place if type(place) is tuple else block_location(medium, None, None, None)"
        )
    word = "if"
    for count in range(len(options), 1, -1):
        many += [f"{word} {options[count - 1]} is not None:", f"    {take.format(form.rows[count])}"]
        word = "elif"
    lines += ["medium = event.medium", f"if {_are_none(options[1:], 'event.')}:", *(f"    {line}" for line in few)]
    return [*lines, "else:", *(f"    {line}" for line in many)]


def _are_none(names: Iterable[str], owner: str = "") -> str:
    return " and ".join(f"{owner}{name} is None" for name in names)


def _source(form_of: Callable[[type[WireEvent]], _Form], *, is_checked: bool, is_one: bool) -> str:
    """Return the source of a converting function.

    ``lower(event)`` returns a row; ``lower(events)`` returns rows and changes.
    """
    lines = ["def lower(event):" if is_one else "def lower(events):"]
    if is_checked:
        lines.append("    size = num_packed = None")
    if not is_one:
        lines += ["    rows = []", "    changes = []", "    parents = []"]
        lines += ["    BlockStored_at = BlockRemoved_at = nowhere", "    for event in events:"]
    pad, word = "    " if is_one else "        ", "if"
    lines.append(f"{pad}kind = type(event)")
    for kind in WIRE_EVENTS:
        lines.append(f"{pad}{word} kind is {kind.__name__}:")
        lines += [f"{pad}    {line}" for line in _branch(kind, form_of(kind), is_checked=is_checked, is_one=is_one)]
        word = "elif"
    lines += [f"{pad}else:", f"{pad}    return None" if is_checked else f"{pad}    raise unknown(event)"]
    if not is_one:
        lines += ["    packed = pack_changes(changes)"]
        lines += ["    return None if packed is None or not are_hashes(parents) else (rows, packed)"]
    return "\n".join(lines) + "\n"


def _trusted_source(form: _Form) -> str:
    """Return the source of ``lower(events)`` without checks.

    It has one expression for the stored events of caches, and a call for other events.
    """
    plain, placed = form.rows[0], form.rows[1]
    for name in (*REQUIRED[BlockStored], "medium"):
        plain, placed = (each.replace(f"{name}, ", f"event.{name}, ") for each in (plain, placed))
    has_few = _are_none(OPTIONS[BlockStored][1:], "event.")
    return f"""
def lower(events):
    return [
        (({plain} if event.medium is None else {placed}) if {has_few} else {form.whole})
        if type(event) is BlockStored
        else lower_one(event)
        for event in events
    ]
"""


_PLAIN_TYPES = frozenset({int, str})


def _are_plain_keys(value: Sequence[Any]) -> bool:
    """Return True if all extra keys are numbers and strings, which is the common case."""
    return all(each is None or (type(each) is tuple and _PLAIN_TYPES.issuperset(map(type, each))) for each in value)


def _are_integers(value: Sequence[Any]) -> bool:
    return {*map(type, value)} == {int}


_FAST_CHECKS: dict[str, Callable[[Sequence[Any]], bool]] = {
    "extra_keys": _are_plain_keys,
    "lookahead_token_ids": _are_integers,
}
"""Fast checks. msgspec's check takes ten microseconds; a value that passes the fast one passes msgspec's."""


def _type_check(name: str, wanted: Any) -> Callable[[object], bool]:
    fast_check = _FAST_CHECKS[name]

    def is_valid(value: object) -> bool:
        if type(value) is tuple and fast_check(value):
            return True
        try:
            msgspec.convert(value, wanted)
        except (msgspec.ValidationError, RecursionError):
            return False
        return type(value) is tuple

    return is_valid


_RowMaker: TypeAlias = Callable[[KVCacheEvent], Any]
"""Returns the row of one event; None if it needs a closer check."""

_RowsMaker: TypeAlias = Callable[[Sequence[KVCacheEvent]], list[Any]]

_RowsWithChangesMaker: TypeAlias = Callable[[Sequence[KVCacheEvent]], tuple[list[Any], BlockChanges] | None]
"""Returns the rows and the changes of events; None if an event needs a closer check."""


class DialectWriter:
    """Convert the events of a batch to rows in one dialect: one row per event, for msgspec to encode.

    Args:
        form_of: returns the form of each kind of event on the wire.
        writers: the structs that the forms name.

    Attributes:
        trusted, trusted_one: return the rows of events with valid values, and the row of one; TypeError for an event of
            another class.
        trusted_with_changes: returns the rows and the changes of events with valid values.
        change_of: returns the change of one event.
        checked, checked_one: return the same for any events; struct.error or None if an event needs a closer check.
        validate: returns an event as it can be encoded, or raises an error that names the invalid field.
    """

    __slots__ = ("change_of", "checked", "checked_one", "trusted", "trusted_one", "trusted_with_changes", "validate")

    def __init__(self, form_of: Callable[[type[WireEvent]], _Form], writers: dict[str, Any]) -> None:
        scope = {
            "astuple": astuple,
            "are_hashes": _are_hashes,
            "here": LOCAL_GPU,
            "highest": 2**63 - 1,
            "lowest": -(2**63),
            "nowhere": object(),
            "TOKEN_PACKERS": TOKEN_PACKERS,
            "pack_changes": pack_changes,
            "block_location": block_location,
            "unknown": unknown_event,
            **writers,
        }
        for name in _SEQUENCES:
            scope[f"is_{name}"] = _type_check(name, get_type_hints(BlockStored, include_extras=True)[name])
        self.validate = validated_event
        self.change_of = _change_of
        self.trusted_one: _RowMaker = compile_function(
            "lower", _source(form_of, is_checked=False, is_one=True), dict(scope)
        )
        self.trusted: _RowsMaker = compile_function(
            "lower", _trusted_source(form_of(BlockStored)), {**scope, "lower_one": self.trusted_one}
        )
        self.trusted_with_changes: _RowsWithChangesMaker = compile_function(
            "lower", _source(form_of, is_checked=False, is_one=False), dict(scope)
        )
        self.checked_one: _RowMaker = compile_function(
            "lower", _source(form_of, is_checked=True, is_one=True), dict(scope)
        )
        self.checked: _RowsWithChangesMaker = compile_function(
            "lower", _source(form_of, is_checked=True, is_one=False), dict(scope)
        )


def unknown_event(event: object) -> TypeError:
    """Return the error for an event of another class. Its tag would cost some readers the whole batch."""
    return TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")


def _is_valid(event: KVCacheEvent) -> bool:
    """Return True if all readers accept every value; False if the event needs a closer check."""
    try:
        return dialect_writer("array").checked_one(event) is not None
    except PackError:
        return False


first_token_mismatch: Callable[[Iterable[KVCacheEvent]], BlockStored | None] = compile_function(
    "first_token_mismatch",
    f"""
def first_token_mismatch(events):
    for event in events:
        if isinstance(event, BlockStored) and {NOT_BLOCK_ALIGNED.format("event.")}:
            return event
    return None
""",
    {},
)
"""Return the first stored event whose tokens do not fill its blocks, or None. Readers drop such an event."""


# Closer checks: validate the values of an event that failed the fast check.

_WRITTEN = {kind: get_type_hints(kind, include_extras=True) for kind in WIRE_EVENTS}


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


# The dialects.


def _of_maps(nil_fields: frozenset[str]) -> DialectWriter:
    writers = {f"{kind.__name__}Map": _map_writer(kind, nil_fields) for kind in WIRE_EVENTS}
    writers["as_map"] = partial(_as_map, nil_fields=nil_fields)
    return DialectWriter(lambda kind: _map_form(kind, nil_fields), writers)


DIALECT_WRITERS: dict[str, Callable[[], DialectWriter]] = {
    "array": lambda: DialectWriter(_array_form, {}),
    "map": lambda: _of_maps(frozenset()),
    "vllm": lambda: _of_maps(VLLM_NIL_FIELDS),
}
"""Makes the writer of each dialect."""


@cache
def dialect_writer(dialect: str) -> DialectWriter:
    """Return the writer of a dialect. The first call compiles it, so that a process compiles those that it uses."""
    return DIALECT_WRITERS[dialect]()
