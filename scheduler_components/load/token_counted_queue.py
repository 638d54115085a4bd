"""Count waiting tokens: in a scheduler's queue, and at the dispatcher that has sent them.

Every queue and report counts the tokens of a waiting request as SGLang's load reports do (0.5.23, ``num_total_tokens``
and ``num_waiting_uncached_tokens``): its whole input is pending, and the part that no cached prefix covers is uncached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar, overload

from scheduler_components.errors import ConfigError

if TYPE_CHECKING:
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

    Values outside this range are clipped, because counts go into gauges and dispatch decisions: a prefix match that is
    longer than a request that was shortened since must not make them negative.
    """
    pending_tokens = request.num_input_tokens
    uncached_tokens = pending_tokens - request.num_cached_tokens
    if 0 <= uncached_tokens <= pending_tokens:
        return pending_tokens, uncached_tokens
    pending_tokens = max(0, pending_tokens)
    return pending_tokens, min(max(0, uncached_tokens), pending_tokens)


R = TypeVar("R", bound="QueuedRequest")

_request_of = itemgetter(0)  # the request of an entry


class CountedQueue:
    """A queue of requests that knows its totals, so that a load inquiry does not iterate over it. Subclass it.

    It is not an ABC, because ``isinstance`` of an ABC takes a third of ``get_loads(), 64 running``.
    """

    __slots__ = ()

    def totals(self) -> tuple[int, int, int]:
        """Return ``(requests, pending_tokens, uncached_tokens)``."""
        raise NotImplementedError


class TokenCountedQueue(CountedQueue, Sequence[R]):
    """A FIFO queue with token counts in O(1).

    The tokens of a request are counted once, when it is added, and the same count is subtracted when it is removed. A
    request that is aborted after its prefix match or output has changed leaves no remainder in the gauges. Call
    ``recount`` when the prefix match of a queued request has changed.

    Requests are compared by identity, not by ``==``, and each may be queued once. Adding, removing at either end and
    ``remove`` are O(1); iteration and access to the middle are O(n).

    Raises:
        ValueError: a request is added twice, or a request that is not queued is removed.
        IndexError: a pop from an empty queue, or an index out of range.
    """

    __slots__ = ("_entries", "_pending_tokens", "_uncached_tokens")

    def __init__(self, requests: Iterable[R] = ()) -> None:
        # Keyed by id; the entry keeps its request alive, so an id is not reused while it is a key.
        self._entries: OrderedDict[int, tuple[R, int, int]] = OrderedDict()
        self._pending_tokens = 0
        self._uncached_tokens = 0
        self.extend(requests)

    @property
    def pending_tokens(self) -> int:
        """Input tokens of all queued requests."""
        return self._pending_tokens

    @property
    def uncached_tokens(self) -> int:
        """The part of ``pending_tokens`` that no cached prefix covers."""
        return self._uncached_tokens

    def totals(self) -> tuple[int, int, int]:
        return len(self._entries), self._pending_tokens, self._uncached_tokens

    def append(self, request: R) -> None:
        """Add a request at the end."""
        entries = self._entries
        key = id(request)
        if key in entries:
            raise ValueError(f"{request!r} is already queued")
        # count_request_tokens, inlined for valid counts: the call is an eighth of this method.
        pending = request.num_input_tokens
        uncached = pending - request.num_cached_tokens
        if not 0 <= uncached <= pending:
            pending, uncached = count_request_tokens(request)
        entries[key] = (request, pending, uncached)
        self._pending_tokens += pending
        self._uncached_tokens += uncached

    def appendleft(self, request: R) -> None:
        """Add a request at the front, for example a retracted one that runs next."""
        self.append(request)
        self._entries.move_to_end(id(request), last=False)

    def extend(self, requests: Iterable[R]) -> None:
        """Add requests at the end, in order."""
        for request in requests:
            self.append(request)

    def popleft(self) -> R:
        """Remove and return the first request."""
        try:
            _, (request, pending, uncached) = self._entries.popitem(False)
        except KeyError:
            raise IndexError("pop from an empty queue") from None
        self._pending_tokens -= pending
        self._uncached_tokens -= uncached
        return request

    def pop(self) -> R:
        """Remove and return the last request."""
        try:
            _, (request, pending, uncached) = self._entries.popitem()
        except KeyError:
            raise IndexError("pop from an empty queue") from None
        self._pending_tokens -= pending
        self._uncached_tokens -= uncached
        return request

    def remove(self, request: R) -> None:
        """Remove a request from any position."""
        entry = self._entries.pop(id(request), None)
        if entry is None:
            raise ValueError(f"{request!r} is not queued")
        self._pending_tokens -= entry[1]
        self._uncached_tokens -= entry[2]

    def clear(self) -> None:
        """Remove all requests."""
        self._entries.clear()
        self._pending_tokens = self._uncached_tokens = 0

    def recount(self, request: R, storage_span: tuple[int, int] = (0, 0)) -> None:
        """Count a queued request again, because its prefix match or its prefetch from storage has changed.

        Args:
            request: a queued request.
            storage_span: first token and end of the tokens that are prefetched from storage. They are pending but not
                uncached (SGLang's ``waiting_storage_span``). Tokens that are cached already count once.
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
        """Reorder by ``key``, stably, for a priority or longest-prefix policy. The counts do not change."""
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
        """Return the index of ``request`` between ``start`` and ``stop``, as ``list.index``."""
        places = range(len(self))[start:stop]
        for place, queued in enumerate(self):
            if queued is request and place in places:
                return place
        raise ValueError(f"{request!r} is not queued")

    def count(self, request: object) -> int:
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


MAX_DISPATCHER_NAME_CHARACTERS = 64
"""Every load report contains the names of its dispatchers."""


def is_valid_dispatcher_name(name: str) -> bool:
    """Return whether ``name`` is valid in a load report: 1 to 64 printable ASCII characters."""
    return 0 < len(name) <= MAX_DISPATCHER_NAME_CHARACTERS and name.isascii() and name.isprintable()


@dataclass(slots=True, kw_only=True)
class DispatchLedger:
    """Tracks the requests that a dispatcher has sent to one replica until a load report includes them.

    The dispatcher adds ``unreported_tokens`` to the last report to obtain the load of the replica. It counts no request
    twice and none in transit is left out, however late reports are. A replica that restarts has lost its requests in
    transit; their entries are removed by the first report that includes a later ticket.

    Attributes:
        dispatcher: name of this dispatcher, unique among those of the replica. A restarted dispatcher needs a new name,
            because its tickets begin at 1 again.
        unreported_tokens: input tokens of the requests that no report includes yet.

    Raises:
        ConfigError: the name is not valid in a load report.
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
                "is not valid in a load report",
                f"give 1 to {MAX_DISPATCHER_NAME_CHARACTERS} printable ASCII characters",
            )

    @property
    def unreported_requests(self) -> int:
        """Number of requests that were sent and that no report includes yet."""
        return len(self._unreported)

    def issue_ticket(self, num_tokens: int) -> int:
        """Record a request and return its ticket. Send requests in the order of their tickets."""
        self._last_ticket += 1
        self._unreported[self._last_ticket] = num_tokens
        self.unreported_tokens += num_tokens
        return self._last_ticket

    def cancel(self, ticket: int) -> None:
        """Remove a request that could not be sent. Does nothing for a ticket that a report includes."""
        self.unreported_tokens -= self._unreported.pop(ticket, 0)

    def on_load_report(self, watermarks: Iterable[tuple[str, int]]) -> None:
        """Process ``LoadSnapshot.dispatched_watermarks`` of a report; pairs of other dispatchers are skipped."""
        for dispatcher, ticket in watermarks:
            if dispatcher == self.dispatcher:
                self._remove_up_to(ticket)

    def _remove_up_to(self, ticket: int) -> None:
        unreported = self._unreported
        while unreported and next(iter(unreported)) <= ticket:
            self.unreported_tokens -= unreported.popitem(last=False)[1]
