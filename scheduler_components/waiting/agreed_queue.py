"""AgreedQueue: requests that wait for something which becomes ready at different moments on different ranks. Pure.

**The problem.** A request needs a compiled grammar, a loaded adapter or pages of another instance. Each rank prepares
its own copy, and some ranks are ready earlier than others. If each rank admitted the request when its own copy is
ready, the ranks would compute different batches from that step on. The same holds for a failure that only one rank has,
and for a timeout that each rank compares with its own clock.

**Facts and decisions.** A rank reports the facts that it alone knows: ``on_ready``, ``on_failed`` and ``on_error``.
They change nothing but its next proposal. The decisions follow from the agreed values, which are equal on all ranks:

| a request leaves as | when |
| --- | --- |
| ``failed`` | one rank reports that the request asks for something impossible |
| ``error`` | one rank has an error of its own, and none reports that the request is impossible |
| ``ready`` | all ranks are ready |
| ``expired`` | its time limit has passed on the agreed clock, and none of the above holds in a lane |

**Lanes.** A proposal has the same slots in every step, so a fixed number of requests can be asked about: ``num_lanes``
of those that wait. Each lane is one ``min`` slot with ``FAILED < ERROR < WAITING < READY``. The minimum over all ranks
is then ``FAILED`` if one rank has failed, and ``READY`` if all are ready. The facts about requests behind the lanes are
kept.

**Turns.** Requests have the lanes in turns: those that were asked about and do not leave go behind the others, in their
order. With W requests that wait, each is asked about in one of W / ``num_lanes`` consecutive steps, rounded up, so slow
requests delay ready ones by no more than that. Whose turn it is follows from the calls and agreed values alone. If
nothing but the oldest requests can have a fact, ``in_turns=False`` leaves the lanes to the oldest. A request behind the
lanes ends its wait by an abort, its time limit or ``depart`` only.

**One order, exactly once.** Requests that depart in one step do so in the order in which they were added. ``add`` and
``cancel`` are calls that every rank makes between the same two steps, so all ranks have the same requests in the same
lanes. ``depart`` is for what follows from agreed values already and needs no lane. Each departed
request is returned by ``pop_departures`` once. A request that was cancelled before it was returned is not returned.

**Bounds.** At most ``max_waiting`` requests wait; ``add`` refuses further ones. No request waits longer than its limit,
which is counted from the first agreement after ``add`` (see ``StepAgreement``). A replica with waiting requests must
therefore take steps, even if it computes nothing.

**The digest.** An ``equal`` slot carries a digest of all additions, cancellations, departures and turns. A rank that
missed one of them has other requests in its lanes, and all ranks raise a ``QueueDivergenceError`` in the next
agreement, before a value of one request is applied to another.

The invariant: after agreement n all ranks have the same requests in the same order and have returned the same
departures.

**Rooms.** A request may wait for several things besides pages: a grammar, an adapter. A ``WaitingRoom`` prepares one
kind of thing and decides by a queue of its own. A new request enters all ``WaitingRooms`` together, so a grammar is
compiled while an adapter is loaded. It leaves when every room that it waits in has let it go, or when one of them has
failed or expired. Both happen in the same step on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from operator import attrgetter
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar
from zlib import crc32

import msgspec

from scheduler_components.agreement import AgreedValues, Proposal, Slots
from scheduler_components.agreement.step_agreement import AgreementPart
from scheduler_components.errors import QueueDivergenceError
from scheduler_components.ports import DecisionSink, NullDecisionLog
from scheduler_components.values import AgreedQueueStats
from scheduler_components.waiting.held_request import HeldRequest

__all__ = ["AgreedQueue", "Departure", "DepartureReason", "WaitingRoom", "WaitingRooms"]

T = TypeVar("T")

DepartureReason: TypeAlias = Literal["ready", "failed", "error", "expired"]

_FAILED, _ERROR, _WAITING, _READY = 0, 1, 2, 3
_FAILED_ELSEWHERE = "failed on another rank"
_AGE = attrgetter("number")
_REASONS: dict[int, DepartureReason] = {_FAILED: "failed", _ERROR: "error", _READY: "ready"}


class Departure(msgspec.Struct, Generic[T], frozen=True):
    """A request that has left the queue. Everything but ``problem`` is equal on all ranks.

    Attributes:
        rid, item: as given to ``AgreedQueue.add``.
        reason: why it left. Aborted requests leave through ``AgreedQueue.cancel`` and have no departure.
        problem: why it failed on this rank, ``"failed on another rank"``, or which limit expired; empty if it is ready.
            After an ``error`` the request itself may be right.
    """

    rid: str
    item: T
    reason: DepartureReason
    problem: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Wait(Generic[T]):
    """One waiting request, with its place in the order of additions. Only ``fact`` and ``problem`` differ by rank."""

    number: int
    rid: str
    item: T
    timeout_s: float
    deadline_s: float = math.inf  # set by the first agreement after ``add``
    fact: int = _WAITING
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class AgreedQueue(Generic[T]):
    """Requests that leave on all ranks of a replica in the same step. An ``AgreementPart`` and a ``StatsSource``.

    Attributes:
        name: prefix of its slots, unique among the parts of a step's agreement.
        max_wait_s: how long a request waits, unless ``add`` says otherwise; infinite for no limit.
        num_lanes: how many requests are asked about in each step; the same on all ranks.
        max_waiting: how many requests may wait.
        in_turns: whether requests have the lanes in turns; otherwise the oldest have them until they leave.
        decisions: where it notes who enters and who leaves.
    """

    name: str
    max_wait_s: float = math.inf
    num_lanes: int = 16
    max_waiting: int = 1024
    in_turns: bool = True
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    _waits: dict[str, _Wait[T]] = field(default_factory=dict, init=False, repr=False)  # the next in the lanes first
    _numbers: count[int] = field(default_factory=count, init=False, repr=False)
    _departures: dict[str, Departure[T]] = field(default_factory=dict, init=False, repr=False)
    _new: list[_Wait[T]] = field(default_factory=list, init=False, repr=False)
    _next_deadline_s: float = field(default=math.inf, init=False)  # a lower bound
    _counts: AgreedQueueStats = field(default_factory=AgreedQueueStats, init=False, repr=False)
    _digest: int = field(default=0, init=False)
    _slots: Slots = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._slots = Slots(
            ("equal", f"{self.name} state"), *(("min", f"{self.name} {lane}") for lane in range(self.num_lanes))
        )

    def __len__(self) -> int:
        """Return how many requests wait; the same number on all ranks."""
        return len(self._waits)

    def __contains__(self, rid: object) -> bool:
        return rid in self._waits

    def __iter__(self) -> Iterator[T]:
        """Yield the waiting items in the order in which they were added."""
        return (wait.item for wait in sorted(self._waits.values(), key=_AGE))

    @property
    def next_deadline_s(self) -> float:
        """A lower bound of the agreed time at which a request expires; infinite if none can."""
        return self._next_deadline_s

    def add(self, rid: str, item: T, *, timeout_s: float | None = None) -> bool:
        """Append a request. Every rank calls it between the same two steps. Return False if the queue is full.

        Args:
            rid: id of the request, by which facts refer to it.
            item: what ``pop_departures`` returns.
            timeout_s: how long it may wait from the next agreement on; None for ``max_wait_s``.

        Raises:
            ValueError: a request with this id waits, or its departure was not popped.
        """
        if rid in self._waits or rid in self._departures:
            raise ValueError(f"{rid!r} already waits in {self.name!r}")
        if len(self._waits) >= self.max_waiting:
            self._counts.refused += 1
            return False
        timeout_s = self.max_wait_s if timeout_s is None else timeout_s
        wait = _Wait(number=next(self._numbers), rid=rid, item=item, timeout_s=timeout_s)
        self._waits[rid] = wait
        self._new.append(wait)
        self._record("add", rid)
        return True

    def on_ready(self, rid: str) -> None:
        """Record that this rank is ready for a request. Without effect if this rank has reported about it before.

        A report about a request that does not wait is counted as unknown: it may have been cancelled or have failed on
        another rank.
        """
        self._report(rid, _READY)

    def on_failed(self, rid: str, problem: str) -> None:
        """Record that no rank can prepare what a request asks for, under the conditions of ``on_ready``.

        Args:
            rid: id of the request.
            problem: why, as one sentence for the client.
        """
        self._report(rid, _FAILED, problem)

    def on_error(self, rid: str, problem: str) -> None:
        """Record that this rank failed to prepare what a request asks for, though the request may be right.

        The conditions are those of ``on_ready``.

        Args:
            rid: id of the request.
            problem: why, as one sentence for the client.
        """
        self._report(rid, _ERROR, problem)

    def cancel(self, rid: str) -> T | None:
        """Remove a request and return its item; None if it neither waits nor departs.

        Every rank calls it between the same two steps. A departure that was not popped is removed, too.
        """
        wait = self._waits.pop(rid, None)
        if wait is None:
            departure = self._departures.pop(rid, None)
            if departure is None:
                return None
            item = departure.item
        else:
            item = wait.item
            if wait in self._new:
                self._new.remove(wait)
        self._counts.cancelled += 1
        self._record("cancel", rid)
        return item

    def depart(self, rid: str, reason: DepartureReason, problem: str = "") -> None:
        """Let a request go by a decision that every rank takes in the same call. No effect if it does not wait.

        Args:
            rid: id of the request.
            reason, problem: of its departure.
        """
        wait = self._waits.get(rid)
        if wait is not None:
            if wait in self._new:
                self._new.remove(wait)
            self._depart(wait, reason, problem)

    def fill(self, proposal: Proposal) -> None:
        """Add this rank's facts about the requests in the lanes: the same slots in every step."""
        values = [self._digest, *(wait.fact for wait in self._in_lanes())]
        values += [_WAITING] * (1 + self.num_lanes - len(values))
        proposal.fill(self._slots, values)

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Let the requests go on which all ranks agreed.

        Raises:
            QueueDivergenceError: the ranks hold different requests. Nothing is applied.
        """
        names = self._slots.names
        if not agreed.flags[names[0]]:
            raise QueueDivergenceError(step, self.name, self._digest)
        if not self._waits:
            self._next_deadline_s = math.inf
            return
        now_s = agreed.now_s
        for wait in self._new:
            wait.deadline_s = now_s + wait.timeout_s
            self._next_deadline_s = min(self._next_deadline_s, wait.deadline_s)
        self._new.clear()
        asked = list(self._in_lanes())
        facts = {wait.rid: agreed.numbers[name] for name, wait in zip(names[1:], asked, strict=False)}
        is_due = now_s >= self._next_deadline_s
        for wait in sorted(self._waits.values() if is_due else asked, key=_AGE):
            fact = facts.get(wait.rid, _WAITING)
            if fact != _WAITING:
                self._depart(wait, _REASONS[fact], wait.problem if wait.fact == fact else _FAILED_ELSEWHERE)
            elif now_s >= wait.deadline_s:
                self._depart(wait, "expired", f"waited longer than {wait.timeout_s:g} s")
        if is_due or not self._waits:
            self._next_deadline_s = min((wait.deadline_s for wait in self._waits.values()), default=math.inf)
        if self.in_turns and len(self._waits) > self.num_lanes:
            self._pass_lanes_on(asked)

    def pop_departures(self) -> Sequence[Departure[T]]:
        """Return the requests that have left since the last call, in the order in which they were added."""
        if not self._departures:
            return ()
        departures, self._departures = self._departures, {}
        return tuple(departures.values())

    def stats(self) -> AgreedQueueStats:
        """Return the counters, and how many requests wait."""
        return msgspec.structs.replace(self._counts, waiting=len(self._waits))

    def _in_lanes(self) -> Iterator[_Wait[T]]:
        return islice(self._waits.values(), self.num_lanes)

    def _pass_lanes_on(self, asked: Sequence[_Wait[T]]) -> None:
        """Move those requests that were asked about behind the others."""
        for wait in asked:
            if wait.rid in self._waits:
                self._waits[wait.rid] = self._waits.pop(wait.rid)
                self._digest = crc32(wait.rid.encode(errors="surrogatepass"), self._digest)

    def _report(self, rid: str, fact: int, problem: str = "") -> None:
        wait = self._waits.get(rid)
        if wait is None:
            self._counts.unknown += 1
        elif wait.fact == _WAITING:
            wait.fact, wait.problem = fact, problem

    def _depart(self, wait: _Wait[T], reason: DepartureReason, problem: str = "") -> None:
        del self._waits[wait.rid]
        self._departures[wait.rid] = Departure(wait.rid, wait.item, reason, problem)
        counter = "failed" if reason == "error" else reason
        setattr(self._counts, counter, getattr(self._counts, counter) + 1)
        self._record(reason, wait.rid)

    def _record(self, what: str, rid: str) -> None:
        self._digest = crc32(f"{what} {rid}".encode(errors="surrogatepass"), self._digest)
        self.decisions.note("expire" if what == "expired" else "apply", self.name, what, rid)


R = TypeVar("R", bound=HeldRequest)


class WaitingRoom(AgreementPart, Protocol[R]):
    """A component that prepares what some requests need. Called on the scheduler's thread, on all ranks alike.

    Its ``fill`` reads the results of its threads and reports them to its queue, and both ``fill`` and ``apply`` call
    those of its queue.
    """

    @property
    def queue(self) -> AgreedQueue[R]:
        """The requests that wait in this room. ``WaitingRooms`` reads its departures."""
        ...

    def enter(self, request: R) -> bool:
        """Begin to prepare what a new request needs, and queue it. Return False if it needs nothing of this room.

        Raises:
            ConfigError: the request asks for something that does not exist; it is refused.
            QueueFullError: too many requests wait.

        After an exception nothing has changed.
        """
        ...

    def end(self, request: R) -> None:
        """Handle the end of a request that waits here, has left or has never entered: release what it holds.

        It may be called more than once for the same request.
        """
        ...


@dataclass(slots=True, kw_only=True)
class WaitingRooms(Generic[R]):
    """The rooms of one scheduler, and the requests that wait in them. A ``StatsSource``.

    A retracted request does not come back: what it got from a room stays its own until it ends.

    Attributes:
        rooms: in one order on all ranks.
    """

    rooms: Sequence[WaitingRoom[R]] = ()
    _rooms_left: dict[str, set[int]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """Return how many requests wait; the same number on all ranks."""
        return len(self._rooms_left)

    def enter(self, request: R) -> bool:
        """Let a new request enter every room. Return False if it need not wait in any.

        Raises:
            ConfigError, QueueFullError: a room refuses it, and it waits in none.
        """
        if not self.rooms:
            return False
        try:
            entered = {number for number, room in enumerate(self.rooms) if room.enter(request)}
        except Exception:
            self.end(request)
            raise
        if entered:
            self._rooms_left[request.rid] = entered
        return bool(entered)

    def end(self, request: R) -> None:
        """Handle the end of a request, whether it waits in a room or has left all of them."""
        self._rooms_left.pop(request.rid, None)
        for room in self.rooms:
            room.end(request)

    def pop_departures(self) -> list[Departure[R]]:
        """Return the requests that have left all rooms, or that one room has failed or expired, in one order.

        The caller ends the failed and expired ones with ``end``. Their ``problem`` names the room.
        """
        departures = []
        for number, room in enumerate(self.rooms):
            for departure in room.queue.pop_departures():
                left = self._rooms_left.get(departure.rid)
                if left is None:
                    continue  # another room has failed or expired it in the same step
                left.discard(number)
                if departure.reason != "ready":
                    problem = f"{room.queue.name}: {departure.problem}"
                    departure = msgspec.structs.replace(departure, problem=problem)
                elif left:
                    continue
                del self._rooms_left[departure.rid]
                departures.append(departure)
        return departures

    @property
    def next_deadline_s(self) -> float:
        """A lower bound of the agreed time at which a request expires; infinite if none can."""
        return min((room.queue.next_deadline_s for room in self.rooms), default=float("inf"))

    def stats(self) -> AgreedQueueStats:
        """Return the sums of the queues' counters. A request that waits in two rooms counts twice."""
        each = [msgspec.structs.astuple(room.queue.stats()) for room in self.rooms]
        return AgreedQueueStats(*map(sum, zip(*each, strict=True)))
