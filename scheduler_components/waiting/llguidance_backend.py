"""LlguidanceBackend: compile grammars with the library llguidance, the extra ``grammar``.

llguidance computes a mask from the tokens and from limits that count work, not time, so all ranks get the same masks.
It releases the GIL while it compiles. SGLang and vLLM use it, too, next to xgrammar, which needs torch and triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_components._internal.extras import naming_extras
from scheduler_components.errors import ConfigError, GrammarError
from scheduler_components.values import GrammarKey

with naming_extras:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["LlguidanceBackend", "open_llguidance_backend"]

_WHITESPACE = r"[ \n\t]{1,32}"
"""Between the values of JSON: enough to indent eight levels, and bounded, because a small model may never stop."""

_MAX_PROBLEM_CHARACTERS = 300


@dataclass(slots=True, frozen=True)
class _Matcher:
    """The ``GrammarMatcher`` over a matcher of the library, which never raises but keeps its first error."""

    matcher: LLMatcher

    def next_bitmask(self) -> bytes:
        bitmask = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            raise GrammarError(f"the grammar allows no further token ({_problem_of(self.matcher)})")
        return bitmask

    def accept_token(self, token_id: int) -> None:
        if not self.matcher.consume_token(token_id):
            raise GrammarError(f"token {token_id} does not match the grammar ({_problem_of(self.matcher)})")


@dataclass(slots=True, frozen=True)
class _Grammar:
    """The ``CompiledGrammar`` over a matcher in its first state, which is never changed."""

    first: LLMatcher

    def new_matcher(self) -> _Matcher:
        return _Matcher(self.first.deep_copy())


@dataclass(slots=True, kw_only=True, frozen=True)
class LlguidanceBackend:
    """The ``GrammarBackend`` of one tokenizer. Made by ``open_llguidance_backend``.

    Attributes:
        tokenizer: the model's.
    """

    tokenizer: LLTokenizer

    def compile(self, key: GrammarKey) -> _Grammar:
        if key.kind == "json_schema":
            try:
                source = LLMatcher.grammar_from_json_schema(key.source, defaults={"whitespace_pattern": _WHITESPACE})
            except ValueError as error:
                raise GrammarError(_sentence(str(error))) from error
        else:
            source = LLMatcher.grammar_from_regex(key.source)
        first = LLMatcher(self.tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if first.is_error():
            raise GrammarError(_problem_of(first))
        first.compute_bitmask()  # the slowest mask, here on the compiler's thread; matchers start with what it cached
        if first.is_error():
            raise GrammarError(f"no output matches it ({_problem_of(first)})")
        return _Grammar(first)


def open_llguidance_backend(tokenizer: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LlguidanceBackend:
    """Read a tokenizer. This takes about a second for 50,000 tokens.

    Args:
        tokenizer: its JSON text, in the format of the library ``tokenizers``.
        vocab_size: number of the model's logits, at least that of the tokenizer's tokens.
        eos_token_ids: the tokens that end an output.

    Raises:
        ConfigError: the tokenizer cannot be used, or there is no token that ends an output.
    """
    if not eos_token_ids:
        hint = "give the token that ends an output"
        raise ConfigError("eos_token_ids", (), "is empty, so no output could end", hint)
    try:
        read = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        problem = f"cannot be used for grammars ({_sentence(str(error))})"
        raise ConfigError("tokenizer", tokenizer, problem, "serve a model with a tokenizer of bytes") from error
    return LlguidanceBackend(tokenizer=read)


def _problem_of(matcher: LLMatcher) -> str:
    return _sentence(matcher.get_error())


def _sentence(text: str) -> str:
    """Return an error text of the library in one line. Some show the place in a regular expression on several lines."""
    words = " ".join(text.replace("<non-verbose/>", "").split())
    return words[:_MAX_PROBLEM_CHARACTERS].rstrip(" .:;") or "no reason is known"
