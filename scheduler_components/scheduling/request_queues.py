"""RequestQueues: the waiting and running requests of one scheduler."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from scheduler_components.load import TokenCountedQueue
from scheduler_components.ports import BatchedRequest
from scheduler_components.values import FinishReason, HeldCount, PageHolding, RequestState

__all__ = ["RequestQueues"]


R = TypeVar("R", bound=BatchedRequest)

_arrival = attrgetter("arrival")


class _PrefillCount(Generic[R]):
    """The number of prefill tokens that running requests have still to compute, kept as a sum for load reports.

    It remembers the count of each request, so that it subtracts exactly what it has added.
    """

    __slots__ = ("_by_rid", "num_tokens")

    def __init__(self) -> None:
        self._by_rid: dict[str, int] = {}  # requests in prefill only
        self.num_tokens = 0

    def count(self, request: R) -> None:
        """Count a running request. An earlier count of it is replaced."""
        self.remove(request)
        if num_tokens := request.num_prefill_tokens_left:
            self._by_rid[request.rid] = num_tokens
            self.num_tokens += num_tokens

    def remove(self, request: R) -> None:
        """Subtract the count of a request, if it has one."""
        if self._by_rid:
            self.num_tokens -= self._by_rid.pop(request.rid, 0)


@dataclass(slots=True, kw_only=True)
class RequestQueues(Generic[R]):
    """The requests in flight. Each is in exactly one of ``waiting`` and ``running``.

    ``running`` is in order of arrival. ``waiting`` has new requests at its end and preempted ones at its front; the
    scheduling policy decides which of them is next. A held request also waits, and may not be admitted before it is
    released. Load reports read this class as a ``QueueSource``, checks as the ``PageHolders`` of a scheduler.

    Attributes:
        max_running_requests: request slots of ``running``.
        waiting: requests without pages.
        running: requests with pages, in prefill or decode.
    """

    max_running_requests: int
    waiting: TokenCountedQueue[R] = field(default_factory=TokenCountedQueue)
    running: list[R] = field(default_factory=list)
    _by_rid: dict[str, R] = field(default_factory=dict, init=False, repr=False)
    _unreported_aborts: set[str] = field(default_factory=set, init=False, repr=False)
    _held: set[str] = field(default_factory=set, init=False, repr=False)
    _num_arrivals: int = field(default=0, init=False)
    _prefills: _PrefillCount[R] = field(default_factory=_PrefillCount, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[R]:
        yield from self.running
        yield from self.waiting

    @property
    def num_held(self) -> int:
        """Waiting requests that may not be admitted yet."""
        return len(self._held)

    @property
    def num_admissible(self) -> int:
        """Waiting requests that may be admitted."""
        return len(self.waiting) - len(self._held)

    def is_admissible(self, request: R) -> bool:
        """Return True if a request waits and is not held."""
        return request in self.waiting and request.rid not in self._held

    @property
    def num_chunked_tokens_left(self) -> int:
        """Sum of ``num_prefill_tokens_left`` over all running requests."""
        return self._prefills.num_tokens

    def update_prefill_tokens(self, request: R) -> None:
        """Update the count after a part of a prefill was computed. A finished request is not counted any more."""
        if request.state is RequestState.RUNNING:
            self._prefills.count(request)

    def recount_prefetched(self, spans: Iterable[tuple[str, tuple[int, int]]]) -> None:
        """Count waiting requests again whose tokens a prefetch has found, so that load reports leave these out."""
        for rid, span in spans:
            request = self._by_rid.get(rid)
            if request is not None and request in self.waiting:
                self.waiting.recount(request, span)

    def count_held(self) -> HeldCount:
        """Return how many pages the requests own."""
        return HeldCount(sum([len(request.pages) - request.num_cached_pages for request in self.running]))

    def holdings(self) -> Iterator[PageHolding]:
        """Yield the pages of each request. Waiting ones are included; they should hold none."""
        for request in self:
            if request.pages or request.node is not None:
                end = request.num_cached_pages
                yield PageHolding(request.rid, "request", request.pages[end:], request.pages[:end], request.node)

    def find(self, rid: str) -> R | None:
        """Return the request in flight with this id, or None."""
        return self._by_rid.get(rid)

    def __contains__(self, rid: object) -> bool:
        """Return True if the id is in use: by a request in flight, or by an abort that is not streamed yet."""
        return rid in self._by_rid or rid in self._unreported_aborts

    def on_aborts_streamed(self) -> None:
        """Allow new requests with the ids of aborted ones, because all aborts have been streamed."""
        self._unreported_aborts.clear()

    def add(self, request: R) -> None:
        """Append a new request to the waiting queue and number its arrival."""
        self._by_rid[request.rid] = request
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def hold(self, request: R) -> None:
        """Append a new request as ``add`` does. It may not be admitted before ``release``."""
        self.add(request)
        self._held.add(request.rid)

    def release(self, request: R) -> None:
        """Allow the admission of a held request. It keeps its place and its arrival."""
        self._held.remove(request.rid)

    def admit(self, request: R) -> None:
        """Move a request from waiting to running. The caller has set its ``prefill_end``."""
        self.waiting.remove(request)
        insort(self.running, request, key=_arrival)
        request.state = RequestState.RUNNING
        self._prefills.count(request)

    def requeue(self, request: R) -> None:
        """Move a request from running to the head of the waiting queue."""
        self.running.remove(request)
        self._prefills.remove(request)
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    def finish(self, request: R, reason: FinishReason) -> None:
        """Remove a request from its queue and set its finish reason."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._prefills.remove(request)
        del self._by_rid[request.rid]
        self._held.discard(request.rid)
        if reason is FinishReason.ABORT:
            self._unreported_aborts.add(request.rid)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
