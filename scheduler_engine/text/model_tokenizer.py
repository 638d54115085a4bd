"""Tokenize for a real model with its own tokenizer and chat template, as transformers loads them.

The code calls the fast tokenizer directly. The transformers layers around it set options before each call and are
therefore not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scheduler_components import ConfigError
from scheduler_components.errors import first_line
from scheduler_engine.text.text_tokenizer import ChatMessage


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelTokenizer:
    """The ``TextTokenizer`` of a model. ``open_model_tokenizer`` makes it.

    Attributes:
        tokenizer: converts text to tokens and back.
        templates: provides the chat template.
        vocab_size, context_tokens: the model's; the tokenizer may know fewer tokens.
    """

    tokenizer: Tokenizer
    templates: PreTrainedTokenizerFast
    vocab_size: int
    context_tokens: int | None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        if not self.templates.chat_template:
            problem = "need a chat template, and the model has none"
            raise ConfigError("messages", len(messages), problem, "send a prompt")
        said = [msgspec.to_builtins(message) for message in messages]
        try:
            text = self.templates.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            problem = f"do not fit the model's chat template ({first_line(error)})"
            raise ConfigError("messages", [each.role for each in messages], problem, "send other messages") from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids  # the template adds them
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids))
        return text

    def to_json(self) -> str:
        text: str = self.tokenizer.to_str()
        return text

    def token_text(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def open_model_tokenizer(path: str | Path, *, vocab_size: int, context_tokens: int | None) -> ModelTokenizer:
    """Load the tokenizer of a model.

    Args:
        path: the model's folder or ``.gguf`` file.
        vocab_size, context_tokens: the model's.

    Raises:
        ConfigError: the model has no tokenizer, or one that the library ``tokenizers`` does not implement.
    """
    place = Path(path).absolute()
    folder, file = (place.parent, {"gguf_file": place.name}) if place.is_file() else (place, {})
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **file)
    except Exception as error:
        problem = f"has no tokenizer that can be read ({first_line(error)})"
        raise ConfigError("model", str(place), problem, "put its tokenizer.json next to the weights") from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        problem = f"has a tokenizer of the kind {type(loaded).__name__}"
        raise ConfigError("model", str(place), problem, "give it a tokenizer.json")
    tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()  # some tokenizers are configured to truncate silently
    tokenizer.no_padding()
    return ModelTokenizer(tokenizer=tokenizer, templates=loaded, vocab_size=vocab_size, context_tokens=context_tokens)
