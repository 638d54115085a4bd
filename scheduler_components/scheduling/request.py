"""Request: the state of one request in a scheduler that is composed of this kit's parts."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Generic, TypeVar

import msgspec

from scheduler_components.batch_result_processor import StopConditions
from scheduler_components.cache import PrefixNamespace
from scheduler_components.values import CachedTokens, FinishReason, RequestHints, RequestState, RequestTimeouts

__all__ = ["OutputLength", "Request", "SchedulingState"]

Node = TypeVar("Node")

_NO_HINTS = RequestHints()
_NO_TIMEOUTS = RequestTimeouts()
_NOT_CACHED = CachedTokens()


class OutputLength(msgspec.Struct, frozen=True, gc=False):
    """The ``StopConditions`` of a request that ends after a number of tokens, whatever they are."""

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = True


class SchedulingState(Generic[Node]):
    """What queues, batcher and KV cache write into a request. Adapters for requests of an engine derive from it, too.

    Attributes:
        arrival: number assigned at submission, which defines the order of requests.
        state, finish_reason: the reason is None until the state is FINISHED.
        pages: KV pages of positions 0 to ``num_computed_tokens`` and of the positions that this step computes. The
            first ``num_cached_pages`` belong to the cache and are locked through ``node``.
        num_computed_tokens: positions whose KV is in ``pages``.
        prefill_end: number of its tokens at the last admission; computing positions below it is prefill.
        num_cached_tokens: number of its tokens that the cache covered at the last match.
        num_retractions: how often the request lost its pages to other requests.
        is_sampled: the allocation log records its pages; no decision depends on it.
    """

    __slots__ = (
        "arrival",
        "state",
        "finish_reason",
        "pages",
        "num_cached_pages",
        "node",
        "num_computed_tokens",
        "prefill_end",
        "num_cached_tokens",
        "num_retractions",
        "is_sampled",
    )

    def __init__(self) -> None:
        self.num_retractions = 0
        self.reset()

    def reset(self) -> None:
        """Become a request that no scheduler has seen, except for the number of retractions."""
        self.arrival = -1
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.pages: list[int] = []
        self.num_cached_pages = 0
        self.node: Node | None = None
        self.num_computed_tokens = 0
        self.prefill_end = 0
        self.num_cached_tokens = 0
        self.is_sampled = False


class Request(SchedulingState[Node]):
    """A request with its tokens and pages. Only the scheduler to which it was submitted changes it.

    It is what waits (``SchedulableRequest``), what is batched (``BatchedRequest``) and what is stored (``KvRequest``).
    A subclass adds what a model and its clients need.

    KV is computed one position behind the tokens. The last token of ``token_ids`` has no KV until the device has
    computed it, which also produces the next token. One rule therefore holds for every running request: compute
    positions ``num_computed_tokens`` to ``len(token_ids)``. These are many in prefill and one in decode.

    Attributes:
        rid: request id, unique among the requests in flight.
        token_ids: u32; the prompt, then the generated tokens.
        num_prompt_tokens: length of the prompt.
        limits: when to stop.
        hints: what the client says about the order.
        timeouts: how long it may wait and take.
        session_id: the session that it is a turn of; None for none.
        lora_id: number of its adapter, which ``LoraQueue`` writes; None for the base model.
        num_cached_prompt_tokens: ``num_cached_tokens`` at the first admission, as reported to the client.
        cached_prompt: the same, by tier.
    """

    __slots__ = (
        "rid",
        "token_ids",
        "num_prompt_tokens",
        "limits",
        "hints",
        "timeouts",
        "session_id",
        "lora_id",
        "num_cached_prompt_tokens",
        "cached_prompt",
    )

    def __init__(
        self,
        rid: str,
        token_ids: MutableSequence[int],
        limits: StopConditions,
        *,
        hints: RequestHints = _NO_HINTS,
        timeouts: RequestTimeouts = _NO_TIMEOUTS,
    ) -> None:
        super().__init__()
        self.rid = rid
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.limits = limits
        self.hints = hints
        self.timeouts = timeouts
        self.session_id: str | None = None
        self.lora_id: int | None = None
        self.num_cached_prompt_tokens = 0
        self.cached_prompt = _NOT_CACHED

    def namespace_in(self, base: PrefixNamespace) -> PrefixNamespace:
        """Return what identifies a prefix together with its tokens: KV of different adapters is never shared.

        Args:
            base: depends on the weights; its parts are kept.
        """
        if self.lora_id is None and self.session_id is None:
            return base
        return msgspec.structs.replace(
            base,
            lora_id=self.lora_id,
            lora_name=None if self.lora_id is None else self.hints.lora,
            session_id=self.session_id,
        )

    def record_cached_prompt(self, cached: CachedTokens) -> None:
        """Keep on which tiers its cached tokens were found."""
        self.cached_prompt = cached
        self.num_cached_prompt_tokens = self.num_cached_tokens

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
