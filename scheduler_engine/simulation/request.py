"""SimulatedRequest: the state of one request, whose tokens are made when they are read."""

from __future__ import annotations

from array import array
from typing import ClassVar
from zlib import crc32

from scheduler_components.cache import RadixNode
from scheduler_components.scheduling.request import OutputLength, SchedulingState
from scheduler_components.values import (
    CachedTokens,
    RequestHints,
    RequestTimeouts,
    TokenOutput,
)
from scheduler_engine.simulation.trace import TraceRequest, prompt_tokens

_NOT_CACHED = CachedTokens()


class SimulatedRequest(SchedulingState[RadixNode]):
    """A request of a trace, with the members of the kit's ``Request``. It is a class of its own because of its memory:
    a trace has millions of requests, and most of them have no tokens at a time.

    Attributes:
        recorded: lengths and hash ids.
        rid: unique in the simulation.
        limits: the recorded length of the output.
        hints: what the client says about the order; by default what the trace says.
        stream_interval: 0, because no client reads the tokens while the request runs.
        lora_id, session_id, timeouts: none.
        ticket: of the router's dispatch ledger, with the ledger's name; None for a router without one.
        has_lost_replica: True if it lost its pages last by the failure of its replica, and not by a preemption.
        num_cached_prompt_tokens: tokens that were cached at its first admission.
        num_prefilled_tokens: end of the longest prefill so far, on any replica.
        cached_prompt: the tiers on which they were found.
        arrived_ns, admitted_ns, first_token_ns, finished_ns: virtual times; -1 before.
    """

    lora_id: ClassVar[None] = None
    session_id: ClassVar[None] = None
    timeouts: ClassVar[RequestTimeouts] = RequestTimeouts()

    __slots__ = (
        "_num_tokens",
        "_text_hash",
        "_tokens",
        "admitted_ns",
        "arrived_ns",
        "cached_prompt",
        "finished_ns",
        "has_lost_replica",
        "first_token_ns",
        "hints",
        "limits",
        "num_cached_prompt_tokens",
        "num_prefilled_tokens",
        "num_prompt_tokens",
        "recorded",
        "rid",
        "stream_interval",
        "ticket",
    )

    def __init__(self, recorded: TraceRequest, *, rid: str = "", hints: RequestHints | None = None) -> None:
        self.recorded = recorded
        self.rid = rid or f"r{recorded.index}"
        self.num_prompt_tokens = recorded.input_length
        self.limits = OutputLength(recorded.output_length)
        self.hints = recorded.hints if hints is None else hints
        self.stream_interval = 0
        self.has_lost_replica = False
        self.num_cached_prompt_tokens = -1
        self.num_prefilled_tokens = 0
        self.cached_prompt = _NOT_CACHED
        self.arrived_ns = self.admitted_ns = self.first_token_ns = self.finished_ns = -1
        self._tokens: array[int] | None = None
        self._text_hash: int | None = None
        self._num_tokens = 0
        super().__init__()

    @property
    def conversation(self) -> str | None:
        """The session of the request."""
        return self.recorded.conversation

    def reset(self) -> None:
        """Forget the replica and its pages. The tokens stay: another replica continues with them."""
        super().reset()
        self.ticket: tuple[str, int] | None = None

    @property
    def token_ids(self) -> array[int]:
        """The prompt, then the generated tokens; u32. Made at the first read."""
        tokens = self._tokens
        if tokens is None:
            tokens = self._tokens = array("I")
            tokens.frombytes(prompt_tokens(self.recorded))
        return tokens

    @property
    def text_hash(self) -> int:
        """CRC-32 of the prompt, from which ``SimulatedModel`` makes the text."""
        if self._text_hash is None:
            self._text_hash = crc32(prompt_tokens(self.recorded))
        return self._text_hash

    def record_cached_prompt(self, cached: CachedTokens) -> None:
        """Keep on which tiers its cached tokens were found, unless another replica had admitted it before."""
        if self.admitted_ns < 0:
            self.cached_prompt = cached

    def drop_tokens(self) -> None:
        """Forget the tokens, because the request has ended. Their number stays."""
        self._num_tokens = self.num_input_tokens
        self._tokens = None

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill if none is cached: the prompt and what was generated before a retraction."""
        return (self._num_tokens or self.num_prompt_tokens) if self._tokens is None else len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.num_input_tokens - self.num_prompt_tokens

    @property
    def num_output_tokens_left(self) -> int:
        return self.limits.max_new_tokens - self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_input_tokens - self.num_computed_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        left = self.prefill_end - self.num_computed_tokens
        return left if left > 0 else 0

    def output_since(self, start: int) -> TokenOutput:
        """Return the counts of the output. No client reads its tokens."""
        return TokenOutput(num_prompt_tokens=self.num_prompt_tokens, num_retractions=self.num_retractions)

    def __repr__(self) -> str:
        return (
            f"<SimulatedRequest {self.rid!r} {self.state.value} prompt={self.num_prompt_tokens} "
            f"output={self.num_output_tokens}/{self.limits.max_new_tokens}>"
        )
