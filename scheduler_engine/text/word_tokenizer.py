"""A tokenizer of words for the simulated device, which invents its tokens.

The word of a token spells its number in syllables. Generated text therefore encodes to the same tokens, and the next
turn of a chat finds its prefix in the cache. Any other word becomes the token of its hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import attrs

from scheduler_components._internal.validators import integer_validator
from scheduler_engine.text.text_tokenizer import ChatMessage

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")
_DIGITS = {syllable: digit for digit, syllable in enumerate(_SYLLABLES, start=1)}
_BASE = len(_SYLLABLES)
_NUM_IDS = 2**32
_LONGEST_WORD = 12  # characters of six syllables: five spell 3.3 billion ids, and 4.3 are needed


@attrs.frozen(kw_only=True)
class WordTokenizer:
    """A ``TextTokenizer`` without a vocabulary: each of the 2**32 ids has a word, preceded by a space.

    Attributes:
        hashed_ids: unknown words become smaller ids.
    """

    hashed_ids: int = attrs.field(default=32_000, validator=integer_validator())

    @property
    def vocab_size(self) -> int:
        return _NUM_IDS

    @property
    def context_tokens(self) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        return [self._token(word) for word in text.split()]

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        turns = (f"<|{message.role}|> {message.content} <|end|>" for message in messages)
        return self.encode(" ".join((*turns, "<|assistant|>")))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f" {_spell(token)}" for token in token_ids)

    def to_json(self) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def _token(self, word: str) -> int:
        token = _read(word)
        return crc32(word.encode(errors="surrogatepass")) % self.hashed_ids if token is None else token


def _spell(token: int) -> str:
    """Spell a number by bijective numeration: each number has one word, and each word of syllables one number."""
    syllables, rest = [], token + 1
    while rest:
        rest, digit = divmod(rest - 1, _BASE)
        syllables.append(_SYLLABLES[digit])
    return "".join(reversed(syllables))


def _read(word: str) -> int | None:
    """Return the number that ``_spell`` spells so; None for any other word."""
    if len(word) % 2 or len(word) > _LONGEST_WORD:
        return None
    value = 0
    for start in range(0, len(word), 2):
        digit = _DIGITS.get(word[start : start + 2])
        if digit is None:
            return None
        value = value * _BASE + digit
    return value - 1 if 0 < value <= _NUM_IDS else None
