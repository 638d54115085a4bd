"""The requests of one scheduler: waiting, running, and by id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_components.finish import FinishReason
from scheduler_components.load.token_counted_queue import TokenCountedQueue
from scheduler_components.reference.request import Request, RequestState

__all__ = ["RequestQueues"]


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
    _by_rid: dict[str, Request] = field(default_factory=dict, repr=False)
    _num_arrivals: int = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    @property
    def num_chunked_tokens_left(self) -> int:
        """Tokens that admitted prefills have still to compute."""
        return sum(request.num_prefill_tokens_left for request in self.running)

    def find(self, rid: str) -> Request | None:
        """Return the request in flight with this id, or None."""
        return self._by_rid.get(rid)

    def enter(self, request: Request) -> None:
        """Put a new request at the end of the waiting ones and number its arrival."""
        self._by_rid[request.rid] = request
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self.waiting.remove(request)
        self.running.append(request)
        request.state = RequestState.RUNNING

    def put_back(self, request: Request) -> None:
        """Move a request from running to the front of the waiting ones."""
        self.running.remove(request)
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it stands."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        del self._by_rid[request.rid]
        request.state = RequestState.FINISHED
        request.finish_reason = reason
