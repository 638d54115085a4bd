"""Tokens that wait: counted in a scheduler's queue, and remembered by the dispatcher that sent them.

How many tokens a waiting request stands for is one rule, used by every queue and every report.

The rule is that of SGLang's load reports (0.5.23, ``num_total_tokens`` and ``num_waiting_uncached_tokens``): a
waiting request counts its whole input as pending, and the part that no cached prefix covers as uncached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar, overload

from scheduler_components.errors import ConfigError
from scheduler_components.ports import QueuedRequest

__all__ = [
    "count_request_tokens",
    "CountedQueue",
    "TokenCountedQueue",
    "MAX_DISPATCHER_NAME_CHARACTERS",
    "DispatchLedger",
    "is_valid_dispatcher_name",
]


def count_request_tokens(request: QueuedRequest) -> tuple[int, int]:
    """Return ``(pending_tokens, uncached_tokens)`` of one request, with ``0 <= uncached <= pending``.

    Values outside that range are cut off: a count goes into gauges and dispatch decisions, and a prefix match
    that is longer than a request since shortened must not make them negative.
    """
    pending_tokens = request.num_input_tokens
    uncached_tokens = pending_tokens - request.num_cached_tokens
    if 0 <= uncached_tokens <= pending_tokens:
        return pending_tokens, uncached_tokens
    pending_tokens = max(0, pending_tokens)
    return pending_tokens, min(max(0, uncached_tokens), pending_tokens)


# A queue of requests that always knows how many tokens it holds.

R = TypeVar("R", bound=QueuedRequest)

_request_of = itemgetter(0)  # of an entry; what walks a queue of thousands stays out of Python's own loops


class CountedQueue:
    """A queue of requests that is asked for its totals, and not walked: for an engine that has a queue of its own.

    Not an abstract base class: to ask one whether an object is its instance takes a third of a load inquiry.
    """

    __slots__ = ()

    def totals(self) -> tuple[int, int, int]:
        """Return ``(requests, pending_tokens, uncached_tokens)`` of this moment."""
        raise NotImplementedError


class TokenCountedQueue(CountedQueue, Sequence[R]):
    """A FIFO queue whose token counts are O(1), so that a load inquiry never walks it.

    A request's tokens are counted once, when it enters, and exactly that count leaves with it: a request that is
    aborted after its prefix match or its output changed cannot leave a remainder in the gauges. Call ``recount``
    when a queued request's prefix match has changed.

    Requests are told apart by identity, not by ``==``; each may be queued once. Entering, leaving at either end
    and ``remove`` (an abort) are O(1), iteration is O(n), an index in the middle costs a walk to it.

    Raises:
        ValueError: a request that is already queued enters again, or one that is not queued is removed.
        IndexError: a pop from an empty queue, or an index out of range.
    """

    __slots__ = ("_entries", "_pending_tokens", "_uncached_tokens")

    def __init__(self, requests: Iterable[R] = ()) -> None:
        # By identity; the entry keeps its request alive, so that an id is never reused while it is a key.
        self._entries: OrderedDict[int, tuple[R, int, int]] = OrderedDict()
        self._pending_tokens = 0
        self._uncached_tokens = 0
        self.extend(requests)

    @property
    def pending_tokens(self) -> int:
        """Input tokens of all queued requests, as they were counted."""
        return self._pending_tokens

    @property
    def uncached_tokens(self) -> int:
        """The part of ``pending_tokens`` that no cached prefix covers."""
        return self._uncached_tokens

    def totals(self) -> tuple[int, int, int]:
        """``(requests, pending_tokens, uncached_tokens)`` in one call, for load inquiries."""
        return len(self._entries), self._pending_tokens, self._uncached_tokens

    def append(self, request: R) -> None:
        """Enter at the end."""
        entries = self._entries
        key = id(request)
        if key in entries:
            raise ValueError(f"{request!r} is already queued")
        # What count_request_tokens does with sound counts, written out: the call is an eighth of what entering costs.
        pending = request.num_input_tokens
        uncached = pending - request.num_cached_tokens
        if not 0 <= uncached <= pending:
            pending, uncached = count_request_tokens(request)
        entries[key] = (request, pending, uncached)
        self._pending_tokens += pending
        self._uncached_tokens += uncached

    def appendleft(self, request: R) -> None:
        """Enter at the front: a retracted request that is to go next."""
        self.append(request)
        self._entries.move_to_end(id(request), last=False)

    def extend(self, requests: Iterable[R]) -> None:
        """Enter all at the end, in order."""
        for request in requests:
            self.append(request)

    def popleft(self) -> R:
        """Leave from the front."""
        try:
            _, (request, pending, uncached) = self._entries.popitem(False)
        except KeyError:
            raise IndexError("pop from an empty queue") from None
        self._pending_tokens -= pending
        self._uncached_tokens -= uncached
        return request

    def pop(self) -> R:
        """Leave from the end."""
        try:
            _, (request, pending, uncached) = self._entries.popitem()
        except KeyError:
            raise IndexError("pop from an empty queue") from None
        self._pending_tokens -= pending
        self._uncached_tokens -= uncached
        return request

    def remove(self, request: R) -> None:
        """Leave from wherever the request stands."""
        entry = self._entries.pop(id(request), None)
        if entry is None:
            raise ValueError(f"{request!r} is not queued")
        self._pending_tokens -= entry[1]
        self._uncached_tokens -= entry[2]

    def clear(self) -> None:
        """Forget all requests."""
        self._entries.clear()
        self._pending_tokens = self._uncached_tokens = 0

    def recount(self, request: R, storage_span: tuple[int, int] = (0, 0)) -> None:
        """Count a queued request anew, in place: its prefix match has changed, or storage was found to have more.

        Args:
            request: stands in the queue.
            storage_span: its tokens from the first to before the end that a storage tier will bring: they wait, and
                are not to be computed (SGLang's ``waiting_storage_span``). What is cached already counts once.
        """
        entry = self._entries.get(id(request))
        if entry is None:
            raise ValueError(f"{request!r} is not queued")
        pending, uncached = count_request_tokens(request)
        first, end = storage_span
        if end > first:
            uncached -= max(0, min(end, pending) - max(first, pending - uncached))
        self._entries[id(request)] = (request, pending, uncached)
        self._pending_tokens += pending - entry[1]
        self._uncached_tokens += uncached - entry[2]

    def sort(self, *, key: Callable[[R], Any], reverse: bool = False) -> None:
        """Reorder by ``key``, stably: a priority or longest-prefix policy. The counts stay as they are."""
        for request in sorted(self, key=key, reverse=reverse):
            self._entries.move_to_end(id(request))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[R]:
        return map(_request_of, self._entries.values())

    def __reversed__(self) -> Iterator[R]:
        return map(_request_of, reversed(self._entries.values()))

    def __contains__(self, request: object) -> bool:
        return id(request) in self._entries

    def index(self, request: object, start: int = 0, stop: int | None = None) -> int:
        """Return the place of ``request`` within ``start`` to ``stop``, counted as ``list.index`` does."""
        places = range(len(self))[start:stop]
        for place, queued in enumerate(self):
            if queued is request and place in places:
                return place
        raise ValueError(f"{request!r} is not queued")

    def count(self, request: object) -> int:
        """Return 1 for a queued request, else 0."""
        return int(request in self)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(len(self))[index]  # raises IndexError, and folds negative numbers
        from_end = len(self) - 1 - place
        if from_end < place:
            return next(islice(reversed(self), from_end, None))
        return next(islice(self, place, None))

    def __repr__(self) -> str:
        return (
            f"<TokenCountedQueue: {len(self)} requests, {self._pending_tokens} pending tokens, "
            f"{self._uncached_tokens} uncached>"
        )


# A dispatcher's memory of what it has sent to one replica and no report counts yet. Pure: no clock, no sockets.

MAX_DISPATCHER_NAME_CHARACTERS = 64
"""Every load report carries the names of its dispatchers."""


def is_valid_dispatcher_name(name: str) -> bool:
    """Say whether ``name`` can stand in a load report: 1 to 64 printable ASCII characters."""
    return 0 < len(name) <= MAX_DISPATCHER_NAME_CHARACTERS and name.isascii() and name.isprintable()


@dataclass(slots=True, kw_only=True)
class DispatchLedger:
    """Numbers the requests sent to one replica and forgets each when a report counts it.

    The replica's load, as its dispatcher should see it, is the last report plus ``unreported_tokens``: no request is
    counted twice, and none in flight is forgotten, however late reports are. A replica that restarts has lost what
    was in flight to it; its entries leave with the first report that counts a later ticket.

    Attributes:
        dispatcher: this dispatcher's name, unique among those that send to the replica, and new for each of its
            lives, for tickets begin at 1 again.
        unreported_tokens: input tokens of the requests that are not counted yet.

    Raises:
        ConfigError: the name cannot stand in a load report.
    """

    dispatcher: str
    unreported_tokens: int = field(default=0, init=False)
    _last_ticket: int = field(default=0, init=False, repr=False)
    _unreported: OrderedDict[int, int] = field(default_factory=OrderedDict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_valid_dispatcher_name(self.dispatcher):
            raise ConfigError(
                "dispatcher",
                self.dispatcher,
                "cannot stand in a load report",
                f"give 1 to {MAX_DISPATCHER_NAME_CHARACTERS} printable ASCII characters",
            )

    @property
    def unreported_requests(self) -> int:
        """Requests that were sent and are not counted by any report yet."""
        return len(self._unreported)

    def issue_ticket(self, num_tokens: int) -> int:
        """Note a request that is about to be sent; returns the ticket to send with it. Send in order of tickets."""
        self._last_ticket += 1
        self._unreported[self._last_ticket] = num_tokens
        self.unreported_tokens += num_tokens
        return self._last_ticket

    def cancel(self, ticket: int) -> None:
        """Forget a request that could not be sent. For a ticket that is counted already nothing is left to do."""
        self.unreported_tokens -= self._unreported.pop(ticket, 0)

    def on_load_report(self, watermarks: Iterable[tuple[str, int]]) -> None:
        """Take in ``LoadSnapshot.dispatched_watermarks`` of a report; other dispatchers' pairs are skipped."""
        for dispatcher, ticket in watermarks:
            if dispatcher == self.dispatcher:
                self._forget_up_to(ticket)

    def _forget_up_to(self, ticket: int) -> None:
        unreported = self._unreported
        while unreported and next(iter(unreported)) <= ticket:
            self.unreported_tokens -= unreported.popitem(last=False)[1]
