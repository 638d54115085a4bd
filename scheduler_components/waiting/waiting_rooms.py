"""WaitingRooms: what a request waits for before it may be batched, besides pages: a grammar, an adapter.

Each room prepares one kind of thing, at different moments on different ranks, and decides by an ``AgreedQueue``. A new
request enters all rooms together, so a grammar is compiled while an adapter is loaded. It leaves when every room that
it waits in has let it go, or when one of them has failed or expired. Both happen in the same step on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from scheduler_components.agreement.step_agreement import AgreementPart
from scheduler_components.values import AgreedQueueStats
from scheduler_components.waiting.agreed_queue import AgreedQueue, Departure

__all__ = ["RequestWithRid", "WaitingRoom", "WaitingRooms"]


class RequestWithRid(Protocol):
    """A request, as ``WaitingRooms`` reads it: the scheduler's own class."""

    @property
    def rid(self) -> str:
        """Unique among the requests in flight."""
        ...


R = TypeVar("R", bound=RequestWithRid)


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
