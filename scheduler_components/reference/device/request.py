"""One request: its tokens, its limits, and the KV pages it holds while it runs."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable

import msgspec

from scheduler_components import ConfigError, FinishReason, TokenOutput
from scheduler_components.cache import RadixNode
from scheduler_components.metrics import RequestTimeStats

__all__ = [
    "Request",
    "RequestState",
    "SamplingLimits",
    "ScheduledBatch",
    "ScheduledWork",
    "StepResult",
]

MAX_TOKEN_ID = 2**32 - 1
"""Token ids are u32 on the wire of KV events."""


class RequestState(enum.Enum):
    """Where a request stands. A retraction leads from RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SamplingLimits(msgspec.Struct, frozen=True, gc=False):
    """When a request ends.

    Attributes:
        max_new_tokens: tokens to generate at most, 1 or more.
        stop_token_ids: any of them, once generated, ends the request; it is part of the output.
        ignore_eos: the model's own end-of-sequence token does not end the request (``stop_token_ids`` still do).

    Raises:
        ConfigError: ``max_new_tokens`` below 1.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", self.max_new_tokens, "asks for nothing", "give 1 or more")


class Request:
    """A request and what it holds. Only the scheduler that it was submitted to changes it.

    KV is computed one position behind the tokens: the last token of ``token_ids`` has no KV until it has gone
    through the device, and that pass gives the token after it. So every running request is in the same plight,
    "compute positions ``num_computed_tokens`` to ``len(token_ids)``": many of them in prefill, one in decode.

    Attributes:
        rid: unique among the requests in flight.
        token_ids: u32; the prompt, then what was generated.
        num_prompt_tokens: where the prompt ends in ``token_ids``.
        limits: when to stop.
        stream_interval: tokens between two messages to the client; 0 for all at the end.
        arrival: number given by the scheduler at submission; every order between requests comes from it.
        state, finish_reason: the reason is None until the state is FINISHED.
        pages: KV pages of positions 0 to ``num_computed_tokens`` and of what this step computes; the first
            ``num_shared_pages`` belong to the cache's tree and are locked through ``node``, the others are ours.
        num_computed_tokens: positions whose KV stands in ``pages``.
        prefill_end: ``len(token_ids)`` when the request was last admitted: computing up to here is prefill.
        num_cached_tokens: of ``token_ids``, how many the cache covered when last asked.
        num_cached_prompt_tokens: the same at the first admission: what the client is told.
        num_retractions: how often the request lost its pages to others.
        times: kept by the scheduler from submission on; no decision looks at them.

    Raises:
        ConfigError: no input tokens, a token id that is not u32, or an id that is empty or no valid text.
    """

    __slots__ = (
        "rid",
        "token_ids",
        "num_prompt_tokens",
        "limits",
        "stream_interval",
        "arrival",
        "state",
        "finish_reason",
        "pages",
        "num_shared_pages",
        "node",
        "num_computed_tokens",
        "prefill_end",
        "num_cached_tokens",
        "num_cached_prompt_tokens",
        "num_retractions",
        "times",
    )

    def __init__(
        self, rid: str, input_ids: Iterable[int], limits: SamplingLimits | None = None, *, stream_interval: int = 1
    ) -> None:
        self.rid = _checked_rid(rid)
        self.token_ids = _as_token_array(input_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.limits = limits if limits is not None else SamplingLimits()
        self.stream_interval = stream_interval
        self.arrival = -1
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.pages: list[int] = []
        self.num_shared_pages = 0
        self.node: RadixNode | None = None
        self.num_computed_tokens = 0
        self.prefill_end = 0
        self.num_cached_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_retractions = 0
        self.times: RequestTimeStats | None = None

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self.token_ids[: self.num_prompt_tokens])

    @property
    def output_ids(self) -> tuple[int, ...]:
        """What was generated so far; a retraction keeps it."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    def output_since(self, start: int) -> TokenOutput:
        """Return the output from its token ``start`` on, and the counts that go with it."""
        return TokenOutput(
            token_ids=tuple(self.token_ids[self.num_prompt_tokens + start :]),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_prompt_tokens,
            num_retractions=self.num_retractions,
        )

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill when nothing is cached: prompt plus what was generated before a retraction."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_output_tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self.limits.max_new_tokens - self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Positions that must go through the device before the next token is known."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        """The part of a prefill that is still to compute; 0 in decode and while waiting."""
        return max(0, self.prefill_end - self.num_computed_tokens)

    def __repr__(self) -> str:
        return (
            f"<Request {self.rid!r} {self.state.value} prompt={self.num_prompt_tokens} "
            f"output={self.num_output_tokens}/{self.limits.max_new_tokens} computed={self.num_computed_tokens} "
            f"pages={len(self.pages)} retractions={self.num_retractions}>"
        )


def _checked_rid(rid: str) -> str:
    try:
        rid.encode()
    except UnicodeEncodeError:
        raise ConfigError("rid", rid, "is no valid text", "give an id without lone surrogates") from None
    if not rid:
        raise ConfigError("rid", rid, "is empty", "give each request an id of its own")
    return rid


def _as_token_array(input_ids: Iterable[int]) -> array[int]:
    # array() would take bytes as raw memory instead of as a sequence of ids.
    ids = list(input_ids) if isinstance(input_ids, bytes | bytearray | memoryview) else input_ids
    try:
        tokens = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ConfigError(
            "input_ids", type(input_ids).__name__, f"holds what is no token id ({error})", f"give 0 to {MAX_TOKEN_ID}"
        ) from None
    if not tokens:
        raise ConfigError("input_ids", "0 tokens", "is empty", "give at least one token")
    return tokens


# Values that pass between the scheduler, its device and its callers in one step.


class ScheduledWork(msgspec.Struct, frozen=True):
    """Positions ``start`` to ``end`` of one request, to go through the device in this step.

    Attributes:
        request: whose tokens they are; ``request.pages`` covers ``end`` positions.
        start, end: half-open range of positions in ``request.token_ids``.
        is_prefill: False for the one new position of a decode.
    """

    request: Request
    start: int
    end: int
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class ScheduledBatch(msgspec.Struct, frozen=True):
    """What one forward pass computes: decodes and prefill chunks, mixed, in order of arrival.

    Attributes:
        works: at most one entry a request.
        num_prefill_tokens, num_decode_tokens: positions computed, by kind.
        num_context_tokens: positions whose KV is read: the sum of all ``end``.
        num_admitted, num_retracted: requests that began and lost their residence while the batch was made.
    """

    works: tuple[ScheduledWork, ...] = ()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    num_admitted: int = 0
    num_retracted: int = 0


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What one ``Scheduler.step`` did.

    Attributes:
        step: number of the step, from 1.
        num_news: requests that got tokens or ended; the tokens themselves go to the scheduler's output sink.
        num_prefill_tokens, num_decode_tokens: positions computed, by kind.
        num_admitted, num_retracted: requests that began and lost their residence.
        digest: ``Scheduler.state_digest`` after the step.
    """

    step: int
    num_news: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_admitted: int
    num_retracted: int
    digest: int
