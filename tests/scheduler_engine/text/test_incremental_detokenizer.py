"""The text of an output while its tokens arrive: whole characters, up to the first stop string, for any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_engine.text.incremental_detokenizer import IncrementalDetokenizer
from scheduler_engine.text.text_tokenizer import ChatMessage


class ByteCodec:
    """Each token is a byte of UTF-8, and a token of 256 is special."""

    vocab_size = 257
    context_tokens = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def to_json(self) -> str:
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


class SpacedCodec(ByteCodec):
    """Each token is a letter with a space before it except the first, as in SentencePiece."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(chr(token) for token in token_ids)


def pieces(text: IncrementalDetokenizer, tokens: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Push ``tokens`` in parts that end at ``cuts``."""
    ends = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    parts = [tokens[start:end] for start, end in pairwise(ends)] or [tokens]
    return [text.push(part, is_last=number == len(parts)) for number, part in enumerate(parts, start=1)]


CUTS = st.lists(st.integers(0, 100), max_size=20)


@given(st.text(max_size=30), CUTS)
@example("a😀b", range(10))
@example("x" * 40 + "😀", [41, 42, 43])
def test_pieces_are_the_whole_text_in_whole_characters(text: str, cuts: Sequence[int]) -> None:
    tokens = ByteCodec().encode(text)
    got = pieces(IncrementalDetokenizer(codec=ByteCodec()), tokens, cuts)
    assert "".join(got) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in got) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.text(max_size=12), st.lists(st.integers(0, 60), max_size=12), CUTS)
@example("😀", [1, 2, 3], range(10))
@example("a😀b", [2, 2, 2, 4], range(10))
def test_tokens_without_text_do_not_split_a_character(text: str, places: list[int], cuts: Sequence[int]) -> None:
    tokens = ByteCodec().encode(text)
    for place in places:
        tokens.insert(place % (len(tokens) + 1), 256)
    got = pieces(IncrementalDetokenizer(codec=ByteCodec()), tokens, cuts)
    assert "".join(got) == text


@given(st.lists(st.integers(0, 256), max_size=30), CUTS)
def test_pieces_of_invalid_bytes_are_the_whole_text_too(tokens: list[int], cuts: Sequence[int]) -> None:
    got = pieces(IncrementalDetokenizer(codec=ByteCodec()), tokens, cuts)
    assert "".join(got) == ByteCodec().decode(tokens)


@given(st.lists(st.integers(97, 122), max_size=30), CUTS)
def test_spaces_between_tokens_are_kept(tokens: list[int], cuts: Sequence[int]) -> None:
    got = pieces(IncrementalDetokenizer(codec=SpacedCodec()), tokens, cuts)
    assert "".join(got) == SpacedCodec().decode(tokens)


def test_bytes_that_never_become_a_character_are_emitted() -> None:
    text = IncrementalDetokenizer(codec=ByteCodec())
    got = [text.push([0x80]) for _ in range(100)]
    assert "".join(got).count("\N{REPLACEMENT CHARACTER}") == 97


def test_special_tokens_are_decoded_once() -> None:
    decoded: list[int] = []

    class CountingCodec(ByteCodec):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    text = IncrementalDetokenizer(codec=CountingCodec())
    assert "".join(text.push([256]) for _ in range(1000)) == ""
    assert max(decoded) < 200
    assert text.push([65]) == "A"


def reference_stop(text: str, stops: Sequence[str], *, include_stop_str: bool) -> tuple[str, str | None]:
    """The rule, read from left to right."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include_stop_str else end - len(longest)], longest
    return text, None


LETTERS = st.text("abc", max_size=20)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


@given(LETTERS, STOPS, CUTS, st.booleans())
@example("abab", ["bab", "abc"], [1, 2, 3], False)
@example("abc", ["abc", "b"], [], False)
@example("aab", ["ab", "aab", "b"], [1, 2], False)
def test_the_first_stop_string_ends_the_text(
    text: str, stops: list[str], cuts: Sequence[int], include_stop_str: bool
) -> None:
    codec = ByteCodec()
    output = IncrementalDetokenizer(codec=codec, stops=tuple(stops), include_stop_str=include_stop_str)
    got = "".join(pieces(output, codec.encode(text), cuts))
    assert (got, output.matched) == reference_stop(text, stops, include_stop_str=include_stop_str)
    assert output.push(codec.encode("more"), is_last=True) in ("", "more")
    assert output.matched is None or output.push(codec.encode("more")) == ""


@pytest.mark.parametrize(("tokens", "piece"), [("abx", "abx"), ("abs", "ab"), ("absto", "ab"), ("abstx", "abstx")])
def test_only_a_possible_start_of_a_stop_string_is_held_back(tokens: str, piece: str) -> None:
    codec = ByteCodec()
    assert IncrementalDetokenizer(codec=codec, stops=("stop",)).push(codec.encode(tokens)) == piece
