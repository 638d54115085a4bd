"""The port of a model's tokenizer. The serving process uses it; ranks do not, except to compile grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant``, or another role that the chat template knows.
        content: text of the message.
    """

    role: str
    content: str


class TextTokenizer(Protocol):
    """Convert text to tokens and back for one model. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Token ids are smaller."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """The model's maximum positions; None for no limit."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, including the special tokens that the model expects before a prompt."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation up to the beginning of the model's next answer.

        Raises:
            ConfigError: the model has no chat template, or the template rejects these messages.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens. Incomplete characters become U+FFFD."""
        ...

    def to_json(self) -> str:
        """Return the tokenizer in the format of the library ``tokenizers``; an empty text if it has no such form."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, also of a special token."""
        ...
