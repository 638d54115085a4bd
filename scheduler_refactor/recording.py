"""Recordings of what leaves a scheduler, and the first difference of two of them.

An *exit* is a way by which bytes leave a scheduler: event payloads, messages to clients, load reports, a metrics page,
log records, errors. A `Recording` has all bytes of all exits in the order in which they left. Two schedulers have the
same behaviour on a workload if their recordings are equal. The order over all exits counts, so two swapped calls are
a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from scheduler_components.errors import ConfigError, DecodeError

RAISED = "raised"
"""The exit of an exception that ends a play."""

Decoder = Callable[[bytes], object]
"""Turns the bytes of an exit into a value, for the text of a difference."""

_FORMAT = 1
_CONTEXT_BYTES = 12
_MAX_SHOWN_CHARACTERS = 120


class Emission(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that left by one exit during step number `step`."""

    step: int
    exit: str
    payload: bytes


class Recording(msgspec.Struct, frozen=True):
    """Everything that left a scheduler during one workload.

    Attributes:
        steps: label of each step, for example the action that the harness ran.
        emissions: in the order in which they left.
        reached: targets that the workload reached, for example ``"retraction"``.
    """

    steps: tuple[str, ...]
    emissions: tuple[Emission, ...]
    reached: tuple[str, ...] = ()


class Difference(msgspec.Struct, frozen=True):
    """The first place at which two recordings differ.

    Attributes:
        step: number of the step, from 0.
        label: the label of the step.
        exit: the exit; that of the old recording where the exits themselves differ.
        offset: the first differing byte of the payload.
        old: payload of the old recording; None if it has no emission here.
        new: the same of the new recording.
        problem: what differs, as a clause.
    """

    step: int
    label: str
    exit: str
    offset: int
    old: bytes | None
    new: bytes | None
    problem: str

    def __str__(self) -> str:
        place = f"step {self.step}" + (f" ({self.label})" if self.label else "")
        return f"{place}, exit {self.exit!r}, byte {self.offset}: {self.problem}"


def first_difference(
    old: Recording, new: Recording, decoders: Mapping[str, Decoder] | None = None
) -> Difference | None:
    """Return the first difference of two recordings of the same workload; None if they are equal.

    Args:
        old: recording of the scheduler that is right by definition.
        new: recording of the scheduler to compare with it.
        decoders: by exit. Its values appear in the text of the difference.
    """
    if old.emissions == new.emissions and old.steps == new.steps:
        return None
    for number in range(max(len(old.emissions), len(new.emissions))):
        mine = old.emissions[number] if number < len(old.emissions) else None
        other = new.emissions[number] if number < len(new.emissions) else None
        if mine != other:
            return _difference(old, new, number, mine, other, decoders or {})
    step = next(
        at for at in range(max(len(old.steps), len(new.steps))) if old.steps[at : at + 1] != new.steps[at : at + 1]
    )
    labels = [repr(each.steps[step]) if step < len(each.steps) else "no step" for each in (old, new)]
    return Difference(step, "", "", 0, None, None, f"old has {labels[0]}, new has {labels[1]}")


def _difference(
    old: Recording,
    new: Recording,
    number: int,
    mine: Emission | None,
    other: Emission | None,
    decoders: Mapping[str, Decoder],
) -> Difference:
    first = mine if other is None or (mine is not None and mine.step <= other.step) else other
    assert first is not None  # one of the two differs from the other
    steps = old.steps if first is mine else new.steps
    label = steps[first.step] if first.step < len(steps) else ""
    if mine is None or other is None or (mine.step, mine.exit) != (other.step, other.exit):
        payloads = (mine.payload if mine else None, other.payload if other else None)
        return Difference(first.step, label, first.exit, 0, *payloads, _other_exit(old, new, number, first.step))
    offset = _first_differing_byte(mine.payload, other.payload)
    problem = f"old {_around(mine.payload, offset)}, new {_around(other.payload, offset)}"
    if (decode := decoders.get(mine.exit)) is not None:
        problem += _decoded(mine.payload, other.payload, decode)
    return Difference(mine.step, label, mine.exit, offset, mine.payload, other.payload, problem)


def _other_exit(old: Recording, new: Recording, number: int, step: int) -> str:
    """Return what differs when the exits of two emissions differ: the order, or their number."""
    left = [[each for each in of.emissions[number:] if each.step == step] for of in (old, new)]
    exits = [", ".join(repr(each.exit) for each in rest[:4]) or "nothing" for rest in left]
    same = Counter((each.exit, each.payload) for each in left[0]) == Counter((e.exit, e.payload) for e in left[1])
    order = "the same emissions in another order: " if same else ""
    return f"{order}old goes on with {exits[0]}, new with {exits[1]}"


def _first_differing_byte(old: bytes, new: bytes) -> int:
    for at, (mine, other) in enumerate(zip(old, new, strict=False)):
        if mine != other:
            return at
    return min(len(old), len(new))


def _around(payload: bytes, offset: int) -> str:
    """Return the bytes around the difference, and the length of the payload."""
    begin = max(0, offset - _CONTEXT_BYTES)
    return f"{payload[begin : offset + _CONTEXT_BYTES]!r} of {len(payload)} bytes"


def _decoded(old: bytes, new: bytes, decode: Decoder) -> str:
    try:
        values = decode(old), decode(new)
    except Exception as error:  # noqa: BLE001 - the decoder is the user's, and the bytes are those of a broken scheduler
        return f"; the decoder failed: {error!r}"
    found = next(_differing_values(*values, path=""), None)
    if found is None:
        return "; the decoded values are equal"
    path, mine, other = found
    return f"; {path or 'value'}: old {_short(mine)}, new {_short(other)}"


def _differing_values(old: object, new: object, path: str) -> Iterator[tuple[str, object, object]]:
    """Yield the leaves that differ: path, old value, new value."""
    if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct) and type(old) is type(new):
        old, new = msgspec.structs.asdict(old), msgspec.structs.asdict(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        for key in old:
            yield from _differing_values(old[key], new[key], f"{path}.{key}" if path else str(key))
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for at, (mine, other) in enumerate(zip(old, new, strict=True)):
            yield from _differing_values(mine, other, f"{path}[{at}]")
    elif old != new or type(old) is not type(new):
        yield path, old, new


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else f"{shown[:_MAX_SHOWN_CHARACTERS]}..."


class Coverage:
    """Counts what the compared recordings contain, because an exit that stays silent proves nothing.

    Attributes:
        num_workloads: recordings that were added.
        payloads: exit -> its emissions.
        num_bytes: exit -> their bytes.
        reached: target -> workloads that reached it.
    """

    def __init__(self) -> None:
        self.num_workloads = 0
        self.payloads: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()

    def add(self, recording: Recording) -> None:
        """Count one recording."""
        self.num_workloads += 1
        for emission in recording.emissions:
            self.payloads[emission.exit] += 1
            self.num_bytes[emission.exit] += len(emission.payload)
        self.reached.update(set(recording.reached))

    def missing(self, exits: Sequence[str], targets: Sequence[str]) -> list[str]:
        """Return the exits that stayed silent and the targets that no workload reached."""
        silent = [f"exit {name!r} stayed silent" for name in exits if not self.payloads[name]]
        return silent + [f"no workload reached {name!r}" for name in targets if not self.reached[name]]

    def lines(self) -> Iterator[str]:
        """Yield a line for the workloads, and one per exit and target."""
        yield f"{self.num_workloads} workloads"
        for name in sorted(self.payloads):
            yield f"  exit {name}: {self.payloads[name]:,} payloads, {self.num_bytes[name]:,} bytes"
        for name in sorted(self.reached):
            yield f"  reached {name}: {self.reached[name]:,} workloads"


class RecordingFile(msgspec.Struct, frozen=True):
    """Recordings of one scheduler, each with its workload.

    Attributes:
        version: of the file's format.
        workloads: each as msgpack, because its type belongs to the harness.
        recordings: one per workload.
    """

    version: int
    workloads: tuple[bytes, ...]
    recordings: tuple[Recording, ...]


def write_recordings(path: Path, workloads: Sequence[object], recordings: Sequence[Recording]) -> None:
    """Write recordings and their workloads to a file.

    Raises:
        ConfigError: the file cannot be written, or a workload cannot be encoded.
    """
    try:
        encoded = tuple(map(msgspec.msgpack.encode, workloads))
    except (TypeError, msgspec.MsgspecError) as error:
        hint = "declare workloads as msgspec.Struct, with a tag for each member of a union"
        raise ConfigError("workload_type", "the harness's", f"cannot be encoded ({error})", hint) from error
    content = msgspec.msgpack.encode(RecordingFile(_FORMAT, encoded, tuple(recordings)))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError("file", str(path), f"cannot be written ({error.strerror})", "name another file") from error


def read_recordings(path: Path) -> RecordingFile:
    """Read a file of `write_recordings`.

    Raises:
        ConfigError: the file cannot be read.
        DecodeError: the file is no file of recordings, or of another version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError("file", str(path), f"cannot be read ({error.strerror})", "name another file") from error
    try:
        found = msgspec.msgpack.decode(content, type=RecordingFile)
    except msgspec.MsgspecError as error:
        raise DecodeError(f"{path} is no file of recordings: {error}") from error
    if found.version != _FORMAT or len(found.workloads) != len(found.recordings):
        raise DecodeError(f"{path} has version {found.version}, and this release reads {_FORMAT}; record it again")
    return found
