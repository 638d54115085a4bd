"""Events to what msgspec writes of them, in each dialect of this kit; with or without a look at every value.

An array of the wire leaves trailing None out, a map every None, and msgspec does the first for no struct. So the events
are lowered to tuples, or to structs made here for it. The source of the functions that do it is made from the fields
(as ``namedtuple`` makes its own): a loop over the events is half of what encoding small ones costs, and attributes
named in the source take a third of the time of any way over a list of names (measured).

A reader drops an event with a token id of -1, and some readers drop its whole batch. So every value is looked at before
it is written, in the same pass over the events. Tokens and hashes are packed by ``struct``, whatever comes of it: that
is the quickest look at many integers that there is (2.9 ns each; encoding one takes 3). Events of this kit's caches
were checked when their tokens entered the cache (``ValidatedEvents``) and are lowered without.

One thing is overlooked: True and False among the tokens, which Python takes for 1 and 0. To find them would cost as
much as packing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct
from struct import error as PackError
from typing import Any, NamedTuple, Protocol, TypeAlias, get_type_hints

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
"""As source: to call a function for every event would cost as much as half of the check's loop."""


class BlockChange(msgspec.Struct, frozen=True, gc=False):
    """What neighbouring events of one kind change at one location. No object of the garbage collector's: a window has
    many.

    Attributes:
        kind: stored or removed; or cleared, which has no hashes.
        location: where.
        hashes: eight bytes each, as this machine has integers in memory.
    """

    kind: type[WireEvent]
    location: BlockLocation
    hashes: bytes


BlockChanges: TypeAlias = tuple[BlockChange, ...]
"""What a batch changes, in order."""


def compile_function(name: str, source: str, scope: dict[str, Any]) -> Any:
    """Compile the source of a function that was made from the fields."""
    scope |= {kind.__name__: kind for kind in WIRE_EVENTS}
    exec(source, scope)  # noqa: S102 - nothing in it comes from outside
    return scope[name]


# Looking at many integers at once.

_MAX_PACKERS = 1024


class _Packers(dict[int, Callable[..., bytes]]):
    """By their number, what packs so many integers of one kind; ``struct.error`` for any other value."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code

    def __missing__(self, count: int) -> Callable[..., bytes]:
        if len(self) >= _MAX_PACKERS:
            self.clear()
        pack = self[count] = Struct(f"{count}{self._code}").pack
        return pack


TOKEN_PACKERS = _Packers("I")
_pack_hashes = _Packers("n" if Struct("n").size == 8 else "q")  # the first takes a third of the time, where it fits
_PACKED_BOOL = bytes(7)
"""Part of a packed True and of a packed False, which look like 1 and 0: real hashes never have seven zero bytes."""


def _are_hashes(values: Sequence[Any]) -> bool:
    """True for signed 64-bit integers; struct.error, or False, for anything else."""
    return _PACKED_BOOL not in _pack_hashes[len(values)](*values) or {*map(type, values)} == {int}


def pack_changes(changes: list[tuple[type[WireEvent], BlockLocation, list[int]]]) -> BlockChanges | None:
    """The same with packed hashes; struct.error, or None, where one is no signed 64-bit integer."""
    told = []
    for kind, location, hashes in changes:
        row = _pack_hashes[len(hashes)](*hashes)
        if _PACKED_BOOL in row and {*map(type, hashes)} != {int}:
            return None
        told.append(BlockChange(kind, location, row))
    return tuple(told)


def _change_of(event: Any) -> BlockChanges | None:
    """What one event of sound values changes; None where it was written as another one."""
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


# How one kind of event stands on the wire, as source.


class _Form(NamedTuple):
    """Expressions over the names of the fields.

    Attributes:
        rows: an event of which only the first options are given, by their number.
        whole: that of an ``event`` of which no option has to be looked at.
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
"""Beside the type: msgspec writes a longer header for every event of a struct that could have sixteen keys."""


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
    """A struct that msgspec encodes to the map: what has a default is left out where it is None."""
    fields = [
        (name, Any) if name in REQUIRED[kind] or name in nil_fields else (name, Any, None)
        for name in kind.__struct_fields__[:_MAX_MAP_FIELDS]
    ]
    return msgspec.defstruct(
        f"{kind.__name__}Map", fields, frozen=True, gc=False, omit_defaults=True, tag_field="type", tag=kind.__name__
    )


def _as_map(event: KVCacheEvent, *, nil_fields: frozenset[str]) -> dict[str, Any]:
    """The map of an event with more fields than a writer has."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    required = REQUIRED[type(event)]  # type: ignore[index]
    kept = {
        name: value for name, value in fields.items() if value is not None or name in nil_fields or name in required
    }
    return {"type": type(event).__name__} | kept


# The source of a lowering. With checks it returns None, or raises struct.error, where somebody must look closer.
#
# Each kind of event has a branch: its required fields, then one expression for each number of options that are given;
# most events give none, or their medium alone. The lowering of many events also tells what they change
# (``BlockChanges``):
# neighbouring ones of one kind and location together, so that little more is done for each than to add its hashes.

_SEQUENCES = frozenset({"extra_keys", "lookahead_token_ids"})
"""Options that are looked at by a function of their own: any depth may be wrong with them."""

_SITE = ("group_idx", "locality", "ownership")
"""Besides the medium, what says where blocks are."""


def _checks_of_required(kind: type[WireEvent], *, is_one: bool) -> list[str]:
    hashes, parent = [], ["parents.append(parent_block_hash)"]
    if is_one:  # no list of them is worth making
        look = "if type({0}) is not int or not lowest <= {0} <= highest:"
        hashes = ["if len(block_hashes) == 1:", "    block_hash = block_hashes[0]", f"    {look.format('block_hash')}"]
        hashes += ["        return None", "elif not are_hashes(block_hashes):", "    return None"]
        parent = [look.format("parent_block_hash"), "    return None"]
    if kind is not BlockStored:
        return ["if type(block_hashes) is not tuple:", "    return None", *hashes]
    return [
        "if type(block_hashes) is not tuple or type(token_ids) is not tuple:",
        "    return None",
        "if block_size is not size:",  # as a rule it is that of the event before
        "    if type(block_size) is not int or block_size < 1:",
        "        return None",
        "    size = block_size",
        "count = len(token_ids)",
        "if count != len(block_hashes) * block_size or lora_id is not None and type(lora_id) is not int:",
        "    return None",
        "if count != num_packed:",  # as above
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


def _telling(kind: type[WireEvent], place: str, location: str) -> list[str]:
    """Add the hashes to what the event before told, or begin anew; what is ``place`` here is known by identity."""
    return [
        f"if {place} is not {kind.__name__}_at:",
        "    hashes = []",
        f"    changes.append(({kind.__name__}, {location}, hashes))",
        "    BlockStored_at = BlockRemoved_at = nowhere",
        f"    {kind.__name__}_at = {place}",
        "hashes += block_hashes",
    ]


def _branch(kind: type[WireEvent], form: _Form, *, is_checked: bool, is_one: bool) -> list[str]:
    """What is done with an event of one kind."""
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
        few = _telling(kind, "medium", "here if medium is None else (medium, None, None, None)")
        few[1:1] = [f"    {line}" for line in check_of_medium]  # as a rule it is that of the event before
    few += ["if medium is None:", f"    {take.format(form.rows[0])}", "else:", f"    {take.format(form.rows[1])}"]
    many = [f"{name} = event.{name}" for name in options[1:]]
    if is_checked:
        many += [line for name in options for line in _check_of_option(kind, name)]
    if not is_one:
        many += [
            "place = medium",
            f"if not ({_are_none(_SITE)}):",
            f"    place = block_location(medium, {', '.join(_SITE)})",
        ]
        many += [f"    if place == {kind.__name__}_at:", f"        place = {kind.__name__}_at"]
        many += _telling(kind, "place", "place if type(place) is tuple else block_location(medium, None, None, None)")
    word = "if"
    for count in range(len(options), 1, -1):
        many += [f"{word} {options[count - 1]} is not None:", f"    {take.format(form.rows[count])}"]
        word = "elif"
    lines += ["medium = event.medium", f"if {_are_none(options[1:], 'event.')}:", *(f"    {line}" for line in few)]
    return [*lines, "else:", *(f"    {line}" for line in many)]


def _are_none(names: Iterable[str], owner: str = "") -> str:
    return " and ".join(f"{owner}{name} is None" for name in names)


def _source(form_of: Callable[[type[WireEvent]], _Form], *, is_checked: bool, is_one: bool) -> str:
    """The source of ``lower(event)``, which gives a row, or of ``lower(events)``, which gives rows and changes."""
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
        lines += ["    told = pack_changes(changes)"]
        lines += ["    return None if told is None or not are_hashes(parents) else (rows, told)"]
    return "\n".join(lines) + "\n"


def _trusted_source(form: _Form) -> str:
    """The source of ``lower(events)`` without checks: one expression for what caches store, a call for the rest."""
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
    """Most extra keys are numbers and names; True only where all are."""
    return all(each is None or (type(each) is tuple and _PLAIN_TYPES.issuperset(map(type, each))) for each in value)


def _are_integers(value: Sequence[Any]) -> bool:
    return {*map(type, value)} == {int}


_QUICK_LOOKS: dict[str, Callable[[Sequence[Any]], bool]] = {
    "extra_keys": _are_plain_keys,
    "lookahead_token_ids": _are_integers,
}
"""To ask msgspec takes ten microseconds; what passes here, passes there."""


def _is_of(name: str, wanted: Any) -> Callable[[object], bool]:
    quick_look = _QUICK_LOOKS[name]

    def is_such(value: object) -> bool:
        if type(value) is tuple and quick_look(value):
            return True
        try:
            msgspec.convert(value, wanted)
        except (msgspec.ValidationError, RecursionError):
            return False
        return type(value) is tuple

    return is_such


class RowMaker(Protocol):
    """Makes the row of one event; None where somebody must look closer."""

    def __call__(self, event: KVCacheEvent, /) -> Any: ...


class RowsMaker(Protocol):
    """Makes the rows of events."""

    def __call__(self, events: Sequence[KVCacheEvent], /) -> list[Any]: ...


class RowsWithChangesMaker(Protocol):
    """Makes the rows of events, and tells what they change; None where somebody must look closer."""

    def __call__(self, events: Sequence[KVCacheEvent], /) -> tuple[list[Any], BlockChanges] | None: ...


class DialectWriter:
    """How the events of a batch become rows in one dialect: one per event, for msgspec to write.

    Args:
        form_of: how each kind of event stands on the wire.
        writers: the structs that the forms name.

    Attributes:
        trusted, trusted_one: the rows of events whose values are known to be sound, and the row of one; TypeError for
            an event that is none of the three.
        told: the same, and what the events change; change_of: what one changes.
        checked, checked_one: the same of any events; struct.error, or None, where somebody must look closer.
        sound: says closer what is wrong with an event, or returns it as it may go on the wire.
    """

    __slots__ = ("change_of", "checked", "checked_one", "sound", "told", "trusted", "trusted_one")

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
            scope[f"is_{name}"] = _is_of(name, get_type_hints(BlockStored, include_extras=True)[name])
        self.sound = validated_event
        self.change_of = _change_of
        self.trusted_one: RowMaker = compile_function(
            "lower", _source(form_of, is_checked=False, is_one=True), dict(scope)
        )
        self.trusted: RowsMaker = compile_function(
            "lower", _trusted_source(form_of(BlockStored)), {**scope, "lower_one": self.trusted_one}
        )
        self.told: RowsWithChangesMaker = compile_function(
            "lower", _source(form_of, is_checked=False, is_one=False), dict(scope)
        )
        self.checked_one: RowMaker = compile_function(
            "lower", _source(form_of, is_checked=True, is_one=True), dict(scope)
        )
        self.checked: RowsWithChangesMaker = compile_function(
            "lower", _source(form_of, is_checked=True, is_one=False), dict(scope)
        )


def unknown_event(event: object) -> TypeError:
    """An unknown tag would cost some readers the whole batch."""
    return TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")


def _is_sound(event: KVCacheEvent) -> bool:
    """True when every value is one that all readers take; False where somebody must look closer."""
    try:
        return DIALECT_WRITERS["array"].checked_one(event) is not None
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
"""Return the first stored event whose tokens do not fill its blocks, or None. Readers drop one."""


# Looking closer: at the values of an event that did not pass as sound.

_WRITTEN = {kind: get_type_hints(kind, include_extras=True) for kind in WIRE_EVENTS}


def validated_event(event: KVCacheEvent) -> KVCacheEvent:
    """Return ``event`` as it may go on the wire: unsigned hashes of 64 bits become the signed ones that readers make.

    Raises:
        TypeError: it is none of the three events.
        ValueError: a reader would refuse it; the message names the field.
    """
    kind = _wire_kind(event)
    if _is_sound(event):
        return event
    values: dict[str, Any] = {name: getattr(event, name) for name in kind.__struct_fields__}
    if kind is not AllBlocksCleared:
        hashes = values["block_hashes"]
        values["block_hashes"] = tuple(map(_wrapped, hashes)) if isinstance(hashes, tuple) else hashes
        if kind is BlockStored:
            values["parent_block_hash"] = _wrapped(values["parent_block_hash"])
    sound = kind(**values)
    if _is_sound(sound):
        return sound
    for name, value in values.items():
        _check_field(name, value, _WRITTEN[kind][name])
    if first_token_mismatch((sound,)) is not None:
        raise ValueError("tokens do not fill the blocks")
    return sound


def _check_field(name: str, value: object, wanted: Any) -> None:
    if isinstance(value, set | frozenset | bytearray):  # msgspec takes them for arrays
        raise ValueError(f"{name}: {type(value).__name__} is no tuple")
    try:
        msgspec.convert(value, wanted)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from error


def _wrapped(block_hash: object) -> object:
    is_unsigned = type(block_hash) is int and 2**63 <= block_hash < 2**64
    return signed_block_hash(block_hash) if is_unsigned else block_hash


def _wire_kind(event: KVCacheEvent) -> type[WireEvent]:
    """The event's type, also for a class derived from it; TypeError for none of the three."""
    for kind in WIRE_EVENTS:
        if isinstance(event, kind):
            return kind
    raise unknown_event(event)


# The dialects.


def _of_maps(nil_fields: frozenset[str]) -> DialectWriter:
    writers = {f"{kind.__name__}Map": _map_writer(kind, nil_fields) for kind in WIRE_EVENTS}
    writers["as_map"] = partial(_as_map, nil_fields=nil_fields)
    return DialectWriter(lambda kind: _map_form(kind, nil_fields), writers)


DIALECT_WRITERS = {
    "array": DialectWriter(_array_form, {}),
    "map": _of_maps(frozenset()),
    "vllm": _of_maps(VLLM_NIL_FIELDS),
}
"""By dialect."""
