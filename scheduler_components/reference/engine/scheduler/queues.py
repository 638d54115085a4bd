"""The waiting and running requests of one scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_components import FinishReason
from scheduler_components.load import TokenCountedQueue
from scheduler_components.reference.engine.scheduler.request import Request, RequestState

__all__ = [
    "RequestQueues",
]


class _PrefillCount:
    """What admitted prefills have still to compute, as a sum that is kept, so that a load inquiry walks nothing.

    A request's tokens are remembered as they were counted, and exactly that count leaves with it.
    """

    __slots__ = ("_by_rid", "num_tokens")

    def __init__(self) -> None:
        self._by_rid: dict[str, int] = {}  # requests in prefill alone
        self.num_tokens = 0

    def count(self, request: Request) -> None:
        """Count a running request, or count it anew."""
        self.forget(request)
        if num_tokens := request.num_prefill_tokens_left:
            self._by_rid[request.rid] = num_tokens
            self.num_tokens += num_tokens

    def forget(self, request: Request) -> None:
        """The request runs no more, or never did."""
        if self._by_rid:
            self.num_tokens -= self._by_rid.pop(request.rid, 0)


@dataclass(slots=True, kw_only=True)
class RequestQueues:
    """Every request in flight stands in exactly one of ``waiting`` and ``running``; a ``QueueSource`` for load reports.

    Both are kept in order of arrival, and all that run arrived before all that wait: requests are admitted from
    the front, and the latest of the running ones is the first to be retracted.

    Attributes:
        max_running_requests: slots of ``running``.
        waiting: requests without pages.
        running: requests with pages, in prefill or decode.
    """

    max_running_requests: int
    waiting: TokenCountedQueue[Request] = field(default_factory=TokenCountedQueue)
    running: list[Request] = field(default_factory=list)
    _by_rid: dict[str, Request] = field(default_factory=dict, init=False, repr=False)
    _untold_rids: set[str] = field(default_factory=set, init=False, repr=False)
    _num_arrivals: int = field(default=0, init=False)
    _prefills: _PrefillCount = field(default_factory=_PrefillCount, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    @property
    def num_chunked_tokens_left(self) -> int:
        """Tokens that admitted prefills have still to compute: ``num_prefill_tokens_left`` of all running ones."""
        return self._prefills.num_tokens

    def update_prefill_tokens(self, request: Request) -> None:
        """More of a request's prefill is computed; one that has ended with it is no longer counted anyway."""
        if request.state is RequestState.RUNNING:
            self._prefills.count(request)

    def find(self, rid: str) -> Request | None:
        """Return the request in flight with this id, or None."""
        return self._by_rid.get(rid)

    def is_taken(self, rid: str) -> bool:
        """Say whether a new request must not have this id: one is in flight, or its abort is still to be told."""
        return rid in self._by_rid or rid in self._untold_rids

    def on_aborts_streamed(self) -> None:
        """Every abort has been told: the ids of aborted requests may come again."""
        self._untold_rids.clear()

    def add(self, request: Request) -> None:
        """Put a new request at the end of the waiting ones and number its arrival."""
        self._by_rid[request.rid] = request
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running; its ``prefill_end`` is set."""
        self.waiting.remove(request)
        self.running.append(request)
        request.state = RequestState.RUNNING
        self._prefills.count(request)

    def requeue(self, request: Request) -> None:
        """Move a request from running to the front of the waiting ones."""
        self.running.remove(request)
        self._prefills.forget(request)
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it stands."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._prefills.forget(request)
        del self._by_rid[request.rid]
        if reason is FinishReason.ABORT:
            self._untold_rids.add(request.rid)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
