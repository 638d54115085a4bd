"""Text that came over the network, made safe to print."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Put ``?`` for each line break and control character: a peer must neither steer the terminal nor fake a line."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
