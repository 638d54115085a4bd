"""Events to what msgspec writes of them, in each dialect of this kit; with or without a look at every value.

An array of the wire leaves trailing None out, a map every None, and msgspec does the first for no struct. So the events
are lowered to tuples, or to structs made here for it. The source of the functions that do it is made from the fields
(as ``namedtuple`` makes its own): a loop over the events is half of what encoding small ones costs, and attributes
named in the source take a third of the time of any way over a list of names (measured).

A reader drops an event with a token id of -1, and some readers drop its whole batch. So every value is looked at before
it is written, in the same pass over the events. Tokens and hashes are packed by ``struct``, whatever comes of it: that
is the quickest look at many integers that there is (2.9 ns each; encoding one takes 3). Events of this kit's caches
were checked when their tokens entered the cache (``CheckedEvents``) and are lowered without.

One thing is overlooked: True and False among the tokens, which Python takes for 1 and 0. To find them would cost as
much as packing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct
from struct import error as PackError
from typing import Any, NamedTuple, Protocol, get_type_hints

import msgspec
from msgspec.structs import astuple

from scheduler_components.events import (
    VLLM_NIL_FIELDS,
    WIRE_EVENTS,
    AllBlocksCleared,
    BlockStored,
    KVCacheEvent,
    WireEvent,
    signed_block_hash,
)

__all__ = [
    "IS_UNFILLED",
    "LOWERINGS",
    "OPTIONS",
    "REQUIRED",
    "Lowering",
    "compiled",
    "first_unfilled",
    "pack_tokens",
    "sound_event",
    "unknown_event",
]

REQUIRED = {kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.required) for kind in WIRE_EVENTS}
OPTIONS = {kind: kind.__struct_fields__[len(REQUIRED[kind]) :] for kind in WIRE_EVENTS}

IS_UNFILLED = "len({0}token_ids) != len({0}block_hashes) * {0}block_size"
"""As source: to call a function for every event would cost as much as half of the check's loop."""


def compiled(name: str, source: str, scope: dict[str, Any]) -> Any:
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


pack_tokens = _Packers("I")
_pack_hashes = _Packers("n" if Struct("n").size == 8 else "q")  # the first takes a third of the time, where it fits
_PACKED_BOOL = bytes(7)
"""Part of a packed True and of a packed False, which look like 1 and 0: real hashes never have seven zero bytes."""


def _are_hashes(values: Sequence[Any]) -> bool:
    """True for signed 64-bit integers; struct.error, or False, for anything else."""
    return _PACKED_BOOL not in _pack_hashes[len(values)](*values) or {*map(type, values)} == {int}


# How one kind of event stands on the wire, as source.


class _Form(NamedTuple):
    """The expression for an event without any option, with the first one (``medium``) alone, and with any of them.

    ``{required}`` and ``{options}`` stand for the names of the fields, each with a comma behind it; ``count`` is the
    number of options up to the last one that is given. ``whole`` is that of an ``event`` of which no option
    has to be looked at.
    """

    plain: str
    placed: str
    full: str
    whole: str


def _array_form(kind: type[WireEvent]) -> _Form:
    head = f"({kind.__name__!r}, {{required}}"
    return _Form(f"{head})", f"{head}medium)", f"{head}*({{options}})[:count])", "lower_one(event)")


_MAX_MAP_FIELDS = 14
"""Beside the type: msgspec writes a longer header for every event of a struct that could have sixteen keys."""


def _map_form(kind: type[WireEvent], nil_fields: frozenset[str]) -> _Form:
    writer, num_required = f"{kind.__name__}Map", len(REQUIRED[kind])
    num_nils = len(nil_fields.intersection(OPTIONS[kind]))
    plain = f"{writer}({{required}}{'None, ' * num_nils})"
    placed = f"{writer}({{required}}medium, {'None, ' * (num_nils - 1)})"
    early, late = kind.__struct_fields__[num_required:_MAX_MAP_FIELDS], kind.__struct_fields__[_MAX_MAP_FIELDS:]
    full = f"{writer}({{required}}{''.join(f'{name}, ' for name in early)})"
    if not late:
        return _Form(plain, placed, full, "lower_one(event)")
    full += f" if count <= {len(early)} else as_map(event)"
    is_short = " and ".join(f"event.{name} is None" for name in late)
    return _Form(plain, placed, full, f"{writer}(*astuple(event)[:{_MAX_MAP_FIELDS}]) if {is_short} else as_map(event)")


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

_SEQUENCES = frozenset({"extra_keys", "lookahead_token_ids"})
"""Options that msgspec looks at: they are given seldom, and any depth may be wrong with them."""


def _checks_of_required(kind: type[WireEvent], *, is_one: bool) -> list[str]:
    hashes, parent = ["hashes += block_hashes"], ["hashes.append(parent_block_hash)"]
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
        "    num_packed, pack = count, pack_tokens[count]",
        "pack(*token_ids)",
        *hashes,
        "if parent_block_hash is not None:",
        *(f"    {line}" for line in parent),
    ]


def _checks_of_option(kind: type[WireEvent], name: str) -> list[str]:
    if name in _SEQUENCES:
        return [f"    if not is_{name}({name}):", "        return None"]
    wanted = "str" if get_type_hints(kind)[name] == str | None else "int"
    return [f"    if type({name}) is not {wanted}:", "        return None"]


def _branch(kind: type[WireEvent], form: _Form, *, is_checked: bool, is_one: bool) -> list[str]:
    """What is done with an event of one kind."""
    required, options = REQUIRED[kind], OPTIONS[kind]
    names = {"required": "".join(f"{name}, " for name in required), "options": "".join(f"{name}, " for name in options)}
    take = "return {}" if is_one else "rows.append({})"
    plain, placed, full = (take.format(each.format(**names)) for each in form[:3])
    lines = [f"{name} = event.{name}" for name in required]
    if is_checked and required:
        lines += _checks_of_required(kind, is_one=is_one)
    if not options:
        return [*lines, plain]
    lines += ["medium = event.medium", f"if {_no_option_but_medium(kind)}:"]
    lines += ["    if medium is None:", f"        {plain}", "    else:"]
    if is_checked:  # as a rule it is that of the event before
        lines += ["        if medium is not known:", "            if type(medium) is not str:"]
        lines += ["                return None", "            known = medium"]
    lines += [f"        {placed}", "else:", "    count = 0"]
    for number, name in enumerate(options, start=1):
        lines += [f"    {name} = event.{name}", f"    if {name} is not None:", f"        count = {number}"]
        if is_checked:
            lines += [f"    {line}" for line in _checks_of_option(kind, name)]
    return [*lines, f"    {full}"]


def _no_option_but_medium(kind: type[WireEvent]) -> str:
    return " and ".join(f"event.{name} is None" for name in OPTIONS[kind][1:])


def _source(form_of: Callable[[type[WireEvent]], _Form], *, is_checked: bool, is_one: bool) -> str:
    """The source of ``lower(event)`` or ``lower(events)``."""
    lines = ["def lower(event):" if is_one else "def lower(events):"]
    if is_checked:
        lines.append("    size = known = num_packed = None")
    if not is_one:
        lines += ["    rows = []", "    hashes = []", "    for event in events:"]
    pad, word = "    " if is_one else "        ", "if"
    lines.append(f"{pad}kind = type(event)")
    for kind in WIRE_EVENTS:
        lines.append(f"{pad}{word} kind is {kind.__name__}:")
        lines += [f"{pad}    {line}" for line in _branch(kind, form_of(kind), is_checked=is_checked, is_one=is_one)]
        word = "elif"
    lines += [f"{pad}else:", f"{pad}    return None" if is_checked else f"{pad}    raise unknown(event)"]
    if not is_one:
        lines.append("    return rows if are_hashes(hashes) else None")
    return "\n".join(lines) + "\n"


def _trusted_source(form: _Form) -> str:
    """The source of ``lower(events)`` without checks: one expression for what caches store, a call for the rest."""
    required = "".join(f"event.{name}, " for name in REQUIRED[BlockStored])
    plain, placed = (each.replace("medium", "event.medium").format(required=required) for each in form[:2])
    return f"""
def lower(events):
    return [
        (({plain} if event.medium is None else {placed}) if {_no_option_but_medium(BlockStored)} else {form.whole})
        if type(event) is BlockStored
        else lower_one(event)
        for event in events
    ]
"""


def _is_of(wanted: Any) -> Callable[[object], bool]:
    def is_such(value: object) -> bool:
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
    """Makes the rows of events; None where somebody must look closer."""

    def __call__(self, events: Sequence[KVCacheEvent], /) -> list[Any] | None: ...


class Lowering:
    """How the events of a batch become rows in one dialect: one per event, for msgspec to write.

    Args:
        form_of: how each kind of event stands on the wire.
        writers: the structs that the forms name.

    Attributes:
        trusted, trusted_one: the rows of events whose values are known to be sound, and the row of one; TypeError for
            an event that is none of the three.
        checked, checked_one: the same of any events; struct.error, or None, where somebody must look closer.
        sound: says closer what is wrong with an event, or returns it as it may go on the wire.
    """

    __slots__ = ("checked", "checked_one", "sound", "trusted", "trusted_one")

    def __init__(self, form_of: Callable[[type[WireEvent]], _Form], writers: dict[str, Any]) -> None:
        scope = {
            "astuple": astuple,
            "are_hashes": _are_hashes,
            "highest": 2**63 - 1,
            "lowest": -(2**63),
            "pack_tokens": pack_tokens,
            "unknown": unknown_event,
            **writers,
        }
        for name in _SEQUENCES:
            scope[f"is_{name}"] = _is_of(get_type_hints(BlockStored, include_extras=True)[name])
        self.sound = sound_event
        self.trusted_one: RowMaker = compiled("lower", _source(form_of, is_checked=False, is_one=True), dict(scope))
        self.trusted: RowsMaker = compiled(
            "lower", _trusted_source(form_of(BlockStored)), {**scope, "lower_one": self.trusted_one}
        )
        self.checked_one: RowMaker = compiled("lower", _source(form_of, is_checked=True, is_one=True), dict(scope))
        self.checked: RowsMaker = compiled("lower", _source(form_of, is_checked=True, is_one=False), dict(scope))


def unknown_event(event: object) -> TypeError:
    """An unknown tag would cost some readers the whole batch."""
    return TypeError(f"{type(event).__name__} is not a KV-cache event of the wire")


def _is_sound(event: KVCacheEvent) -> bool:
    """True when every value is one that all readers take; False where somebody must look closer."""
    try:
        return LOWERINGS["array"].checked_one(event) is not None
    except PackError:
        return False


first_unfilled: Callable[[Iterable[KVCacheEvent]], BlockStored | None] = compiled(
    "first_unfilled",
    f"""
def first_unfilled(events):
    for event in events:
        if isinstance(event, BlockStored) and {IS_UNFILLED.format("event.")}:
            return event
    return None
""",
    {},
)
"""Return the first stored event whose tokens do not fill its blocks, or None. Readers drop one."""


# Looking closer: at the values of an event that did not pass as sound.

_WRITTEN = {kind: get_type_hints(kind, include_extras=True) for kind in WIRE_EVENTS}


def sound_event(event: KVCacheEvent) -> KVCacheEvent:
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
    if first_unfilled((sound,)) is not None:
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


def _of_maps(nil_fields: frozenset[str]) -> Lowering:
    writers = {f"{kind.__name__}Map": _map_writer(kind, nil_fields) for kind in WIRE_EVENTS}
    writers["as_map"] = partial(_as_map, nil_fields=nil_fields)
    return Lowering(lambda kind: _map_form(kind, nil_fields), writers)


LOWERINGS = {"array": Lowering(_array_form, {}), "map": _of_maps(frozenset()), "vllm": _of_maps(VLLM_NIL_FIELDS)}
"""By dialect."""
