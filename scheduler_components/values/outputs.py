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
    "OutputStats",
]


class FinishReason(enum.StrEnum):
    """Why a request ended. The first three are the values of SGLang's ``meta_info``, the last is vLLM's."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request and what belongs to them.

    Attributes:
        token_ids: the tokens, in order.
        num_prompt_tokens: of the whole request.
        num_cached_tokens: prompt tokens that the prefix cache covered at the first admission.
        num_retractions: how often the request lost its pages.
        cached: the cached ones by the tier on which they were found.
        logprobs: one per token, where the request asked for them.
        top_logprobs: per token, the most probable ones there and their logprobs, where the request asked for them.
        hidden_states: one vector per token, as the model gave it; type and width are the model's.
    """

    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    cached: CachedTokens = CachedTokens()
    logprobs: tuple[float, ...] | None = None
    hidden_states: tuple[bytes, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """News of one request.

    Attributes:
        rid: whose news it is.
        start: place of the first new token in the request's output. A receiver that has more already has read this
            before; ``start`` never lies beyond what was sent.
        num_output_tokens: the request's output so far. More than ``start`` and the new tokens together only where
            tokens had to be dropped, and then the request ends here.
        finish_reason: None while the request goes on.
        output: the new tokens.
    """

    rid: str
    start: int
    num_output_tokens: int
    finish_reason: str | None
    output: TokenOutput


class OutputBatch(msgspec.Struct, frozen=True, gc=False):
    """The news of one step, of all requests that have some.

    Attributes:
        sequence: number of the message, contiguous from 0.
        deltas: at most one per request.
    """

    sequence: int
    deltas: tuple[OutputDelta, ...]


class OutputStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of one streamer since it was made.

    Attributes:
        batches_sent, deltas_sent, tokens_sent: taken by the receiver.
        steps_delayed: steps whose news had to wait, because the receiver was behind.
        requests_waiting: requests in flight with news that wait, now.
        ends_held, bytes_held: requests that are over and whose last news wait, now, and what these take.
        ends_dropped: requests whose end was never told: more were over than may be held.
        tokens_dropped: tokens never told, with their request's end or without.
    """

    batches_sent: int = 0
    deltas_sent: int = 0
    tokens_sent: int = 0
    steps_delayed: int = 0
    requests_waiting: int = 0
    ends_held: int = 0
    bytes_held: int = 0
    ends_dropped: int = 0
    tokens_dropped: int = 0
