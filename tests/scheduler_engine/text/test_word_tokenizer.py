"""Words for tokens: the decoded text is encoded as the same tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_engine.text.text_tokenizer import ChatMessage
from scheduler_engine.text.word_tokenizer import WordTokenizer

CODEC = WordTokenizer()
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(TOKENS)
def test_the_text_of_tokens_is_encoded_as_the_same_tokens(tokens: list[int]) -> None:
    assert CODEC.encode(CODEC.decode(tokens)) == tokens


@given(TOKENS, TOKENS)
def test_text_can_be_joined_at_any_token(first: list[int], second: list[int]) -> None:
    assert CODEC.decode(first) + CODEC.decode(second) == CODEC.decode(first + second)


@given(st.text(max_size=80))
def test_any_text_has_tokens(text: str) -> None:
    tokens = CODEC.encode(text)
    assert len(tokens) == len(text.split())
    assert all(0 <= token < CODEC.vocab_size for token in tokens)


def test_words_that_are_no_token_get_one_below_the_limit() -> None:
    words = ["The", "x", "zuzuzuzuzuzu", "bababababababa", "\ud800", "<|user|>"]
    tokens = WordTokenizer(hashed_ids=50).encode(" ".join(words))
    assert max(tokens) < 50


def test_the_last_word_is_the_last_token() -> None:
    assert CODEC.encode(CODEC.decode([2**32 - 1])) == [2**32 - 1]
    assert CODEC.token_text(0) == " ba"


@given(st.lists(st.builds(ChatMessage, st.sampled_from(("user", "system")), st.text(max_size=20)), max_size=4), TOKENS)
def test_a_continued_conversation_starts_with_its_history(history: list[ChatMessage], answer: list[int]) -> None:
    before = CODEC.encode_chat(history)
    after = CODEC.encode_chat([*history, ChatMessage("assistant", CODEC.decode(answer)), ChatMessage("user", "so")])
    assert after[: len(before) + len(answer)] == before + answer


def test_it_has_no_form_for_grammars() -> None:
    assert WordTokenizer().to_json() == ""
