"""Turn streamed tokens into text: whole characters, up to the first stop string. Pure.

Two kinds of text must wait. A character may need several tokens, so text that ends in U+FFFD waits for more tokens.
Text that may begin a stop string waits until it does or does not. The rules:

- The joined pieces equal the text of all tokens up to the stop string, for any split of the tokens.
- Tokens are decoded together with the tokens before them, because some tokenizers write a space between two words and
  none before the first.
- The stop string that ends first ends the text. If two end together, the longer one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_engine.text.text_tokenizer import TextTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LATE_TOKENS = 3
"""A character has at most four bytes. Bytes that three more tokens do not complete are no character."""

_UNWRITTEN_TOKENS = 64
"""The most tokens without text, such as special tokens, that are decoded again with later ones. Bounds the cost."""


@dataclass(slots=True, kw_only=True)
class IncrementalDetokenizer:
    """Convert the tokens of one output to text.

    Attributes:
        codec: the model's tokenizer.
        stops: non-empty strings that end the text.
        include_stop_str: whether the text includes the stop string.
        matched: the stop string that ended the text; None before.
    """

    codec: TextTokenizer
    stops: tuple[str, ...] = ()
    include_stop_str: bool = False
    matched: str | None = None
    _token_ids: list[int] = field(default_factory=list, repr=False)  # the last decoded tokens, then the waiting ones
    _num_read: int = field(default=0, repr=False)
    _held: str = field(default="", repr=False)  # possible beginning of a stop string

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text that these tokens make certain; nothing after a stop string.

        Args:
            token_ids: the next tokens.
            is_last: no tokens follow, so return all text.
        """
        if self.matched is not None:
            return ""
        text = self._decode(token_ids, is_last=is_last)
        return self._up_to_stop(text, is_last=is_last) if self.stops else text

    def _decode(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        self._token_ids += token_ids
        num_certain, text = self._certain(is_last=is_last)
        before = self.codec.decode(self._token_ids[: self._num_read]) if self._num_read else ""
        num_new = num_certain - self._num_read
        if len(text) <= len(before) and num_new <= _UNWRITTEN_TOKENS:
            return ""
        del self._token_ids[: self._num_read]
        self._num_read = num_new
        return text[len(before) :]

    def _certain(self, *, is_last: bool) -> tuple[int, str]:
        """Return how many tokens form whole characters, and their text. Later tokens may begin a character."""
        num_late = 0  # without tokens that have no text, which may be between the bytes of a character
        for num_certain in range(len(self._token_ids), self._num_read, -1):
            text = self.codec.decode(self._token_ids[:num_certain])
            if is_last or num_late == _LATE_TOKENS or not text.endswith(_REPLACEMENT):
                return num_certain, text
            num_late += bool(self.codec.decode(self._token_ids[num_certain - 1 : num_certain]))
        return self._num_read, ""

    def _up_to_stop(self, text: str, *, is_last: bool) -> str:
        held = self._held + text
        found = [(start + len(stop), start, stop) for stop in self.stops if (start := held.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return held[: end if self.include_stop_str else start]
        sure = len(held) if is_last else len(held) - self._possible_stop(held)
        self._held = held[sure:]
        return held[:sure]

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is a prefix of a stop string."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
