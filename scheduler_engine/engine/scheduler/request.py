"""EngineRequest: the state of one request in the engine's scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from zlib import crc32

from scheduler_components import ConfigError
from scheduler_components.cache import RadixNode
from scheduler_components.metrics import RequestTimeStats
from scheduler_components.scheduling import request as scheduling
from scheduler_components.values import (
    GrammarKey,
    RequestHints,
    RequestTimeouts,
    TokenOutput,
    TraceParent,
)
from scheduler_components.waiting.held_request import RequestGrammar
from scheduler_engine.device.sampling import MAX_TOKEN_ID, SamplingLimits, SamplingParams, TokenLogprobs

_GREEDY = SamplingParams()
_NO_HINTS = RequestHints()
_NO_TIMEOUTS = RequestTimeouts()


class EngineRequest(scheduling.Request[RadixNode]):
    """A request of the engine: the kit's, with what its device and its clients need.

    Attributes:
        token_ids: u32; the prompt, then the generated tokens.
        text_hash: CRC-32 of the prompt, and above temperature 0 of seed (or ``rid``) and temperature. A simulated
            device makes the text from it.
        limits: when to stop.
        sampling: how tokens are chosen.
        logprobs: one entry per generated token if ``sampling`` requests them, else None.
        grammar: which tokens may follow; None if every token may, and until the grammar is compiled.
        stream_interval: tokens between two deltas to the client; 0 for one delta at the end.
        times: time stamps for latencies; no decision depends on them.
        trace: the client's trace, which its span belongs to; no decision depends on it.
        problem: why it ended early, for the client; the text may differ between ranks.

    Raises:
        ConfigError: no input tokens, a token id that is not u32, or an id that is empty or not valid text.
    """

    __slots__ = (
        "text_hash",
        "sampling",
        "grammar",
        "logprobs",
        "stream_interval",
        "times",
        "trace",
        "problem",
    )

    token_ids: array[int]
    limits: SamplingLimits

    def __init__(
        self,
        rid: str,
        input_ids: Iterable[int],
        limits: SamplingLimits | None = None,
        *,
        sampling: SamplingParams = _GREEDY,
        hints: RequestHints = _NO_HINTS,
        timeouts: RequestTimeouts = _NO_TIMEOUTS,
        stream_interval: int = 1,
    ) -> None:
        limits = limits if limits is not None else SamplingLimits()
        super().__init__(_checked_rid(rid), _as_token_array(input_ids), limits, hints=hints, timeouts=timeouts)
        self.text_hash = _text_hash(rid, self.token_ids, sampling)
        self.sampling = sampling
        self.grammar: RequestGrammar | None = None
        self.logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self.stream_interval = stream_interval
        self.times: RequestTimeStats | None = None
        self.trace: TraceParent | None = None
        self.problem = ""

    @property
    def grammar_key(self) -> GrammarKey | None:
        """The grammar that the output must match; None for any text."""
        return self.sampling.grammar_key

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self.token_ids[: self.num_prompt_tokens])

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The tokens generated so far. A retraction keeps them."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    def append_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Append the logprobs of the next token, if the request wants logprobs."""
        if self.logprobs is not None and len(self.logprobs) == self.num_output_tokens:
            self.logprobs.append(logprobs)

    def output_since(self, start: int) -> TokenOutput:
        """Return the output from token ``start`` on, with the counts of the request."""
        logprobs = None if self.logprobs is None else self.logprobs[start : self.num_output_tokens]
        return TokenOutput(
            token_ids=tuple(self.token_ids[self.num_prompt_tokens + start :]),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_prompt_tokens,
            cached=self.cached_prompt,
            num_retractions=self.num_retractions,
            logprobs=None if logprobs is None else tuple(each.logprob for each in logprobs),
            top_logprobs=None if logprobs is None else tuple(each.top for each in logprobs),
            problem=self.problem,
        )


def _checked_rid(rid: str) -> str:
    try:
        rid.encode()
    except UnicodeEncodeError:
        raise ConfigError("rid", rid, "is not valid text", "give an id without lone surrogates") from None
    if not rid:
        raise ConfigError("rid", rid, "is empty", "give each request an id of its own")
    return rid


def _text_hash(rid: str, prompt: array[int], sampling: SamplingParams) -> int:
    if sampling.is_greedy:
        return crc32(prompt)
    seed = rid if sampling.seed is None else sampling.seed
    return crc32(f"/{seed}/{sampling.temperature}".encode(), crc32(prompt))


def _as_token_array(input_ids: Iterable[int]) -> array[int]:
    # array() would interpret bytes as raw memory instead of as a sequence of ids.
    ids = list(input_ids) if isinstance(input_ids, bytes | bytearray | memoryview) else input_ids
    try:
        tokens = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ConfigError(
            "input_ids",
            type(input_ids).__name__,
            f"has an item that is not a token id ({error})",
            f"give 0 to {MAX_TOKEN_ID}",
        ) from None
    if not tokens:
        raise ConfigError("input_ids", "0 tokens", "is empty", "give at least one token")
    return tokens
