"""Replace pieces of a text at places that a syntax tree names, and keep every other byte."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from scheduler_components.errors import ComponentError


@dataclass(slots=True)
class TextEdits:
    """Edits of one text. Places are lines from 1 and columns from 0 in bytes of UTF-8, as `ast` counts them."""

    _edits: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)

    def insert(self, line: int, column: int, new: str) -> None:
        """Insert before a place. The same insertion at the same place counts once."""
        self.replace(line, column, 0, new)

    def replace(self, line: int, column: int, length: int, new: str) -> None:
        """Replace `length` bytes at a place."""
        known = self._edits.setdefault((line, column), (length, new))
        if known != (length, new):
            raise ComponentError(f"two edits meet at line {line}, column {column}: {known[1]!r} and {new!r}")

    def __bool__(self) -> bool:
        return bool(self._edits)

    def apply(self, text: str) -> str:
        """Return the edited text."""
        pieces = re.split(rb"(\r\n|\r|\n)", text.encode())  # a form feed ends no line for the parser
        for (line, column), (length, new) in sorted(self._edits.items(), reverse=True):
            old = pieces[2 * line - 2]
            pieces[2 * line - 2] = old[:column] + new.encode() + old[column + length :]
        return b"".join(pieces).decode()
