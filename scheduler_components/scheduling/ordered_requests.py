"""Orders of waiting requests: the structures that scheduling policies are made of.

Each costs O(log n) per change for n waiting requests, and is read lazily: a step that admits three of 10,000 waiting
requests pays for three. A request is known by its ``arrival``, which no other request has and which it keeps when it is
preempted. None of these structures reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeAlias, TypeVar

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError
from scheduler_components.ports import SchedulableRequest

__all__ = ["CachedLengths", "FirstSteps", "KeyedHeap", "OrderedRequests", "RequestGroup", "RequestGroups", "WaitLimit"]

T = TypeVar("T")
N = TypeVar("N", bound=Hashable)
R = TypeVar("R", bound=SchedulableRequest)

Key: TypeAlias = tuple[float, ...]


class KeyedHeap(Generic[T]):
    """Items by ascending key: a heap whose removed entries stay until they reach its top or outnumber the others.

    Items with equal keys are in the order of their numbers, which are unique. ``put`` and ``discard`` are O(log n);
    reading the k first items is O(k log k). Items may be discarded while others are read, but not put.
    """

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []
        self._live: dict[int, tuple[tuple[Key, int], T]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def get(self, number: int) -> T | None:
        """Return the item of this number, or None."""
        found = self._live.get(number)
        return None if found is None else found[1]

    def put(self, number: int, item: T, key: Key) -> None:
        """Add an item, or change its key."""
        known = self._live.get(number)
        if known is not None and known[0][0] == key:
            return
        entry = (key, number)
        self._live[number] = (entry, item)
        heappush(self._heap, entry)
        self._prune()

    def discard(self, number: int) -> bool:
        """Remove an item. Return False if there is none of this number."""
        return self._live.pop(number, None) is not None

    def first(self) -> T | None:
        """Return the first item, or None."""
        self._prune()
        return self._live[self._heap[0][1]][1] if self._heap else None

    def __iter__(self) -> Iterator[T]:
        self._prune()
        heap, live = self._heap, self._live
        reached = [(heap[0], 0)] if heap else []  # the next entry, and its place, of each branch of the heap
        while reached:
            entry, place = heappop(reached)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heappush(reached, (heap[below], below))
            found = live.get(entry[1])
            if found is not None and found[0] is entry:
                yield found[1]

    def _prune(self) -> None:
        heap, live = self._heap, self._live
        if len(heap) > 2 * len(live) + 64:
            self._heap = sorted(entry for entry, _ in live.values())
            return
        while heap:
            found = live.get(heap[0][1])
            if found is not None and found[0] is heap[0]:
                return
            heappop(heap)


class OrderedRequests(Generic[R]):
    """Waiting requests by ascending key, equal keys by arrival: what most policies need.

    ``put`` and ``discard`` are O(log n). Iterating is lazy, and the request just yielded may be discarded meanwhile.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: KeyedHeap[R] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[R]:
        return iter(self._heap)

    def put(self, request: R, *key: float) -> None:
        """Add a request, or change its key.

        Raises:
            ConfigError: a part of the key is not a number, or NaN, or another request has this arrival; nothing has
                changed.
        """
        for part in key:
            if not isinstance(part, int | float) or part != part:
                raise ConfigError("key", part, f"cannot order request {request.rid!r}", "give a number other than NaN")
        known = self._heap.get(request.arrival)
        if known is not None and known is not request:
            problem = f"is the arrival of two waiting requests, {known.rid!r} and {request.rid!r}"
            raise ConfigError("arrival", request.arrival, problem, "number the submissions")
        self._heap.put(request.arrival, request, key)

    def discard(self, request: R) -> None:
        """Remove a request. No effect if it is unknown."""
        self._heap.discard(request.arrival)

    def first(self) -> R | None:
        """Return the first request, or None."""
        return self._heap.first()


class FirstSteps:
    """In which step each request first began to wait. A preempted request keeps its step, because its arrival does.

    Arrivals are numbered in ascending order, so one number per step is enough: the last arrival of the step.
    """

    __slots__ = ("_last_arrivals", "_steps")

    _MAX_STEPS = 8_192  # requests that arrived earlier count as of the earliest step kept

    def __init__(self) -> None:
        self._last_arrivals: list[int] = []
        self._steps: list[int] = []

    def add(self, arrival: int, step: int) -> None:
        """Handle a request that begins to wait, for the first time or again."""
        arrivals, steps = self._last_arrivals, self._steps
        if arrivals and arrival <= arrivals[-1]:
            return
        if steps and step <= steps[-1]:
            arrivals[-1] = arrival
            return
        arrivals.append(arrival)
        steps.append(step)
        if len(steps) > 2 * self._MAX_STEPS:
            del arrivals[: self._MAX_STEPS], steps[: self._MAX_STEPS]

    def step_of(self, arrival: int) -> int:
        """Return the step of an arrival that was added."""
        return self._steps[bisect_left(self._last_arrivals, arrival)]


class WaitLimit(Generic[R]):
    """Waiting requests by arrival, to find those that have waited longer than a limit."""

    __slots__ = ("_first_steps", "_requests")

    def __init__(self) -> None:
        self._requests: OrderedRequests[R] = OrderedRequests()
        self._first_steps = FirstSteps()

    def add(self, request: R, step: int) -> None:
        """Handle a request that begins to wait, for the first time or again."""
        self._first_steps.add(request.arrival, step)
        self._requests.put(request)

    def discard(self, request: R) -> None:
        """Remove a request. No effect if it is unknown."""
        self._requests.discard(request)

    def overdue(self, step: int, longest_wait_steps: int) -> Iterator[R]:
        """Iterate over the requests that began to wait ``longest_wait_steps`` ago or earlier, in order of arrival."""
        for request in self._requests:
            if step - self._first_steps.step_of(request.arrival) < longest_wait_steps:
                return
            yield request


class CachedLengths(Generic[R]):
    """How many tokens of each waiting request are cached, as of its last match. The requests take turns.

    Until its first turn a request counts with its ``num_cached_tokens``. The newest request has the next turn, because
    the continuation of a conversation is the request that is most often cached.
    """

    __slots__ = ("_left", "_lengths", "_match_length", "_per_step", "_step", "_turns")

    def __init__(self, match_length: Callable[[R], int], per_step: int) -> None:
        check_integer("matches_per_step", per_step, "is not a number of requests")
        self._match_length = match_length
        self._per_step = per_step
        self._turns: OrderedDict[int, R] = OrderedDict()
        self._lengths: dict[int, tuple[int, int | None]] = {}  # length, and the step in which it was matched
        self._step: int | None = None
        self._left = 0

    def add(self, request: R) -> None:
        """Add a request with its ``num_cached_tokens``."""
        self._turns[request.arrival] = request
        self._turns.move_to_end(request.arrival, last=False)
        self._lengths[request.arrival] = (request.num_cached_tokens, None)

    def discard(self, request: R) -> None:
        """Remove a request. No effect if it is unknown."""
        self._turns.pop(request.arrival, None)
        self._lengths.pop(request.arrival, None)

    def length_of(self, request: R) -> int:
        """Return the cached tokens of a request at its last match."""
        return self._lengths[request.arrival][0]

    def match_next(self, step: int) -> Iterator[tuple[R, int]]:
        """Match the requests whose turn it is, each at most once per step. Yield those whose length has changed."""
        if step != self._step:
            self._step, self._left = step, self._per_step
        turns, lengths = self._turns, self._lengths
        while self._left and turns:
            arrival = next(iter(turns))
            known, matched_step = lengths[arrival]
            if matched_step == step:
                return
            request = turns[arrival]
            turns.move_to_end(arrival)
            self._left -= 1
            length = self._match_length(request)
            lengths[arrival] = (length, step)
            if length != known:
                yield request, length


@dataclass(slots=True, eq=False)
class RequestGroup(Generic[N, R]):
    """Waiting requests of one group, in order of arrival.

    Attributes:
        name: of the group.
        number: in which order the groups were made.
        requests: its waiting requests.
        key: orders the groups, as of the last `RequestGroups.by_key`.
        first_arrival: of its earliest request, as of the last `RequestGroups.by_key`.
    """

    name: N
    number: int
    requests: OrderedRequests[R] = field(default_factory=OrderedRequests)
    key: float = 0
    first_arrival: int = 0


class RequestGroups(Generic[N, R]):
    """Waiting requests by the name of their group. The groups are ordered by a key, equal keys by earliest arrival.

    What changes while requests are admitted takes effect in the next call of ``by_key``.
    """

    __slots__ = ("_changed", "_group_of", "_groups", "_num_groups", "_order")

    def __init__(self) -> None:
        self._groups: dict[N, RequestGroup[N, R]] = {}
        self._group_of: dict[int, RequestGroup[N, R]] = {}
        self._order: KeyedHeap[RequestGroup[N, R]] = KeyedHeap()
        self._changed: dict[N, float] = {}  # groups that changed since the last by_key, with their new keys
        self._num_groups = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._group_of)

    def get(self, name: N) -> RequestGroup[N, R] | None:
        """Return the group of this name. It may be empty."""
        return self._groups.get(name)

    def has_requests(self, name: N) -> bool:
        """Return True if requests of this group wait."""
        group = self._groups.get(name)
        return group is not None and len(group.requests) > 0

    def add(self, request: R, name: N) -> None:
        """Add a request to a group, or move it there."""
        self.discard(request)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = RequestGroup(name, self._num_groups)
            self._num_groups += 1
        group.requests.put(request)
        self._group_of[request.arrival] = group
        self._changed.setdefault(name, group.key)

    def discard(self, request: R) -> RequestGroup[N, R] | None:
        """Remove a request and return its group, or None if it is unknown."""
        group = self._group_of.pop(request.arrival, None)
        if group is not None:
            group.requests.discard(request)
            self._changed.setdefault(group.name, group.key)
        return group

    def set_key(self, name: N, key: float) -> None:
        """Change the key of a group. No effect without such a group."""
        if name in self._groups:
            self._changed[name] = key

    def by_key(self) -> Iterator[RequestGroup[N, R]]:
        """Iterate over the groups that have requests, lazily."""
        for name, key in self._changed.items():
            group = self._groups[name]
            first = group.requests.first()
            if first is None:
                del self._groups[name]
                self._order.discard(group.number)
            else:
                group.key, group.first_arrival = key, first.arrival
                self._order.put(group.number, group, (key, first.arrival))
        self._changed.clear()
        return iter(self._order)
