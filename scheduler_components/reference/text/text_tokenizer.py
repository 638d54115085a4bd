"""The port of a model's text: what turns it into tokens and back. Used in the serving process, never by a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

__all__ = [
    "ChatMessage",
    "TextTokenizer",
]


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation.

    Attributes:
        role: ``system``, ``user`` or ``assistant``; a chat template may know others.
        content: its text.
    """

    role: str
    content: str


class TextTokenizer(Protocol):
    """Text to tokens and back, as one model has it. May be called by several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """The most positions that the model was made for; None where that is no matter of the model."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that the model wants before each prompt."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation, up to where the model's next answer begins.

        Raises:
            ConfigError: the model has no chat template, or the template does not take these messages.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens. Bytes that are no character yet become U+FFFD."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return how one token is written, special tokens too."""
        ...
