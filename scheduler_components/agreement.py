"""How the ranks of a replica agree: proposals, the domain of ranks that agree, and what they agreed.

**What must be agreed.** Every rank holds its own slice of the same pages and runs the same scheduler on the same
requests. The scheduler's decisions follow from which pages are usable, so all ranks must know the same pages on the
same tiers. Their calls are the same; their I/O is not. A copy may end earlier here, a store may fail there, a host page
may be missing on one rank. So what I/O reports is each rank's own and decides nothing: it goes into a proposal, and
only what all ranks agreed is carried out.

**One unconditional packed MIN per step.** Everything that is asked at one point is packed into one int64 vector, and
the ranks take its minimum, once per step, whether or not anything is under way. A collective behind a condition that
one rank sees and another does not would let ranks wait for each other without end, and one rank's collective could meet
another rank's next one. What a rank cannot do is a no, or a 0 for a MIN; never an absence. One operator is enough:
MAX(v) is ``~MIN(~v)`` (``~`` reverses the order of int64 and cannot overflow), "all agree" is the MIN of 0 and 1, "any
agrees" their MAX, and values are equal when their MIN is their MAX. MIN over the attention-CP group, then over the
attention-TP group, then over the pipeline group is MIN over the whole grid of them.

**Pipeline stages have a say.** Each stage holds its own layers of the same pages. A copy that failed on a later stage
alone has left a page torn there, so it is not enough to relay what stage 0 agreed, as SGLang 0.5.23 does: a later
stage could wait for its own copy then, but not say that it failed. What stage 0 does decide for all, which requests and
commands a step begins with, its ``RequestReceiver`` relays. The price: stages meet once per step.

**Reserve, vote, commit.** Pages are taken on all ranks or on none. Each rank reserves pages: they are written to, and
nobody reads them. In its next proposals it says whether it could, and how far its I/O has come. When the agreed values
say what has arrived on all ranks, each commits exactly that and gives the rest back. Between reserve and commit no
request sees the pages, so a rank that fails in between takes nothing away.

**The digest.** Each proposal carries a digest of which page is on which tier as an ``equal`` slot. Ranks that have
parted find out at the very next step, before a request is served from pages that another rank does not have.

**The header.** The first block of a proposal has a fixed length and begins with operation and slots (as a digest), step
and call number. So ranks that come with different questions find out in the very collective that they share, at no
cost. Only then may the rest of a long proposal follow: gloo ends a process whose peers come with a vector of another
length (measured, torch 2.13).

The invariant: after agreement n every rank has the same agreed values n, and by induction the same tree, the same
operations under way and the same next proposal's slots. ``tests/test_agreement_replica.py`` lets ranks use their own
values instead of the agreed ones, slot by slot, and sees them part.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Literal, TypeAlias

import attrs
import msgspec

from scheduler_components.errors import (
    ComponentError,
    ConfigError,
    SettingsDivergenceError,
    SyncClosedError,
    SyncDivergenceError,
    SyncTimeoutError,
)
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import SyncGroup
from scheduler_components.values import MAX_OPERATION_BYTES, SyncCall, describe_calls

__all__ = [
    "BLOCK_INTS",
    "AgreedValues",
    "InProcessGroups",
    "Proposal",
    "RankGroups",
    "Slots",
    "ParallelGroups",
    "agreeing_ranks",
    "elementwise_min",
    "ordered_groups",
    "world_rank_groups",
]

BLOCK_INTS = 256
"""Length of the first block, which every agreement reduces: 250 integers of slots and the header."""

_HEADER_INTS = 6
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_ROOM_FOR_PADDING = [0] * BLOCK_INTS

SlotKind: TypeAlias = Literal["min", "max", "all", "any", "equal"]


def elementwise_min(vectors: Sequence[Sequence[int]]) -> list[int]:
    """Return the minimum at each place of vectors that have one length."""
    return [min(column) for column in zip(*vectors, strict=True)]


class AgreedValues(msgspec.Struct, frozen=True):
    """What all ranks agreed on: the same values on each of them.

    Attributes:
        numbers: results of ``min`` and ``max`` slots by name.
        flags: results of ``all``, ``any`` and ``equal`` slots by name.
    """

    numbers: dict[str, int]
    flags: dict[str, bool]


class Slots:
    """Slots that are always asked together: kinds and names, made once, so that a step brings values alone.

    Args:
        slots: (kind, name) pairs; a kind is ``min``, ``max``, ``all``, ``any`` or ``equal``, as ``Proposal`` has them.
    """

    __slots__ = ("kinds", "names")

    def __init__(self, *slots: tuple[SlotKind, str]) -> None:
        self.kinds = tuple(kind for kind, _ in slots)
        self.names = tuple(name for _, name in slots)

    def __repr__(self) -> str:
        return f"<Slots: {', '.join(self.names)}>"


class _Layout(msgspec.Struct, frozen=True):
    """Where the slots of a proposal stand in its vector: the header, one integer per slot, and the complements of those
    that must be equal. The same at every step, so it is worked out once.

    Attributes:
        digest: of operation, kinds and names.
        inverted: places of ``max`` and ``any``, which are packed as complements.
        equal: (name, place, place of the complement).
        numbers: (name, place) of ``min`` and ``max``; of these, ``maxima`` are read back as complements.
        flags: (name, place, the value that says no) of ``all`` and ``any``; those of ``equal`` keep their place among
            them, and are compared with their complements instead.
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
    """What one rank brings to one agreement: named slots. Every rank fills the same ones, in the same order.

    Args:
        operation: what the agreement is for, at most 64 bytes; shown in every error.
        step: the caller's step; ranks at different steps get a ``SyncDivergenceError``.

    Raises:
        ValueError: the name is too long, a slot is named twice, or a value is not an int64.
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
        """Ask for the smallest value of all ranks."""
        self._add("min", name, value)

    def max(self, name: str, value: int) -> None:
        """Ask for the largest value of all ranks."""
        self._add("max", name, value)

    def all(self, name: str, agrees: bool) -> None:
        """Ask whether every rank agrees."""
        self._add("all", name, agrees)

    def any(self, name: str, agrees: bool) -> None:
        """Ask whether at least one rank agrees."""
        self._add("any", name, agrees)

    def equal(self, name: str, value: int) -> None:
        """Ask whether all ranks have the same value, for example a digest."""
        self._add("equal", name, value)

    def fill(self, slots: Slots, values: Sequence[int]) -> None:
        """Ask for all of ``slots`` at once, with one value each: for what is asked in every step."""
        try:
            checked = array("q", values)  # looks at each value, and makes a bool an int
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
        """Number of slots."""
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
        packed += _ROOM_FOR_PADDING[len(packed) :]
        return packed

    @staticmethod
    def headers_match(reduced: Sequence[int]) -> bool:
        """Say whether all ranks came with the same operation, slots, step and call number."""
        return reduced[0] == ~reduced[1] and reduced[2] == ~reduced[3] and reduced[4] == ~reduced[5]

    def unpack(self, reduced: Sequence[int]) -> AgreedValues:
        """Read the reduced vector; ask ``headers_match`` first."""
        layout = self._layout()
        numbers = {name: reduced[at] for name, at in layout.numbers}
        for name, at in layout.maxima:
            numbers[name] = ~reduced[at]
        flags = {name: reduced[at] != no for name, at, no in layout.flags}
        for name, at, complement in layout.equal:
            flags[name] = reduced[at] == ~reduced[complement]
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
    """One rank's end of the agreement of all attention-CP x attention-TP x PP ranks of a replica.

    Used by one thread, with groups of its own. Every rank makes the same calls in the same order, always. That is
    checked in every agreement: when ranks come with another operation, other slots, another step or another count, all
    of them raise ``SyncDivergenceError``, which names what each one asked. After any error the domain is broken and
    raises the same again, because ranks that failed once are not in step.

    Attributes:
        rank: this process's global rank.
        groups: reduced over in order, each with more than one rank; none for a replica of one rank.
        num_calls: agreements so far.
        num_collectives: reductions so far: ``len(groups)`` per agreement while proposals fit one block.
    """

    rank: int = 0
    groups: tuple[SyncGroup, ...] = ()
    num_calls: int = field(default=0, init=False)
    num_collectives: int = field(default=0, init=False)
    _failure: ComponentError | None = field(default=None, init=False)

    def reduce(self, proposal: Proposal) -> AgreedValues:
        """Bring this rank's proposal and return what all ranks agreed on.

        Raises:
            SyncTimeoutError: ranks did not come in time.
            SyncDivergenceError: ranks came with different questions.
            SyncClosedError: the domain has been closed.
        """
        if self._failure is not None:
            raise self._failure
        call = SyncCall(self.rank, self.num_calls, proposal.step, proposal.operation)
        self.num_calls += 1
        packed = proposal.pack(call.number)
        try:
            is_long = len(packed) > BLOCK_INTS
            reduced = self._reduce(packed[:BLOCK_INTS] if is_long else packed, call)
            if not proposal.headers_match(reduced):
                # The reduced header is the same on all ranks, so all of them come here.
                raise self._divergence(call)
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
        """Return when all ranks have come."""
        self.reduce(Proposal(operation, step=step))

    def check_equal(self, operation: str, settings: Mapping[str, object], *, step: int) -> None:
        """Return when all ranks have come with the same settings.

        Args:
            operation: what the settings are for.
            settings: by field, in one order on all ranks; compared, and shown in the error, as ``repr`` writes them.
            step: the caller's step.

        Raises:
            SettingsDivergenceError: naming each field that differs, and its value on each rank.
        """
        proposal = Proposal(operation, step=step)
        for name, value in settings.items():
            proposal.equal(name, _digest_of(repr(value)))
        agreed = self.reduce(proposal).flags
        # The flags are the same on all ranks, so all of them gather, or none.
        parted = {name: self._gathered(repr(settings[name]), step) for name in settings if not agreed[name]}
        if parted:
            self._failure = SettingsDivergenceError(operation, parted)
            raise self._failure

    def close(self) -> None:
        """Let go of the groups; agreements raise from now on. Safe to call twice."""
        self._failure = SyncClosedError("the sync domain is closed")
        for group in self.groups:
            group.close()

    def _reduce(self, values: list[int], call: SyncCall) -> list[int]:
        for group in self.groups:
            values = group.all_reduce_min(values, call)
            self.num_collectives += 1
        return values

    def _divergence(self, call: SyncCall) -> SyncDivergenceError:
        return SyncDivergenceError(call.number, describe_calls(self._gather(call)))

    def _gathered(self, text: str, step: int) -> dict[int, str]:
        """The beginning of each rank's text."""
        shown = text.encode()[:MAX_OPERATION_BYTES].decode(errors="ignore")
        call = SyncCall(self.rank, self.num_calls, step, shown)
        return {each.rank: each.operation for each in self._gather(call)}

    def _gather(self, call: SyncCall) -> list[SyncCall]:
        records = call.to_ints()
        for group in self.groups:
            records = group.all_gather(records, call)
        return SyncCall.many_from_ints(records)


def _as_ranks(ranks: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)


@attrs.frozen(kw_only=True)
class RankGroups:
    """The groups that one rank is in, as global ranks; None for a group that the engine does not have.

    Ranks agree over attention-CP, then attention-TP, or over TP where an engine has neither; then over PP: the ranks
    at the same place of each pipeline stage.

    A group of one and a missing group differ: an engine whose attention groups have one rank each (DP attention)
    agrees with nobody, and must not fall back to a TP group that spans other replicas.

    Raises:
        ConfigError: a set names a rank twice, or leaves out ``rank``.
    """

    rank: int
    attn_cp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    attn_tp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    tp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    pp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)

    def __attrs_post_init__(self) -> None:
        for name in ("attn_cp", "attn_tp", "tp", "pp"):
            ranks = getattr(self, name)
            if ranks is not None and (self.rank not in ranks or len(set(ranks)) != len(ranks)):
                raise ConfigError(
                    name,
                    ranks,
                    f"is not a set of ranks with rank {self.rank} in it",
                    "give each member once, or None for a group that does not exist",
                )

    @property
    def reduce_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups to reduce over, in order: those of one rank are skipped, equal sets are taken once."""
        given = [ranks for ranks in (self.attn_cp, self.attn_tp) if ranks is not None]
        if not given and self.tp is not None:
            given = [self.tp]
        if self.pp is not None:
            given.append(self.pp)
        return tuple(dict.fromkeys(tuple(sorted(ranks)) for ranks in given if len(ranks) > 1))


def world_rank_groups(parallel: ParallelState) -> tuple[RankGroups, ...]:
    """Return the rank sets of every process of the engine's world, by global rank.

    The global rank is ``ParallelState.world_rank``.
    """
    world: list[RankGroups] = []
    for stage in range(parallel.pp_size):
        peers = [
            ParallelState.from_tp_rank(
                tp_rank,
                tp_size=parallel.tp_size,
                attn_dp_size=parallel.attn_dp_size,
                attn_cp_size=parallel.attn_cp_size,
            )
            for tp_rank in range(parallel.tp_size)
        ]
        first = stage * parallel.tp_size
        world += [_rank_sets_of(me, peers, first, parallel.pp_size) for me in peers]
    return tuple(world)


def _rank_sets_of(me: ParallelState, peers: Sequence[ParallelState], first: int, pp_size: int) -> RankGroups:
    replica = [peer for peer in peers if peer.attn_dp_rank == me.attn_dp_rank]
    return RankGroups(
        rank=first + me.tp_rank,
        attn_cp=[first + peer.tp_rank for peer in replica if peer.attn_tp_rank == me.attn_tp_rank],
        attn_tp=[first + peer.tp_rank for peer in replica if peer.attn_cp_rank == me.attn_cp_rank],
        tp=[first + peer.tp_rank for peer in peers],
        pp=[stage * me.tp_size + me.tp_rank for stage in range(pp_size)],
    )


def agreeing_ranks(rank: int, world: Sequence[RankGroups]) -> tuple[int, ...]:
    """Return every rank that ``rank`` agrees with through any number of reduce_groups, itself included, sorted."""
    hops_of = {sets.rank: sets.reduce_groups for sets in world}
    domain, waiting = {rank}, [rank]
    while waiting:
        reached = {peer for hop in hops_of[waiting.pop()] for peer in hop} - domain
        domain |= reached
        waiting += reached
    return tuple(sorted(domain))


def ordered_groups(world: Sequence[RankGroups]) -> tuple[tuple[int, ...], ...]:
    """Return every group of the world once, in an order that all ranks share: hop by hop, then by first rank.

    Groups that are made collectively are made in this order on every rank, members or not.
    """
    most_hops = max((len(sets.reduce_groups) for sets in world), default=0)
    ordered: dict[tuple[int, ...], None] = {}
    for at in range(most_hops):
        ordered |= dict.fromkeys(sorted({sets.reduce_groups[at] for sets in world if len(sets.reduce_groups) > at}))
    return tuple(ordered)


class InProcessGroups:
    """Agreement of N ranks inside one thread, for state machines that give out proposals and take agreed values.

    The caller collects every rank's proposal of the step and hands each rank its agreed values: deterministic, no
    waiting. Hops are data, so a simulation may leave some out and show what comes of that.

    Args:
        reduce_groups: rank -> its groups in order, as ``RankGroups.reduce_groups`` gives them.

    Raises:
        ConfigError: members of a group do not have that group at the same hop.
    """

    __slots__ = ("_hops", "_num_calls", "num_collectives")

    def __init__(self, reduce_groups: Mapping[int, Sequence[tuple[int, ...]]]) -> None:
        for rank, groups in reduce_groups.items():
            for at, group in enumerate(groups):
                for peer in group:
                    if (
                        peer not in reduce_groups
                        or len(reduce_groups[peer]) <= at
                        or tuple(reduce_groups[peer][at]) != tuple(group)
                    ):
                        raise ConfigError(
                            "reduce_groups",
                            group,
                            f"is hop {at} of rank {rank} but not of rank {peer}",
                            "give every member the same groups in the same order",
                        )
        self._hops = {rank: tuple(reduce_groups[rank]) for rank in sorted(reduce_groups)}
        self._num_calls = 0
        self.num_collectives = 0

    def reduce(self, proposals: Mapping[int, Proposal]) -> dict[int, AgreedValues]:
        """Reduce all ranks' proposals and return each rank's agreed values.

        Raises:
            SyncTimeoutError: a rank has no proposal: it is the missing one.
            SyncDivergenceError: ranks of one group brought different questions.
        """
        number = self._num_calls
        self._num_calls += 1
        calls = {
            rank: SyncCall(rank, number, proposal.step, proposal.operation) for rank, proposal in proposals.items()
        }
        missing = tuple(rank for rank in self._hops if rank not in proposals)
        if missing:
            operation, step = next(((call.operation, call.step) for call in calls.values()), ("nothing", -1))
            raise SyncTimeoutError(operation, step, missing, 0.0)
        vectors = {rank: proposals[rank].pack(number) for rank in self._hops}
        for at in range(max((len(groups) for groups in self._hops.values()), default=0)):
            vectors = self._reduce_hop(at, vectors, calls)
            self.num_collectives += 1
        return {rank: proposals[rank].unpack(vectors[rank]) for rank in self._hops}

    def _reduce_hop(
        self, at: int, vectors: Mapping[int, list[int]], calls: Mapping[int, SyncCall]
    ) -> dict[int, list[int]]:
        reduced: dict[int, list[int]] = {}
        for rank, groups in self._hops.items():
            if rank in reduced:
                continue
            if at >= len(groups):
                reduced[rank] = vectors[rank]
                continue
            # Proposals of different lengths differ in the header, which is in the part that they share.
            shared = min(len(vectors[peer]) for peer in groups[at])
            result = elementwise_min([vectors[peer][:shared] for peer in groups[at]])
            if not Proposal.headers_match(result):
                places = describe_calls(calls[peer] for peer in groups[at])
                raise SyncDivergenceError(calls[rank].number, places)
            reduced |= dict.fromkeys(groups[at], result)
        return reduced
