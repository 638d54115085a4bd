"""How the ranks of a replica agree: proposals, agreed values, and the groups over which ranks reduce.

**What ranks must agree on.** Every rank holds its own slice of the same pages and runs the same scheduler on the same
requests. The scheduler's decisions depend on which pages are usable, so all ranks must know the same pages on the same
tiers. The ranks make the same calls, but their I/O differs: a copy may end earlier on one rank, a store may fail on
another, and a third may lack a host page. Therefore a rank never acts on its own I/O events. It puts them into a
proposal, and every rank carries out only what all ranks agreed on.

**One unconditional packed MIN per step.** A rank packs all questions of one point in the step into one int64 vector,
and the ranks reduce their vectors to the minimum, once per step, also when no operation is under way. If a collective
depended on a condition that only some ranks see, the others would wait forever, or one rank's collective would meet
another rank's next one. A rank that cannot do something contributes False or 0; it never stays away. MIN is the only
operator: MAX(v) is ``~MIN(~v)`` (``~`` reverses the order of int64 and cannot overflow), "all agree" is the MIN of 0
and 1, "any agrees" is their MAX, and values are equal if their MIN equals their MAX. A MIN over the attention-CP group,
then over the attention-TP group, then over the pipeline group is the MIN over all ranks of the replica.

**Pipeline stages take part.** Each stage holds its own layers of the same pages. A copy that failed on a later stage
only has left a torn page there, so relaying the agreement of stage 0 to the other stages (as SGLang 0.5.23 does) is not
enough: a later stage could wait for its own copy, but could not report that the copy failed. Stage 0 does decide alone
which requests and commands a step begins with; its ``RequestReceiver`` broadcasts them. The cost: all stages meet once
per step.

**Reserve, vote, commit.** Either all ranks take pages or none does. Each rank reserves pages, which it may write to but
which no request may read. Its next proposals say whether the reservation succeeded and how far its I/O has come. When
the agreed values say which pages have arrived on all ranks, each rank commits exactly those and releases the others. No
request sees the pages between reserve and commit, so a rank that fails in between invalidates nothing.

**The digest.** Each proposal carries a digest of which page is on which tier, in an ``equal`` slot. Ranks that have
diverged notice at the very next step, before a request reads a page that another rank does not have.

**The header.** The first block of a proposal has a fixed length and begins with the operation and slots (as a digest),
the step and the call number. Ranks that ask different questions therefore notice it in the collective that they share,
without an extra message. Only after the headers match do they reduce the remaining blocks of a long proposal: gloo
aborts a process whose peers contribute a vector of another length (measured with torch 2.13).

The invariant: after agreement n all ranks have the same agreed values n. By induction they have the same tree, the same
operations under way and the same slots in the next proposal. ``tests/agreement/test_proposals_replica.py`` replaces
the agreed value of each slot in turn by the rank's own value and checks that the ranks diverge.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Literal, TypeAlias

import msgspec

from scheduler_components.agreement.sync import (
    MAX_OPERATION_BYTES,
    SyncCall,
    SyncGroup,
    describe_calls,
    pack_call,
    unpack_calls,
)
from scheduler_components.errors import (
    ComponentError,
    ConfigError,
    SettingsDivergenceError,
    SyncClosedError,
    SyncDivergenceError,
    SyncTimeoutError,
)

__all__ = [
    "BLOCK_INTS",
    "MIN_NEUTRAL",
    "AgreedValues",
    "ParallelGroups",
    "Proposal",
    "Slots",
    "all_reduce_min",
    "close_groups",
    "divergence_error",
    "elementwise_min",
]

BLOCK_INTS = 256
"""Length of the first block, which every agreement reduces: the header and up to 250 integers of slots."""

MIN_NEUTRAL = 2**63 - 1
"""The neutral value of a MIN. A rank that has no value contributes it and does not change the result."""

_HEADER_INTS = 6
_CLOCK_SLOT = "now us"
_US_PER_S = 1_000_000
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_PADDING = [0] * BLOCK_INTS

SlotKind: TypeAlias = Literal["min", "max", "all", "any", "equal"]


def elementwise_min(vectors: Sequence[Sequence[int]]) -> list[int]:
    """Return the element-wise minimum of vectors of equal length."""
    if len({len(vector) for vector in vectors}) > 1:
        raise ValueError(f"vectors of {', '.join(str(len(vector)) for vector in vectors)} integers have no minimum")
    # In a broadcast all ranks but one contribute neutral values, and counting these is faster than comparing columns.
    others = [vector for vector in vectors if vector.count(MIN_NEUTRAL) < len(vector)] or vectors[:1]
    if all(vector == others[0] for vector in others[1:]):
        return list(others[0])
    return list(map(min, *others))


def all_reduce_min(groups: Sequence[SyncGroup], values: list[int], call: SyncCall) -> list[int]:
    """Return the element-wise minimum of the vectors of all ranks that ``groups`` connect, hop by hop."""
    for group in groups:
        values = group.all_reduce_min(values, call)
    return values


def close_groups(groups: Sequence[SyncGroup]) -> None:
    """Close every group, in order, also after one of them raises; then raise its error."""
    with ExitStack() as closing:
        for group in reversed(groups):
            closing.callback(group.close)


def divergence_error(groups: Sequence[SyncGroup], call: SyncCall) -> SyncDivergenceError:
    """Gather every rank's call and return the error that lists them. All ranks must call this together."""
    return SyncDivergenceError(call.number, describe_calls(_all_gather_calls(groups, call)))


def _all_gather_calls(groups: Sequence[SyncGroup], call: SyncCall) -> list[SyncCall]:
    records = pack_call(call)
    for group in groups:
        records = group.all_gather(records, call)
    return unpack_calls(records)


class AgreedValues(msgspec.Struct, frozen=True):
    """The values that all ranks agreed on, identical on each rank.

    Attributes:
        numbers: results of ``min`` and ``max`` slots by name.
        flags: results of ``all``, ``any`` and ``equal`` slots by name.
    """

    numbers: dict[str, int]
    flags: dict[str, bool]

    @property
    def now_s(self) -> float:
        """Seconds on the clock of the leading rank at this agreement, for proposals with ``Proposal.clock``.

        A timeout that compares with it ends in the same step on all ranks.

        Raises:
            ConfigError: no rank of the replica leads.
        """
        now_us = self.numbers[_CLOCK_SLOT]
        if now_us == MIN_NEUTRAL:
            raise ConfigError("leads", False, "on all ranks, so no clock is agreed", "let one rank of a replica lead")
        return now_us / _US_PER_S


class Slots:
    """Slots that a component fills together in every step. Kinds and names are fixed; only the values change.

    Args:
        slots: (kind, name) pairs; a kind is ``min``, ``max``, ``all``, ``any`` or ``equal``, as in ``Proposal``.
    """

    __slots__ = ("kinds", "names")

    def __init__(self, *slots: tuple[SlotKind, str]) -> None:
        self.kinds = tuple(kind for kind, _ in slots)
        self.names = tuple(name for _, name in slots)

    def __repr__(self) -> str:
        return f"<Slots: {', '.join(self.names)}>"


_CLOCK_SLOTS = Slots(("min", _CLOCK_SLOT))


class _Layout(msgspec.Struct, frozen=True):
    """The positions of a proposal's slots in its vector: the header, one integer per slot, then the complements of the
    ``equal`` slots. Cached, because it is the same at every step.

    Attributes:
        digest: of operation, kinds and names.
        inverted: positions of ``max`` and ``any`` slots, which are packed as complements.
        equal: (name, position, position of the complement).
        numbers: (name, position) of ``min`` and ``max`` slots.
        maxima: the ``max`` slots among them, which are read back as complements.
        flags: (name, position, the value that means False) of ``all`` and ``any`` slots. ``equal`` slots are listed to
            keep the order of names; ``unpack`` overwrites their value.
    """

    digest: int
    inverted: tuple[int, ...]
    equal: tuple[tuple[str, int, int], ...]
    numbers: tuple[tuple[str, int], ...]
    maxima: tuple[tuple[str, int], ...]
    flags: tuple[tuple[str, int, int], ...]


@lru_cache(maxsize=16)
def _layout_of(operation: str, parts: tuple[Slots, ...]) -> _Layout:
    kinds = [kind for part in parts for kind in part.kinds]
    names = [name for part in parts for name in part.names]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{operation!r} has two slots named {twice!r}")
    placed = list(zip(kinds, names, range(_HEADER_INTS, _HEADER_INTS + len(names)), strict=True))
    complements = count(_HEADER_INTS + len(names))
    text = "\0".join([operation, *(f"{kind}:{name}" for kind, name, _ in placed)])
    return _Layout(
        digest=_digest_of(text),
        inverted=tuple(at for kind, _, at in placed if kind in ("max", "any")),
        equal=tuple((name, at, next(complements)) for kind, name, at in placed if kind == "equal"),
        numbers=tuple((name, at) for kind, name, at in placed if kind in ("min", "max")),
        maxima=tuple((name, at) for kind, name, at in placed if kind == "max"),
        flags=tuple((name, at, -1 if kind == "any" else 0) for kind, name, at in placed if kind not in ("min", "max")),
    )


class Proposal:
    """One rank's contribution to one agreement: named slots. All ranks fill the same slots in the same order.

    Args:
        operation: the purpose of the agreement, at most 64 bytes; part of every error message.
        step: the caller's step. Ranks at different steps get a ``SyncDivergenceError``.

    Raises:
        ValueError: the operation is too long, two slots have one name, or a value is not an int64.
    """

    __slots__ = ("_parts", "_values", "operation", "step")

    def __init__(self, operation: str, *, step: int) -> None:
        if not 0 < len(operation.encode()) <= MAX_OPERATION_BYTES:
            raise ValueError(f"operation {operation!r} is not 1 to {MAX_OPERATION_BYTES} bytes long")
        self.operation = operation
        self.step = step
        self._parts: list[Slots] = []
        self._values: list[int] = []

    def min(self, name: str, value: int) -> None:
        """Add a slot that returns the smallest value of all ranks."""
        self._add("min", name, value)

    def max(self, name: str, value: int) -> None:
        """Add a slot that returns the largest value of all ranks."""
        self._add("max", name, value)

    def all(self, name: str, agrees: bool) -> None:
        """Add a slot that is True if every rank agrees."""
        self._add("all", name, agrees)

    def any(self, name: str, agrees: bool) -> None:
        """Add a slot that is True if at least one rank agrees."""
        self._add("any", name, agrees)

    def equal(self, name: str, value: int) -> None:
        """Add a slot that is True if all ranks have the same value, for example a digest."""
        self._add("equal", name, value)

    def clock(self, now_s: float | None) -> None:
        """Add the slot of the agreed clock, which ``AgreedValues.now_s`` returns.

        Args:
            now_s: monotonic seconds of this rank if it leads, else None. If several ranks lead, the smallest counts.
        """
        self.fill(_CLOCK_SLOTS, (MIN_NEUTRAL if now_s is None else int(now_s * _US_PER_S),))

    def fill(self, slots: Slots, values: Sequence[int]) -> None:
        """Add ``slots`` with one value each."""
        try:
            checked = array("q", values)  # checks the range and converts bool to int
        except (OverflowError, TypeError) as error:
            for name, value in zip(slots.names, values, strict=False):
                if not (isinstance(value, int) and _INT64_MIN <= value <= _INT64_MAX):
                    raise ValueError(f"{self.operation!r}: {name}={value} is not a signed 64-bit integer") from error
            raise
        if len(checked) != len(slots.names):
            raise ValueError(f"{self.operation!r}: {len(checked)} values for {len(slots.names)} slots, {slots}")
        self._parts.append(slots)
        self._values += checked

    def __len__(self) -> int:
        return len(self._values)

    def pack(self, call_number: int) -> list[int]:
        """Return the vector to reduce: at least ``BLOCK_INTS`` long, and equally long on all ranks with these slots."""
        layout, step = self._layout(), self.step
        packed = [layout.digest, ~layout.digest, step, ~step, call_number, ~call_number]
        packed += self._values
        for at in layout.inverted:
            packed[at] = ~packed[at]
        for _, at, _ in layout.equal:
            packed.append(~packed[at])
        packed += _PADDING[len(packed) :]
        return packed

    @staticmethod
    def headers_match(reduced: Sequence[int]) -> bool:
        """Return whether all ranks brought the same operation, slots, step and call number."""
        return reduced[0] == ~reduced[1] and reduced[2] == ~reduced[3] and reduced[4] == ~reduced[5]

    def unpack(self, reduced: Sequence[int]) -> AgreedValues:
        """Return the agreed values of a reduced vector. Check ``headers_match`` first."""
        layout = self._layout()
        numbers = {name: reduced[at] for name, at in layout.numbers}
        for name, at in layout.maxima:
            numbers[name] = ~reduced[at]
        flags = {name: reduced[at] != no for name, at, no in layout.flags}
        for name, at, complement in layout.equal:
            flags[name] = reduced[at] == ~reduced[complement]
        return AgreedValues(numbers, flags)

    def own_values(self) -> AgreedValues:
        """Return the agreed values of a replica of one rank, without a vector."""
        layout, values = self._layout(), self._values
        numbers = {name: values[at - _HEADER_INTS] for name, at in layout.numbers}
        flags = {name: bool(values[at - _HEADER_INTS]) for name, at, _ in layout.flags}
        for name, _, _ in layout.equal:
            flags[name] = True
        return AgreedValues(numbers, flags)

    def _add(self, kind: SlotKind, name: str, value: int) -> None:
        if any(name in slots.names for slots in self._parts):
            raise ValueError(f"{self.operation!r} has two slots named {name!r}")
        self.fill(Slots((kind, name)), (value,))

    def _layout(self) -> _Layout:
        return _layout_of(self.operation, tuple(self._parts))


def _digest_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


@dataclass(slots=True, kw_only=True)
class ParallelGroups:
    """One rank's member of the agreement between all attention-CP x attention-TP x PP ranks of a replica.

    Each thread has its own ``ParallelGroups`` over its own groups. All ranks make the same calls in the same order, and
    every agreement checks this: if the operation, the slots, the step or the call number differ, all ranks raise a
    ``SyncDivergenceError`` that lists every rank's call. After any error the object raises the same error again,
    because the ranks are no longer in step.

    Attributes:
        rank: this process's global rank.
        groups: the groups to reduce over, in order, each with more than one rank; empty for a replica of one rank.
        num_calls: agreements so far.
        num_collectives: reductions so far: ``len(groups)`` per agreement while proposals fit one block.
    """

    rank: int = 0
    groups: tuple[SyncGroup, ...] = ()
    num_calls: int = field(default=0, init=False)
    num_collectives: int = field(default=0, init=False)
    _failure: ComponentError | None = field(default=None, init=False)

    def reduce(self, proposal: Proposal) -> AgreedValues:
        """Reduce this rank's proposal with those of all other ranks and return the agreed values.

        Raises:
            SyncTimeoutError: a rank did not join in time.
            SyncDivergenceError: the ranks made different proposals.
            SyncClosedError: the groups are closed.
        """
        if self._failure is not None:
            raise self._failure
        call = SyncCall(self.rank, self.num_calls, proposal.step, proposal.operation)
        self.num_calls += 1
        if not self.groups:
            return proposal.own_values()
        packed = proposal.pack(call.number)
        try:
            is_long = len(packed) > BLOCK_INTS
            reduced = self._reduce(packed[:BLOCK_INTS] if is_long else packed, call)
            if not proposal.headers_match(reduced):
                # The reduced header is the same on all ranks, so all of them take this branch.
                raise divergence_error(self.groups, call)
            if is_long:
                reduced += self._reduce(packed[BLOCK_INTS:], call)
        except (SyncTimeoutError, SyncDivergenceError) as error:
            self._failure = error
            raise
        return proposal.unpack(reduced)

    def all_reduce_min(self, operation: str, value: int, *, step: int) -> int:
        """Return the smallest value of all ranks."""
        proposal = Proposal(operation, step=step)
        proposal.min("value", value)
        return self.reduce(proposal).numbers["value"]

    def barrier(self, operation: str, *, step: int) -> None:
        """Wait until all ranks have called it."""
        self.reduce(Proposal(operation, step=step))

    def check_equal(self, operation: str, settings: Mapping[str, object], *, step: int) -> None:
        """Check that all ranks have the same settings.

        Args:
            operation: what the settings are for.
            settings: values by field, in one order on all ranks. They are compared and shown as ``repr`` writes them.
            step: the caller's step.

        Raises:
            SettingsDivergenceError: with each field that differs and its value on each rank.
        """
        proposal = Proposal(operation, step=step)
        for name, value in settings.items():
            proposal.equal(name, _digest_of(repr(value)))
        agreed = self.reduce(proposal).flags
        # The flags are the same on all ranks, so either all of them gather, or none.
        differing = {name: self._gather_texts(repr(settings[name]), step) for name in settings if not agreed[name]}
        if differing:
            self._failure = SettingsDivergenceError(operation, differing)
            raise self._failure

    def all_gather(self, operation: str, values: Sequence[int], *, step: int) -> list[int]:
        """Return the int64 vectors of all ranks, which have one length, concatenated; the order of ranks is arbitrary.

        Whether a step gathers must be agreed first: a rank that stays away is missing on all others.

        Raises:
            SyncTimeoutError: a rank did not join in time.
            SyncDivergenceError: the ranks made different calls.
            SyncClosedError: the groups are closed.
        """
        if self._failure is not None:
            raise self._failure
        call = SyncCall(self.rank, self.num_calls, step, operation)
        self.num_calls += 1
        gathered = list(values)
        try:
            for group in self.groups:
                gathered = group.all_gather(gathered, call)
        except (SyncTimeoutError, SyncDivergenceError) as error:
            self._failure = error
            raise
        return gathered

    def close(self) -> None:
        """Close all groups. Later agreements raise ``SyncClosedError``. Safe to call twice.

        If a group cannot be closed, its error is raised after the others are closed.
        """
        self._failure = SyncClosedError("the parallel groups are closed")
        close_groups(self.groups)

    def _reduce(self, values: list[int], call: SyncCall) -> list[int]:
        reduced = all_reduce_min(self.groups, values, call)
        self.num_collectives += len(self.groups)
        return reduced

    def _gather_texts(self, text: str, step: int) -> dict[int, str]:
        """Return the first bytes of each rank's text."""
        shown = text.encode()[:MAX_OPERATION_BYTES].decode(errors="ignore")
        call = SyncCall(self.rank, self.num_calls, step, shown)
        return {each.rank: each.operation for each in _all_gather_calls(self.groups, call)}
