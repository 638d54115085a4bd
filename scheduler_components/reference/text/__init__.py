"""Text: tokens of a prompt, text of an output. In the serving process, never in a rank's."""

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.reference.text.codec import ChatMessage, TextCodec
from scheduler_components.reference.text.output_text import OutputText
from scheduler_components.reference.text.words import WordCodec

if TYPE_CHECKING:
    from scheduler_components.reference.text.tokenizer import ModelCodec, open_model_codec

__all__ = [
    "ChatMessage",
    "ModelCodec",
    "OutputText",
    "TextCodec",
    "WordCodec",
    "open_model_codec",
]

__getattr__ = lazy_names(
    __name__,
    {"scheduler_components.reference.text.tokenizer": "ModelCodec open_model_codec"},  # needs transformers
)
