"""Text: tokens of a prompt, text of an output. In the serving process, never in a rank's."""

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.reference.text.codec import ChatMessage, TextTokenizer
from scheduler_components.reference.text.output_text import IncrementalDetokenizer
from scheduler_components.reference.text.words import WordTokenizer

if TYPE_CHECKING:
    from scheduler_components.reference.text.tokenizer import ModelTokenizer, open_model_tokenizer

__all__ = [
    "ChatMessage",
    "ModelTokenizer",
    "IncrementalDetokenizer",
    "TextTokenizer",
    "WordTokenizer",
    "open_model_tokenizer",
]

__getattr__ = lazy_exports(
    __name__,
    {"scheduler_components.reference.text.tokenizer": "ModelTokenizer open_model_tokenizer"},  # needs transformers
)
