"""Batches: what a device computes in one step, what a client asks of the order, and why a request was not admitted."""

from __future__ import annotations

import enum
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

__all__ = ["BatchShape", "RefusalReason", "RequestHints", "RequestState", "ScheduledBatch", "ScheduledChunk"]

Request_co = TypeVar("Request_co", covariant=True)
"""The scheduler's own request class."""


class RequestState(enum.Enum):
    """The state of a request. A preemption changes RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


RefusalReason: TypeAlias = Literal["tokens", "slots", "pages", "watermark", "tenant", "not_ready"]
"""Why a step did not admit a request. Nothing is left of the step's prefill tokens; no request slot is free; the pool
lacks the pages that the request may need; it has them, but fewer than the watermark would stay free; the request's
tenant has as many running requests as it may have; its pages are still being fetched."""


class RequestHints(msgspec.Struct, frozen=True, gc=False):
    """What a client says about the order of its request. A scheduling policy decides which of these it reads.

    Check what clients send before ``Batcher.add``: a policy that refuses a hint is replaced for all requests.

    Attributes:
        priority: a larger one runs first, as in SGLang. vLLM's order is the opposite.
        tenant: on whose behalf the request runs, for fair shares and caps: the name of an API key, or the ``user`` of
            an OpenAI request. Empty for a client without a name.
        deadline_s: when the client wants its first token, in seconds since the epoch. It is a number that came with the
            request and is compared with other deadlines only, never with a clock. None for no deadline.
        lora: name of the adapter that the request needs; None for the base model.
    """

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    lora: str | None = None


class ScheduledChunk(msgspec.Struct, Generic[Request_co], frozen=True):
    """Positions ``start`` to ``end`` of one request, which the device computes in this step.

    Attributes:
        request: the request; ``request.pages`` covers ``end`` positions.
        start, end: half-open range of positions in ``request.token_ids``.
        is_prefill: False for the one new position of a decode.
    """

    request: Request_co
    start: int
    end: int
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class BatchShape(msgspec.Struct, frozen=True, gc=False):
    """What a replica computes in one step. All zero is an idle batch, with which a replica only takes part.

    Attributes:
        num_prefill_tokens, num_decode_tokens: computed positions, by kind.
        num_context_tokens: positions whose KV is read.
        can_run_graph: whether the batch fits a captured graph. An idle batch always does.
    """

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    can_run_graph: bool = True

    @property
    def num_tokens(self) -> int:
        """Computed positions."""
        return self.num_prefill_tokens + self.num_decode_tokens


class ScheduledBatch(msgspec.Struct, Generic[Request_co], frozen=True):
    """The decodes and prefill chunks of one forward pass, in the order in which they were scheduled.

    Attributes:
        chunks: at most one entry per request.
        num_prefill_tokens, num_decode_tokens: computed positions, by kind.
        num_context_tokens: positions whose KV is read, the sum of all ``end``.
        num_admitted, num_retracted: requests that got and lost their pages while the batch was built.
        replicas: under DP attention, the shapes of all replicas' batches, including this one; otherwise empty.
    """

    chunks: tuple[ScheduledChunk[Request_co], ...] = ()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    num_admitted: int = 0
    num_retracted: int = 0
    replicas: tuple[BatchShape, ...] = ()

    @property
    def has_work(self) -> bool:
        """Whether the device runs this step, because this or another replica computes something."""
        return bool(self.chunks) or any(shape.num_tokens for shape in self.replicas)
