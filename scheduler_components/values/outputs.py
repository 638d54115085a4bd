"""Outputs of requests as they leave a scheduler: token ids, which the receiver turns into text."""

from __future__ import annotations

import enum

import msgspec

from scheduler_components.values.tiers import CachedTokens

__all__ = [
    "FinishReason",
    "TokenOutput",
    "OutputDelta",
    "OutputBatch",
]


class FinishReason(enum.StrEnum):
    """Why a request ended. The first three are values of SGLang's ``meta_info``, the fourth is vLLM's.

    ``REFUSED``: what it needs besides pages cannot be prepared. ``QUEUE_TIMEOUT``: it waited too long to be admitted.
    ``TIMEOUT``: it took too long in total.
    """

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"
    QUEUE_TIMEOUT = "queue_timeout"
    TIMEOUT = "timeout"


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request, and the data that belongs to them.

    Attributes:
        token_ids: the tokens, in order.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens that the prefix cache covered at the first admission.
        num_retractions: times that the request lost its pages.
        cached: the cached prompt tokens, by tier.
        logprobs: one per token, if the request asked for them.
        top_logprobs: per token, the most probable tokens and their logprobs, if the request asked for them.
        hidden_states: one vector per token, in the model's type and width.
        problem: why the request ended early, as one sentence for its client; empty otherwise.
    """

    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    cached: CachedTokens = CachedTokens()
    logprobs: tuple[float, ...] | None = None
    hidden_states: tuple[bytes, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    problem: str = ""


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """New output of one request.

    Attributes:
        rid: id of the request.
        start: index of the first new token in the request's output. A receiver that already has more tokens has read
            this delta before. `start` never exceeds the number of sent tokens.
        num_output_tokens: length of the request's output. It exceeds `start` plus the new tokens only if tokens were
            dropped, and then the request ends here.
        finish_reason: None until the request ends.
        output: the new tokens.
    """

    rid: str
    start: int
    num_output_tokens: int
    finish_reason: str | None
    output: TokenOutput


class OutputBatch(msgspec.Struct, frozen=True, gc=False):
    """The new output of one step.

    Attributes:
        sequence: number of the message, contiguous from 0.
        deltas: at most one per request.
    """

    sequence: int
    deltas: tuple[OutputDelta, ...]
