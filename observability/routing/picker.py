"""Pickers: choose one of the replicas by their costs."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Protocol, get_args

import msgspec

from observability.routing.cost_model import ReplicaId
from scheduler_components._internal.validators import check_choice, check_integer, check_number
from scheduler_components.errors import ConfigError

__all__ = [
    "BoundedLoad",
    "Candidate",
    "LeastCost",
    "Picker",
    "PickerName",
    "PowerOfTwo",
    "Softmax",
    "StickySessions",
    "make_picker",
]


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A replica that can serve a request, and what the router knows of it.

    Attributes:
        replica: its id.
        cost: of serving the request there, in blocks.
        overlap: leading blocks of the prompt on the device, blocks that follow on the host, and then in storage.
        load_blocks: blocks that wait there to be computed, and blocks that its requests hold.
        num_dispatched: requests that were sent there so far.
    """

    replica: ReplicaId
    cost: float
    overlap: tuple[int, int, int] = (0, 0, 0)
    load_blocks: float = 0.0
    num_dispatched: int = 0


class Picker(Protocol):
    """Chooses a replica."""

    def pick(self, candidates: Sequence[Candidate], *, session: str | None, now_s: float) -> Candidate:
        """Return one of ``candidates``, which is not empty."""
        ...


@dataclass(slots=True, kw_only=True)
class LeastCost:
    """Picks the lowest cost; of equal ones the replica that got the fewest requests, then the first."""

    def pick(self, candidates: Sequence[Candidate], *, session: str | None, now_s: float) -> Candidate:
        return _cheapest(candidates)


@dataclass(slots=True, kw_only=True)
class Softmax:
    """Picks at random, low costs more often: with a probability that falls exponentially in the cost.

    Several routers that see the same reports then do not all pick the same replica. Costs are divided by their range,
    as in Dynamo, so that one temperature fits every load.

    Attributes:
        rng: the source of randomness; a seeded one repeats its picks.
        temperature: near 0 nearly always the lowest cost, far above 1 nearly uniform.

    Raises:
        ConfigError: the temperature is not above 0.
    """

    rng: random.Random
    temperature: float = 0.1

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "is not a temperature")

    def pick(self, candidates: Sequence[Candidate], *, session: str | None, now_s: float) -> Candidate:
        costs = [candidate.cost for candidate in candidates]
        lowest = min(costs)
        scale = (max(costs) - lowest) * self.temperature or 1.0
        return self.rng.choices(candidates, [math.exp((lowest - cost) / scale) for cost in costs])[0]


@dataclass(slots=True, kw_only=True)
class PowerOfTwo:
    """Draws two replicas at random and picks the one of lower cost.

    Attributes:
        rng: the source of randomness; a seeded one repeats its picks.
    """

    rng: random.Random

    def pick(self, candidates: Sequence[Candidate], *, session: str | None, now_s: float) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        return _cheapest(self.rng.sample(candidates, 2))


@dataclass(slots=True, kw_only=True)
class BoundedLoad:
    """Leaves out the replicas whose load exceeds a multiple of the mean load, and lets another picker choose.

    The rule is that of consistent hashing with bounded loads. Whatever the other picker prefers, the load of a replica
    stays below ``factor`` times the mean and one request.

    Attributes:
        factor: of the mean load; at least 1.
        inner: chooses among the others.

    Raises:
        ConfigError: the factor is below 1.
    """

    factor: float = 1.25
    inner: Picker = field(default_factory=LeastCost)

    def __post_init__(self) -> None:
        check_number("factor", self.factor, "is not a multiple of the mean load")
        if self.factor < 1:
            raise ConfigError("factor", self.factor, "is below the mean load", "give a number of at least 1")

    def pick(self, candidates: Sequence[Candidate], *, session: str | None, now_s: float) -> Candidate:
        loads = [candidate.load_blocks for candidate in candidates]
        # The sum of equal loads divided by their number may be below each of them, by rounding.
        most = max(min(loads), self.factor * math.fsum(loads) / len(loads))
        within = [candidate for candidate in candidates if candidate.load_blocks <= most]
        return self.inner.pick(within, session=session, now_s=now_s)


@dataclass(slots=True, kw_only=True)
class StickySessions:
    """Sends the requests of a session where its last one went, while that replica is a candidate.

    Another picker chooses for a new session, and again when the replica has gone. Put this picker inside
    ``BoundedLoad``, and a session moves when its replica has too much to do.

    Attributes:
        inner: chooses for new sessions, and for requests without a session.
        ttl_s: after the last request of a session.
        max_sessions: the session with the oldest request is forgotten beyond it.

    Raises:
        ConfigError: a size or a time is invalid.
    """

    inner: Picker = field(default_factory=LeastCost)
    ttl_s: float = 600.0
    max_sessions: int = 100_000
    _sessions: OrderedDict[str, tuple[ReplicaId, float]] = field(default_factory=OrderedDict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("ttl_s", self.ttl_s)
        check_integer("max_sessions", self.max_sessions)

    @property
    def num_sessions(self) -> int:
        """Sessions that are remembered, expired ones included until their place is needed."""
        return len(self._sessions)

    def pick(self, candidates: Sequence[Candidate], *, session: str | None, now_s: float) -> Candidate:
        if session is None:
            return self.inner.pick(candidates, session=None, now_s=now_s)
        known = self._sessions.get(session)
        chosen = None
        if known is not None and now_s < known[1]:
            chosen = next((each for each in candidates if each.replica == known[0]), None)
        if chosen is None:
            chosen = self.inner.pick(candidates, session=session, now_s=now_s)
        self._sessions[session] = (chosen.replica, now_s + self.ttl_s)
        self._sessions.move_to_end(session)
        while len(self._sessions) > self.max_sessions:
            self._sessions.popitem(last=False)
        return chosen


def _cheapest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the lowest cost; of equal ones the replica that got the fewest requests, then the first."""
    lowest = min(map(_COST, candidates))
    return min([each for each in candidates if each.cost == lowest], key=_NUM_DISPATCHED)


_COST, _NUM_DISPATCHED = attrgetter("cost"), attrgetter("num_dispatched")

PickerName = Literal["least-cost", "softmax", "power-of-two", "bounded-load", "sticky"]
"""The pickers that a command offers, each with its defaults."""

_PICKERS: Mapping[PickerName, Callable[[random.Random], Picker]] = {
    "least-cost": lambda rng: LeastCost(),
    "softmax": lambda rng: Softmax(rng=rng),
    "power-of-two": lambda rng: PowerOfTwo(rng=rng),
    "bounded-load": lambda rng: BoundedLoad(),
    "sticky": lambda rng: StickySessions(),
}


def make_picker(name: str, rng: random.Random) -> Picker:
    """Make the picker of a name, with its defaults.

    Args:
        name: one of ``PickerName``.
        rng: the source of randomness of the random ones.

    Raises:
        ConfigError: there is none of this name.
    """
    check_choice("picker", name, get_args(PickerName), "is not a picker")
    make: Callable[[random.Random], Picker] = _PICKERS[name]  # type: ignore[index]  # checked above
    return make(rng)
