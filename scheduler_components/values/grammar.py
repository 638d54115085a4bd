"""Grammars that constrain the output of requests: their keys and statistics."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = ["GrammarKey", "GrammarKind"]

GrammarKind: TypeAlias = Literal["json_schema", "regex"]
"""The names of SGLang's sampling parameters."""


class GrammarKey(msgspec.Struct, frozen=True, gc=False):
    """The source of a grammar. Requests with equal keys share one compiled grammar.

    Attributes:
        kind: language of the source.
        source: a JSON schema as JSON text, or a regular expression that the whole output matches.
    """

    kind: GrammarKind
    source: str
