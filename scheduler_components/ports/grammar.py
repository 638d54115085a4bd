"""Grammars that constrain the output of requests."""

from __future__ import annotations

from typing import Protocol

from scheduler_components.values import GrammarKey

__all__ = ["CompiledGrammar", "GrammarBackend", "GrammarMatcher"]


class GrammarMatcher(Protocol):
    """The state of a grammar after some tokens of one output. Used by one thread.

    All ranks of a replica must get the same masks from the same tokens, because each of them chooses the token itself.
    So no time limit may decide inside a matcher.
    """

    def next_bitmask(self) -> bytes:
        """Return which tokens may follow: bit ``i % 8`` of byte ``i // 8`` is 1 if token ``i`` may.

        Where the output may end, the model's end-of-sequence tokens may follow.

        Raises:
            GrammarError: the grammar is too complex to continue.
        """
        ...

    def accept_token(self, token_id: int) -> None:
        """Append a token to the output.

        Raises:
            GrammarError: the token may not follow.
        """
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar that many requests share."""

    def new_matcher(self) -> GrammarMatcher:
        """Return the state before the first token. Called by the scheduler's thread, so it must be fast."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for the tokenizer of one model. Thread-safe."""

    def compile(self, key: GrammarKey) -> CompiledGrammar:
        """Compile a grammar. This may take long and must end by itself; it should release the GIL.

        Raises:
            GrammarError: the source is not a grammar that this backend supports; the text says why, in one sentence.
        """
        ...
