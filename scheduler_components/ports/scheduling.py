"""Scheduling: which waiting request is next, and which running request gives up its pages.

A decision may depend on the calls so far and on what came with the requests. It may not depend on a clock, on the rank
or on the order of a set, because all ranks of a replica decide alone and must decide equally. Time is the number of the
step, which the batcher counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from scheduler_components.ports.load import QueuedRequest
from scheduler_components.values import FinishReason, RequestHints, RequestState, ScheduledChunk

__all__ = ["BatchedRequest", "PreemptibleRequest", "PreemptionPolicy", "SchedulableRequest", "SchedulingPolicy"]


class SchedulableRequest(QueuedRequest, Protocol):
    """What waits: a request, as a scheduling policy reads it: the scheduler's own class."""

    @property
    def rid(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def arrival(self) -> int:
        """Number of its submission: unique, ascending, kept when the request is preempted."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt, then the generated tokens; u32."""
        ...

    @property
    def num_output_tokens_left(self) -> int:
        """Tokens that may still be generated."""
        ...

    @property
    def hints(self) -> RequestHints:
        """What the client says about the order."""
        ...


class BatchedRequest(SchedulableRequest, Protocol):
    """What is batched: a request in flight, as queues, batcher and preemption policies read and write it.

    ``scheduling.request.Request`` describes the members.
    """

    arrival: int
    state: RequestState
    finish_reason: FinishReason | None
    prefill_end: int
    num_retractions: int

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def num_cached_pages(self) -> int: ...

    @property
    def node(self) -> object: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_uncomputed_tokens(self) -> int: ...

    @property
    def num_prefill_tokens_left(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


R = TypeVar("R", bound=SchedulableRequest)


class SchedulingPolicy(Protocol[R]):
    """The order of the waiting requests. The batcher calls it.

    The docstring of a policy states how long a request may wait, in steps, or shows by which arrivals it starves.

    A class whose ``on_scheduled`` does nothing may say ``reads_batches: ClassVar[bool] = False``. Then a simulation
    skips decode steps. Without it, a policy reads batches.
    """

    def add(self, request: R, step: int) -> None:
        """Handle a request that begins to wait in this step: a new one, or a preempted one with its old ``arrival``."""
        ...

    def discard(self, request: R) -> None:
        """Handle a request that waits no longer: it was admitted or aborted. No effect if it is unknown."""
        ...

    def order(self, step: int) -> Iterator[R]:
        """Iterate over all waiting requests, best first, each once.

        The batcher stops when nothing more fits, so an order that is made lazily costs what was read. While it
        iterates, the batcher may discard the request just yielded, and calls nothing else.
        """
        ...

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        """Handle what the batch of this step computes, for shares of tenants. Called once per batch with chunks."""
        ...


class PreemptibleRequest(Protocol):
    """A running request, as a preemption policy reads it. ``scheduling.request.Request`` describes the members."""

    @property
    def arrival(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_output_tokens_left(self) -> int: ...

    @property
    def hints(self) -> RequestHints: ...


P = TypeVar("P", bound=PreemptibleRequest)


class PreemptionPolicy(Protocol[P]):
    """Which running request gives up its pages when the pool is full. The batcher calls it."""

    def select_victim(self, candidates: Sequence[P]) -> P:
        """Return the request to preempt.

        Args:
            candidates: at least one, in order of arrival. The batcher leaves out the earliest arrival of the running
                requests, so that one always finishes and no two requests preempt each other for ever.
        """
        ...
