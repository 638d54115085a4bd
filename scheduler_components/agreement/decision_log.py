"""DecisionLog: name the first decision that the ranks of a replica did not take alike.

**Why.** All ranks of a replica run the same scheduler on the same input, so they must take the same decisions. If one
of them decides by a fact of its own (a clock, a thread's progress, the order of a set), nothing fails at that moment.
The ranks hang or compute wrong tokens many steps later, and the decision that caused it is long forgotten.

**Notes.** Each component notes its decisions: `note(kind, *values)` appends to a list. Once per agreement the notes are
encoded and added to a running digest. The digest depends on the notes and their order alone, not on when it is read.

**The tip.** The digest after the last note, the tip, travels in an ``equal`` slot of the agreement that the step makes
anyway. While the tips agree, the log needs no collective, no thread and no group of its own.

**The gather.** If the tips differ, the agreed flag says so on all ranks, therefore all of them take the branch. The
tips agreed at the agreement before, so the difference is among the notes since then. The ranks gather exactly those,
in one collective whose length they have just agreed on, and each rank compares all of them. The result is the same on
every rank, because its input is.

**The restart.** Afterwards the digest restarts on all ranks from the agreed step. A later difference is found as the
first one was, although the digests of the two histories never become equal again.

The invariant: after each agreement all ranks have the same tip, or the same report. A decision that no component notes
is invisible here until a noted decision depends on it.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from hashlib import blake2b
from inspect import getattr_static, isclass, isfunction
from typing import ClassVar, TypeVar, cast

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.errors import ConfigError, DecisionDivergenceError
from scheduler_components.ports import NullDecisionLog
from scheduler_components.values import (
    Decision,
    DecisionDump,
    DecisionKind,
    DecisionStats,
    DecisionValue,
    DivergencePolicy,
    DivergenceReport,
)

__all__ = [
    "DECISION_KINDS",
    "DecisionLog",
    "describe_divergence",
    "note_calls",
]

logger = logging.getLogger(__name__)

DECISION_KINDS: Mapping[str, DecisionKind] = {
    "input": DecisionKind(("step", "messages", "digest")),
    "queue": DecisionKind(("rid", "arrival", "tokens", "cached tokens")),
    "match": DecisionKind(("rid", "tokens")),
    "admit": DecisionKind(("arrival", "cached tokens", "chunk tokens")),
    "preempt": DecisionKind(("arrival", "computed tokens")),
    "batch": DecisionKind(("prefill tokens", "context tokens"), ("arrival",)),
    "replicas": DecisionKind(each=("tokens",)),
    "result": DecisionKind(("updated requests",), ("token",)),
    "finish": DecisionKind(("arrival", "reason")),
    "state": DecisionKind(("used tokens", "free tokens", "evictable tokens", "operations", "tiers")),
    "evict": DecisionKind(("first page", "pages")),
    "clear": DecisionKind(("free pages", "weight version")),
    "tiers": DecisionKind(("digest",)),
    "apply": DecisionKind(("component", "what"), ("value",)),
    "expire": DecisionKind(("component", "what", "rid")),
}
"""The kinds that the kit's components note, with the meaning of their values. Extend it for your own:
``DecisionLog(kinds={**DECISION_KINDS, "route": DecisionKind(("expert",))})``."""

_SLOTS = Slots(("equal", "decisions"), ("max", "decision bytes"))
_OPERATION = "decisions"
_MAX_PENDING = 1024
"""Notes that wait for their encoding. It bounds the list where no agreement is made, as on a replica of one rank."""

_EPISODE_STEPS = 100
"""Agreements without a difference that end an episode. Ranks whose caches differ diverge again every few steps, and one
line in the log per episode is enough."""

_HEADER_INTS = 5
_MAX_SHOWN_VALUES = 6
_MAX_SHOWN_CHARACTERS = 80
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Decision]).decode
_NOT_ENCODABLE = (TypeError, OverflowError, ValueError, RecursionError, msgspec.MsgspecError)
_MISSING = object()

_Note = tuple[str, tuple[int | str, ...]]
Result = TypeVar("Result")
Arguments = TypeVar("Arguments", bound=tuple[object, ...])


@dataclass(slots=True, kw_only=True)
class _Records:
    """The encoded decisions between two agreements.

    Attributes:
        step: the agreement before them.
        body: msgpack of the first ``num_kept`` decisions, one after the other.
        num_records: decisions in total. More than are kept if the ring is too short.
        tip: the digest after them; set when they are proposed, and replaced after a divergence.
    """

    step: int = 0
    body: bytearray = field(default_factory=bytearray)
    num_kept: int = 0
    num_records: int = 0
    tip: int = 0

    def add(self, notes: Sequence[_Note], encoded: bytes, most: int) -> None:
        """Append notes up to ``most`` bytes: all of them, or the first ones."""
        self.num_records += len(notes)
        if self.num_kept + len(notes) < self.num_records:
            return  # an earlier one did not fit
        if len(self.body) + len(encoded) <= most:
            self.body += encoded
            self.num_kept += len(notes)
            return
        for note in notes:
            record = _encode(note)
            if len(self.body) + len(record) > most:
                return
            self.body += record
            self.num_kept += 1

    def decisions(self) -> tuple[Decision, ...]:
        """Return the kept decisions; none of them if one has a value that is neither a number nor a string."""
        return tuple(_decode_body(self.body, self.num_kept) or ())


@dataclass(slots=True, kw_only=True)
class _Chain:  # noqa: SCH003 - the digest and the ring that it is made of
    """The digest over all decisions, the decisions since the last agreement, and those before it.

    Attributes:
        digest: over all decisions since the start, or since the last divergence.
        open: the decisions since the last `DecisionLog.fill`.
        proposed: those that it closed, until the agreed values are applied.
        ring: the agreed decisions of the latest steps, oldest first, and `num_ring_bytes` of them.
        counts: what `DecisionStats` reports.
        reported_kinds: unregistered kinds that are logged already.
        num_quiet_steps_left: agreements without a difference until the episode of divergences ends; 0 without one.
    """

    digest: blake2b = field(default_factory=lambda: blake2b(digest_size=8))
    open: _Records = field(default_factory=_Records)
    proposed: _Records = field(default_factory=_Records)
    ring: deque[_Records] = field(default_factory=deque)
    num_ring_bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reported_kinds: set[str] = field(default_factory=set)
    num_quiet_steps_left: int = 0

    def keep_proposed(self, most: int) -> None:
        """Append the decisions of the last step to the ring, and forget the oldest steps beyond ``most`` bytes."""
        self.ring.append(self.proposed)
        self.num_ring_bytes += len(self.proposed.body)
        while self.num_ring_bytes > most or len(self.ring) > _MAX_PENDING:
            self.num_ring_bytes -= len(self.ring.popleft().body)

    def restart(self, step: int) -> None:
        """Begin a new digest, the same on all ranks, with the decisions since the last `DecisionLog.fill`."""
        self.proposed.tip = step
        self.digest = blake2b(step.to_bytes(8, "big", signed=True), digest_size=8)
        self.digest.update(self.open.body)


@dataclass(slots=True, kw_only=True)
class DecisionLog:
    """Collects the decisions of one rank and compares them with the other ranks': an ``AgreementPart``.

    All ranks have the same fields, except `sink`. Used on the scheduler's thread.

    Attributes:
        groups: the ranks that agree: the groups of the agreement that this log is a part of. Used only after a
            difference.
        policy: what to do about a divergence. With all but ``"stop"`` the ranks continue; the first one of an episode
            is logged and dumped, and an episode ends with a hundred agreements without a divergence.
        ring_bytes: memory for encoded decisions: those since the last agreement, and as many bytes before it.
        kinds: the registered kinds. A note of another kind is counted, logged once and compared like all others.
        sink: receives a dump of the recent decisions under the policies ``"dump"`` and ``"stop"``; for example
            ``FileDivergenceSink.write``.
        failures: dumps that could not be written, and values that `note_calls` could not compute.
        first_divergence, last_divergence: the reports; None while the ranks agree.
    """

    groups: ParallelGroups = field(default_factory=ParallelGroups)
    policy: DivergencePolicy = "log"
    ring_bytes: int = 65_536
    kinds: Mapping[str, DecisionKind] = field(default_factory=lambda: DECISION_KINDS)
    sink: Callable[[DecisionDump], None] = lambda _: None
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    first_divergence: DivergenceReport | None = field(default=None, init=False)
    last_divergence: DivergenceReport | None = field(default=None, init=False)
    _pending: list[_Note] = field(default_factory=list, init=False, repr=False)
    _chain: _Chain = field(default_factory=_Chain, init=False, repr=False)

    wants_decisions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ring_bytes < 1:
            raise ConfigError("ring_bytes", self.ring_bytes, "holds no decision", "give at least 1, usually 65536")

    @property
    def tip(self) -> int:
        """The digest of all decisions up to now, as an int64. It restarts after a divergence."""
        self._fold()
        return int.from_bytes(self._chain.digest.digest(), "big", signed=True)

    @property
    def agreed_tip(self) -> int:
        """The tip at the last agreement. It is equal on all ranks, or the last agreement raised an error."""
        return self._chain.proposed.tip

    @property
    def num_divergences(self) -> int:
        """Agreements that found a difference; equal on all ranks."""
        return self._chain.counts["num_divergences"]

    def note(self, kind: str, *values: int | str) -> None:
        """Append one decision.

        Args:
            kind: a literal of the code.
            values: what was decided, the same on every rank. A value that cannot be encoded is replaced by its type.
        """
        pending = self._pending
        pending.append((kind, values))
        if len(pending) == _MAX_PENDING:
            self._fold()

    def fill(self, proposal: Proposal) -> None:
        """Add the tip to the step's proposal."""
        tip, chain = self.tip, self._chain
        chain.open.tip = tip
        chain.proposed = chain.open
        chain.open = _Records(step=proposal.step)
        proposal.fill(_SLOTS, (tip, len(chain.proposed.body)))

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Compare the tips. If they differ, find the first decision that does, and follow the policy.

        Raises:
            DecisionDivergenceError: the tips differ and the policy is ``"stop"``.
            SyncTimeoutError, SyncDivergenceError: a rank did not join the gather.
        """
        chain = self._chain
        if agreed.flags["decisions"]:
            chain.keep_proposed(self.ring_bytes)
            if chain.num_quiet_steps_left:
                self._count_quiet_step(step)
            return
        packed = self.pack_ring(agreed.numbers["decision bytes"])
        self.apply_rings(step, self.groups.all_gather(_OPERATION, packed, step=step))

    def pack_ring(self, num_bytes: int) -> list[int]:
        """Return the decisions of the last proposal as integers, equally many on all ranks.

        Args:
            num_bytes: the largest size of all ranks, as agreed.
        """
        records = self._chain.proposed
        num_words = -(-num_bytes // 8)
        header = [num_words, self.groups.rank, records.num_kept, records.num_records, len(records.body)]
        return header + array("q", bytes(records.body).ljust(8 * num_words, b"\0")).tolist()

    def apply_rings(self, step: int, gathered: Sequence[int]) -> None:
        """Report the first difference among the packed rings of all ranks, and restart the digest.

        Raises:
            DecisionDivergenceError: the policy is ``"stop"``.
        """
        chain = self._chain
        report = _find_divergence(_unpack_rings(gathered), step=chain.proposed.step, found_at_step=step)
        chain.keep_proposed(self.ring_bytes)
        chain.restart(step)
        chain.counts["num_divergences"] += 1
        chain.counts["num_unknown"] += report.is_unknown
        self.last_divergence = report
        self.first_divergence = self.first_divergence or report
        self._follow_policy(report)

    def recent(self) -> tuple[tuple[int, tuple[Decision, ...]], ...]:
        """Return (step, its decisions) of the agreed decisions in the ring, oldest first."""
        return tuple((records.step, records.decisions()) for records in self._chain.ring)

    def stats(self) -> DecisionStats:
        self._fold()
        counts = self._chain.counts
        return DecisionStats(**{name: counts[name] for name in DecisionStats.__struct_fields__})

    def _fold(self) -> None:
        """Encode the pending notes and add them to the digest."""
        notes = self._pending
        if not notes:
            return
        self._pending = []
        chain = self._chain
        for kind, _ in notes:
            if kind not in self.kinds:
                self._count_unregistered(kind)
        try:
            encoded = _encode(notes)
        except _NOT_ENCODABLE:
            notes = [self._replaced(note) for note in notes]
            encoded = _encode(notes)
        body = encoded[1 if len(notes) < 16 else 3 :]  # without the header of the array
        chain.digest.update(body)
        chain.counts["num_decisions"] += len(notes)
        chain.open.add(notes, body, self.ring_bytes)

    def _count_unregistered(self, kind: str) -> None:
        chain = self._chain
        chain.counts["num_unregistered"] += 1
        if kind not in chain.reported_kinds and len(chain.reported_kinds) < _MAX_PENDING:
            chain.reported_kinds.add(kind)
            logger.warning("the decision log has no kind %r: its notes are compared, add it to `kinds`", kind)

    def _replaced(self, note: _Note) -> _Note:
        """Return a note that can be encoded. The types of its values are the same on all ranks, their texts may not."""
        kind, values = note
        kept = tuple(map(_encodable, values))
        self._chain.counts["num_replaced_values"] += sum(a is not b for a, b in zip(kept, values, strict=True))
        return str(kind), kept

    def _follow_policy(self, report: DivergenceReport) -> None:
        chain, is_first = self._chain, not self._chain.num_quiet_steps_left
        chain.num_quiet_steps_left = _EPISODE_STEPS
        if self.policy == "count":
            return
        sentence = describe_divergence(report, self.kinds)
        if is_first or self.policy == "stop":
            logger.error("%s", sentence)
            if self.policy != "log":
                with self.failures.guard("writing a dump of decisions"):
                    self.sink(DecisionDump(self.groups.rank, report, self.recent()))
        if self.policy == "stop":
            decisions = _describe_decisions(report, self.kinds)
            raise DecisionDivergenceError(report.step, self.groups.rank, decisions, sentence)

    def _count_quiet_step(self, step: int) -> None:
        self._chain.num_quiet_steps_left -= 1
        if not self._chain.num_quiet_steps_left and self.policy != "count":
            logger.warning("step %d: the ranks decide alike again; %d divergences so far", step, self.num_divergences)


def _encodable(value: int | str) -> int | str:
    try:
        _encode(value)
    except _NOT_ENCODABLE:
        return ascii(value) if isinstance(value, int | str) else f"<{type(value).__name__}>"
    return value


# --- the comparison: a function of what all ranks gathered, so its result is the same on all of them ---


def _unpack_rings(gathered: Sequence[int]) -> dict[int, _Records]:
    """Return rank -> its decisions between two agreements, in order of the ranks."""
    rings: dict[int, _Records] = {}
    stride = _HEADER_INTS + gathered[0]
    for start in range(0, len(gathered), stride):
        _, rank, num_kept, num_records, num_bytes = gathered[start : start + _HEADER_INTS]
        body = bytearray(array("q", gathered[start + _HEADER_INTS : start + stride]).tobytes()[:num_bytes])
        rings[rank] = _Records(body=body, num_kept=num_kept, num_records=num_records)
    return dict(sorted(rings.items()))


def _decode_body(body: bytes | bytearray, num_records: int) -> list[Decision] | None:
    try:
        return _decode(b"\xdd" + num_records.to_bytes(4, "big") + body)  # the header of a msgpack array
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _find_divergence(rings: Mapping[int, _Records], *, step: int, found_at_step: int) -> DivergenceReport:
    """Return the report on the first difference between the rings of all ranks."""

    def unknown(reason: str) -> DivergenceReport:
        return DivergenceReport(step, found_at_step, -1, reason=reason)

    kept: dict[int, list[Decision]] = {}
    for rank, ring in rings.items():
        decoded = _decode_body(ring.body, ring.num_kept)
        if decoded is None:
            return unknown(f"rank {rank} noted a value that is neither a number nor a string")
        kept[rank] = decoded
    most = max(ring.num_records for ring in rings.values())
    for index in range(most):
        if any(len(kept[rank]) <= index < ring.num_records for rank, ring in rings.items()):
            return unknown(f"the ring is too short: it kept the first {index} of {most} decisions; raise ring_bytes")
        decisions = {rank: taken[index] if index < len(taken) else None for rank, taken in kept.items()}
        texts = {rank: _encode(decision) for rank, decision in decisions.items()}  # True and 1 differ here only
        counts = Counter(texts.values())
        if len(counts) > 1:
            [(usual, num_usual), *_] = counts.most_common(1)
            has_majority = 2 * num_usual > len(rings)
            culprits = tuple(rank for rank, each in texts.items() if has_majority and each != usual)
            return DivergenceReport(step, found_at_step, index, decisions, culprits)
    return unknown("all decisions since the last agreement are equal; the logs of the ranks began at different moments")


def describe_divergence(report: DivergenceReport, kinds: Mapping[str, DecisionKind] = DECISION_KINDS) -> str:
    """Return a report as one sentence, the same on every rank."""
    if report.is_unknown:
        text = f"step {report.step}: the ranks decided differently, but the decision is unknown: {report.reason}"
        return f"{text} (found at step {report.found_at_step})"
    ranks_of: dict[str, list[int]] = {}
    for rank, text in _describe_decisions(report, kinds).items():
        ranks_of.setdefault(text, []).append(rank)
    listed = "; ".join(f"{_name_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
    verdict = "no majority says which rank is wrong"
    if report.culprits:
        verdict = f"{_name_ranks(report.culprits)} against the majority"
    return (
        f"step {report.step}: the ranks decided differently at decision {report.index}: {listed}; {verdict} "
        f"(found at step {report.found_at_step})"
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _describe_decisions(report: DivergenceReport, kinds: Mapping[str, DecisionKind]) -> dict[int, str]:
    """Return rank -> its decision in words, with the values around the first one that differs."""
    taken = [decision for decision in report.decisions.values() if decision is not None]
    kinds_taken = {decision.kind for decision in taken}
    differing = _first_difference([decision.values for decision in taken]) if len(kinds_taken) == 1 else 0
    first = max(0, differing - _MAX_SHOWN_VALUES // 2)
    return {
        rank: "no decision" if decision is None else _describe(decision, kinds, first)
        for rank, decision in report.decisions.items()
    }


def _first_difference(all_values: Sequence[tuple[DecisionValue, ...]]) -> int:
    for position, column in enumerate(zip(*all_values, strict=False)):
        if len(set(column)) > 1:
            return position
    return min(map(len, all_values), default=0)


def _describe(decision: Decision, kinds: Mapping[str, DecisionKind], first: int) -> str:
    kind, end = kinds.get(decision.kind, DecisionKind()), first + _MAX_SHOWN_VALUES
    shown = []
    for position, value in enumerate(decision.values[first:end], start=first):
        name = _name_of(kind, position)
        text = repr(value)
        text = text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
        shown.append(f"{name}={text}" if name else text)
    before = ["..."] if first else []
    behind = ["..."] if end < len(decision.values) else []
    return f"{decision.kind}({', '.join([*before, *shown, *behind])})"


def _name_of(kind: DecisionKind, position: int) -> str:
    """Return the name of the value at ``position``; empty if the kind has none for it."""
    if position < len(kind.names):
        return kind.names[position]
    if not kind.each:
        return ""
    number, place = divmod(position - len(kind.names), len(kind.each))
    return f"{kind.each[place]}[{number}]"


# --- engines that others wrote ---


def note_calls(
    target: object,
    method: str,
    log: DecisionLog | NullDecisionLog,
    *,
    kind: str,
    values: Callable[[Result, Arguments], Sequence[int | str] | None] = lambda *_: (),
) -> Callable[[], None]:
    """Note each call of a method of code that others wrote. Return a function that restores the method.

    A call that raises is noted with the name of its error.

    Args:
        target: an object, or a class to note the calls of all its objects.
        method: name of the method.
        log: where to note.
        kind: the kind of the decision.
        values: returns the values from the result and the positional arguments of a call; None for a call that
            decides nothing. For a class the first argument is the object. An exception is counted in ``log.failures``
            and noted as a decision without values.

    Raises:
        ConfigError: the target has no such method, it is no plain method of its class, or the target accepts no
            attribute.
    """
    found = getattr(target, method, None)
    if not callable(found) or (isclass(target) and not isfunction(getattr_static(target, method))):
        raise ConfigError("method", method, f"is no plain method of {target!r}", "name a method of the object or class")
    original = cast(Callable[..., object], found)
    failures = log.failures if isinstance(log, DecisionLog) else FailureLog(logger)
    activity = f"reading the values of {kind!r} from calls of {method}"

    @wraps(original)
    def noted(*args: object, **kwargs: object) -> object:
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            log.note(kind, "raised", type(error).__name__)
            raise
        chosen: Sequence[int | str] | None = ()
        with failures.guard(activity):
            chosen = values(cast(Result, result), cast(Arguments, args))
        if chosen is not None:
            log.note(kind, *chosen)
        return result

    own = vars(target).get(method, _MISSING) if hasattr(target, "__dict__") else _MISSING
    try:
        setattr(target, method, noted)
    except AttributeError as error:
        raise ConfigError("target", target, f"accepts no attribute {method!r}", "give its class instead") from error

    def undo() -> None:
        if own is _MISSING:
            delattr(target, method)
        else:
            setattr(target, method, own)

    return undo
