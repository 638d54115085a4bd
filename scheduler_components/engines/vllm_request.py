"""VllmRequest: a request of vLLM, as the kit's components read it.

vLLM keeps the tokens, the limits and the status. The kit's part is the order of arrival, what the client says about the
order, and, inside ``ComponentScheduler``, the pages. vLLM is imported for its types only.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, ClassVar

from scheduler_components.cache import TableMatch
from scheduler_components.scheduling.request import SchedulingState
from scheduler_components.values import CachedTokens, RequestHints, RequestTimeouts

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["VllmRequest", "VllmRequests", "hints_of"]

_log = logging.getLogger("vllm.scheduler_components")

_MAX_TENANT_CHARACTERS = 128
"""As in the reference engine: policies remember the names of tenants."""


def hints_of(request: Request) -> RequestHints:
    """Return what the client says about the order.

    vLLM serves a smaller priority first, the kit a larger one, so the sign changes. ``tenant`` and ``deadline_s`` come
    from ``extra_args``, which a client of the server sets as ``vllm_xargs``. An invalid deadline is logged and left
    out, because it must not cost the other requests their order.
    """
    extra = (request.sampling_params and request.sampling_params.extra_args) or {}
    deadline_s = extra.get("deadline_s")
    if deadline_s is not None and not (type(deadline_s) in (int, float) and abs(deadline_s) < inf):
        _log.warning(
            "request %s: deadline_s=%.64r is not a number of seconds, so it has none", request.request_id, deadline_s
        )
        deadline_s = None
    lora = request.lora_request
    return RequestHints(
        priority=-request.priority,
        tenant=str(extra.get("tenant", ""))[:_MAX_TENANT_CHARACTERS],
        deadline_s=deadline_s,
        lora=None if lora is None else lora.lora_name,
    )


class VllmRequest(SchedulingState[TableMatch]):
    """A request of vLLM with the members of the kit's ``Request``. vLLM keeps the tokens, the limits and the status.

    Attributes:
        theirs: vLLM's request.
        arrival: number of its submission; a preemption does not change it.
        max_model_len: tokens at which vLLM ends it, whatever it asked for.
        hints: what the client says about the order.
        lora_id, session_id, timeouts: none.
        num_sent_pages: pages that vLLM's worker has in its own block table; 0 while the request has no pages.
        is_known: the worker has the request's prompt.
    """

    lora_id: ClassVar[None] = None
    session_id: ClassVar[None] = None
    timeouts: ClassVar[RequestTimeouts] = RequestTimeouts()

    __slots__ = ("_tokens", "hints", "is_known", "max_model_len", "num_sent_pages", "theirs")

    def __init__(self, theirs: Request, arrival: int, max_model_len: int) -> None:
        super().__init__()
        self.theirs = theirs
        self.arrival = arrival
        self.max_model_len = max_model_len
        self.hints = hints_of(theirs)
        self.num_sent_pages = 0
        self.is_known = False
        self._tokens = array("I")

    @property
    def rid(self) -> str:
        rid: str = self.theirs.request_id
        return rid

    @property
    def token_ids(self) -> array[int]:
        """The prompt, then the generated tokens: a copy that grows, because a cache packs an array without a loop."""
        tokens, theirs = self._tokens, self.theirs._all_token_ids
        if len(tokens) != len(theirs):
            tokens.extend(theirs[len(tokens) :])
        return tokens

    def reread_tokens(self) -> None:
        """Copy the tokens again, because vLLM may have replaced some: the next input of a streaming session."""
        self._tokens = array("I")

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill if none is cached."""
        num_tokens: int = self.theirs.num_tokens
        return num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        num_tokens: int = self.theirs.num_prompt_tokens
        return num_tokens

    @property
    def num_output_tokens(self) -> int:
        num_tokens: int = self.theirs.num_output_tokens
        return num_tokens

    @property
    def num_output_tokens_left(self) -> int:
        theirs = self.theirs
        num_left: int = min(theirs.max_tokens - theirs.num_output_tokens, self.max_model_len - theirs.num_tokens)
        return num_left

    @property
    def num_uncomputed_tokens(self) -> int:
        """Positions to compute before the next token is known."""
        num_tokens: int = self.theirs.num_tokens
        return num_tokens - self.num_computed_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        return max(0, self.prefill_end - self.num_computed_tokens)

    def record_cached_prompt(self, cached: CachedTokens) -> None:
        """Do nothing: vLLM reports the cached tokens of the device only."""

    def __repr__(self) -> str:
        return f"<VllmRequest {self.rid!r} {self.state.value} arrival={self.arrival}>"


@dataclass(slots=True)
class VllmRequests:
    """The requests of one scheduler that have not finished, numbered in the order in which they are first seen."""

    max_model_len: int
    _by_id: dict[str, VllmRequest] = field(default_factory=dict)
    _num_arrivals: int = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, theirs: Request) -> VllmRequest:
        """Return the kit's view of a request, always the same one."""
        request = self._by_id.get(theirs.request_id)
        if request is None or request.theirs is not theirs:
            request = self._by_id[theirs.request_id] = VllmRequest(theirs, self._num_arrivals, self.max_model_len)
            self._num_arrivals += 1
        return request

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget the finished ones of these requests. A new request may have the id of a finished one."""
        for rid in request_ids:
            request = self._by_id.get(rid)
            if request is not None and request.theirs.is_finished():
                del self._by_id[rid]
