"""HeldRequest: a request that waits for something other than pages, and the grammar that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_components.ports import CompiledGrammar, GrammarMatcher
from scheduler_components.values import GrammarKey, RequestHints

__all__ = ["HeldRequest", "RequestGrammar"]


class RequestGrammar:
    """Computes which tokens may follow the output of a request.

    The state follows from the output tokens alone. It advances by the tokens that are new since the last call, so a
    token that the scheduler discards never enters it. If the output is shorter than before, the state is computed again
    from its first token. A retraction keeps the tokens of a request, and the prefix cache knows no grammar, so neither
    changes the output.

    Args:
        compiled: the grammar.
        num_prompt_tokens: tokens before the output.
    """

    __slots__ = ("_compiled", "_matcher", "_num_accepted", "_num_prompt_tokens")

    def __init__(self, compiled: CompiledGrammar, *, num_prompt_tokens: int) -> None:
        self._compiled = compiled
        self._num_prompt_tokens = num_prompt_tokens
        self._matcher: GrammarMatcher | None = None
        self._num_accepted = 0

    def next_bitmask(self, token_ids: Sequence[int]) -> bytes:
        """Return which tokens may follow ``token_ids``, the prompt and the output: one bit per token, lowest first.

        Raises:
            GrammarError: the output does not match the grammar, or the grammar is too complex to continue.
        """
        start = self._num_prompt_tokens + self._num_accepted
        matcher = self._matcher
        if matcher is None or start > len(token_ids):
            matcher, self._num_accepted, start = self._compiled.new_matcher(), 0, self._num_prompt_tokens
            self._matcher = matcher
        for token_id in token_ids[start:]:
            matcher.accept_token(token_id)
            self._num_accepted += 1
        return matcher.next_bitmask()

    def __repr__(self) -> str:
        return f"<RequestGrammar: {self._num_accepted} tokens accepted>"


class HeldRequest(Protocol):
    """A request that waits for something other than pages, as the rooms read and write it: the scheduler's own class.

    Attributes:
        grammar: written by ``GrammarQueue`` when this rank has compiled it, and None until then.
        lora_id: written by ``LoraQueue.enter``: the number of its adapter; None for the base model.
    """

    grammar: RequestGrammar | None
    lora_id: int | None

    @property
    def rid(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def grammar_key(self) -> GrammarKey | None:
        """The grammar that the output must match; None for any text."""
        ...

    @property
    def hints(self) -> RequestHints:
        """``hints.lora`` names the adapter."""
        ...
