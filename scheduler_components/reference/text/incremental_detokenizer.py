"""The text of an output while its tokens come: whole characters, up to the first stop string. Pure.

Two things hold text back. A character may need several tokens, so what ends in U+FFFD waits for more. And what may be
the beginning of a stop string waits until it is one or is not. The rules:

- Pieces put together are the text of all tokens, up to the stop string, however the tokens came.
- A few tokens are decoded together with those before them, since some tokenizers write a space between two words and
  none before the first.
- The stop string whose end comes first ends the text; of two that end together, the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_components.reference.text.text_tokenizer import TextTokenizer

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LATE_TOKENS = 3
"""A character has four bytes at most, so what three tokens more have not completed is none."""

_UNWRITTEN_TOKENS = 64
"""So many special tokens are decoded again with those that follow; waiting for a word that is never written costs."""


@dataclass(slots=True, kw_only=True)
class IncrementalDetokenizer:
    """Takes tokens, gives text.

    Attributes:
        codec: of the model.
        stops: strings that end the text; none of them is empty.
        include_stop_str: the string that ended the text is part of it.
        matched: the stop string that was found; None while there is none.
    """

    codec: TextTokenizer
    stops: tuple[str, ...] = ()
    include_stop_str: bool = False
    matched: str | None = None
    _token_ids: list[int] = field(default_factory=list, repr=False)  # those read last, then those that wait
    _num_read: int = field(default=0, repr=False)
    _held: str = field(default="", repr=False)  # may be the beginning of a stop string

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text that is certain with these tokens. Nothing comes after a stop string.

        Args:
            token_ids: the next ones.
            is_last: nothing follows, so nothing is held back.
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
        """How many of the tokens make whole characters, and their text; those behind them may begin one."""
        for num_certain in range(len(self._token_ids), self._num_read, -1):
            text = self.codec.decode(self._token_ids[:num_certain])
            num_late = len(self._token_ids) - num_certain
            if is_last or num_late == _LATE_TOKENS or not text.endswith(_REPLACEMENT):
                return num_certain, text
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
        """Length of the longest end of ``text`` with which a stop string begins."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
