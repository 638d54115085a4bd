"""Text: tokens of a prompt, text of an output. In the serving process, never in a rank's."""

from scheduler_components.reference.text.codec import ChatMessage, TextCodec
from scheduler_components.reference.text.output_text import OutputText
from scheduler_components.reference.text.words import WordCodec

__all__ = [
    "ChatMessage",
    "OutputText",
    "TextCodec",
    "WordCodec",
]
