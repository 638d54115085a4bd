"""Request: the state of one request in the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from zlib import crc32

from scheduler_components import ConfigError
from scheduler_components.cache import RadixNode
from scheduler_components.metrics import RequestTimeStats
from scheduler_components.values import (
    CachedTokens,
    FinishReason,
    GrammarKey,
    RequestHints,
    RequestState,
    RequestTimeouts,
    TokenOutput,
    TraceParent,
)
from scheduler_components.waiting.held_request import RequestGrammar
from scheduler_engine.device.sampling import MAX_TOKEN_ID, SamplingLimits, SamplingParams, TokenLogprobs

__all__ = [
    "Request",
    "RequestState",
]

_GREEDY = SamplingParams()
_NO_HINTS = RequestHints()
_NO_TIMEOUTS = RequestTimeouts()


class Request:
    """A request with its tokens and pages. Only the scheduler to which it was submitted changes it.

    KV is computed one position behind the tokens. The last token of ``token_ids`` has no KV until the device has
    computed it, which also produces the next token. One rule therefore holds for every running request: compute
    positions ``num_computed_tokens`` to ``len(token_ids)``. These are many in prefill and one in decode.

    Attributes:
        rid: request id, unique among the requests in flight.
        token_ids: u32; the prompt, then the generated tokens.
        num_prompt_tokens: length of the prompt.
        text_hash: CRC-32 of the prompt, and above temperature 0 of seed (or ``rid``) and temperature. A simulated
            device makes the text from it.
        limits: when to stop.
        sampling: how tokens are chosen.
        logprobs: one entry per generated token if ``sampling`` requests them, else None.
        grammar: which tokens may follow; None if every token may, and until the grammar is compiled.
        hints: what the client says about the order.
        timeouts: how long it may wait and take.
        session_id: the session that it is a turn of, which ``Scheduler.submit`` writes; None for none.
        lora_id: number of its adapter, which ``LoraQueue`` writes; None for the base model.
        stream_interval: tokens between two deltas to the client; 0 for one delta at the end.
        arrival: number assigned at submission, which defines the order of requests.
        state, finish_reason: the reason is None until the state is FINISHED.
        pages: KV pages of positions 0 to ``num_computed_tokens`` and of the positions that this step computes. The
            first ``num_cached_pages`` belong to the radix tree and are locked through ``node``.
        num_computed_tokens: positions whose KV is in ``pages``.
        prefill_end: ``len(token_ids)`` at the last admission; computing positions below it is prefill.
        num_cached_tokens: number of ``token_ids`` that the cache covered at the last match.
        num_cached_prompt_tokens: the same at the first admission, as reported to the client.
        cached_prompt: the same, by tier.
        num_retractions: how often the request lost its pages to other requests.
        is_sampled: the allocation log records its pages; no decision depends on it.
        times: time stamps for latencies; no decision depends on them.
        trace: the client's trace, which its span belongs to; no decision depends on it.
        problem: why it ended early, for the client; the text may differ between ranks.

    Raises:
        ConfigError: no input tokens, a token id that is not u32, or an id that is empty or not valid text.
    """

    __slots__ = (
        "rid",
        "token_ids",
        "num_prompt_tokens",
        "text_hash",
        "limits",
        "sampling",
        "grammar",
        "logprobs",
        "hints",
        "timeouts",
        "session_id",
        "lora_id",
        "stream_interval",
        "arrival",
        "state",
        "finish_reason",
        "pages",
        "num_cached_pages",
        "node",
        "num_computed_tokens",
        "prefill_end",
        "num_cached_tokens",
        "num_cached_prompt_tokens",
        "cached_prompt",
        "num_retractions",
        "is_sampled",
        "times",
        "trace",
        "problem",
    )

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
        self.rid = _checked_rid(rid)
        self.token_ids = _as_token_array(input_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.text_hash = _text_hash(rid, self.token_ids, sampling)
        self.limits = limits if limits is not None else SamplingLimits()
        self.sampling = sampling
        self.grammar: RequestGrammar | None = None
        self.logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self.hints = hints
        self.timeouts = timeouts
        self.session_id: str | None = None
        self.lora_id: int | None = None
        self.stream_interval = stream_interval
        self.arrival = -1
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.pages: list[int] = []
        self.num_cached_pages = 0
        self.node: RadixNode | None = None
        self.num_computed_tokens = 0
        self.prefill_end = 0
        self.num_cached_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.cached_prompt = CachedTokens()
        self.num_retractions = 0
        self.is_sampled = False
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

    def record_cached_prompt(self, cached: CachedTokens) -> None:
        """Keep on which tiers its cached tokens were found."""
        self.cached_prompt = cached
        self.num_cached_prompt_tokens = self.num_cached_tokens

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

    @property
    def num_input_tokens(self) -> int:
        """Number of tokens to prefill if none is cached: the prompt and the tokens generated before a retraction."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_output_tokens_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.limits.max_new_tokens - self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of positions to compute before the next token is known."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        """Number of prefill positions still to compute; 0 in decode and while waiting."""
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
