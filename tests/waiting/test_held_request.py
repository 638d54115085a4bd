"""The state of a grammar follows from the output tokens, however often it is computed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.grammars import PathGrammar, tokens_of

from scheduler_components.errors import GrammarError
from scheduler_components.waiting.held_request import RequestGrammar

CHOICES = [[position, position + 1] for position in range(12)]
PROMPT = [60, 61, 62]


@given(st.lists(st.integers(0, 11), max_size=12), st.data())
def test_the_mask_depends_on_the_output_alone(lengths: list[int], data: st.DataObject) -> None:
    """Outputs of any length in any order, as if tokens were taken back."""
    output = [data.draw(st.sampled_from(choice)) for choice in CHOICES]
    grammar = RequestGrammar(PathGrammar(CHOICES), num_prompt_tokens=len(PROMPT))
    for length in lengths:
        assert tokens_of(grammar.next_bitmask([*PROMPT, *output[:length]])) == CHOICES[length]


def test_a_step_accepts_only_its_new_tokens() -> None:
    compiled = PathGrammar(CHOICES)
    grammar = RequestGrammar(compiled, num_prompt_tokens=0)
    for length in range(12):
        grammar.next_bitmask(range(length))
        assert repr(grammar) == f"<RequestGrammar: {length} tokens accepted>"
    assert compiled.num_matchers == 1


def test_a_token_that_does_not_match_is_an_error() -> None:
    grammar = RequestGrammar(PathGrammar(CHOICES), num_prompt_tokens=0)
    with pytest.raises(GrammarError, match="token 9 is not on the path"):
        grammar.next_bitmask([0, 9])
