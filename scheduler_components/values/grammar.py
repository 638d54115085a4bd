"""Grammars that constrain the output of requests: their keys and statistics."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = ["GrammarKey", "GrammarKind", "GrammarStats"]

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


class GrammarStats(msgspec.Struct, frozen=True, gc=False):
    """Statistics of the grammars of one rank.

    Attributes:
        waiting: requests that wait until all ranks have their grammar.
        compiling: grammars that are being compiled, or wait for the thread.
        cached: compiled grammars in the cache.
        compiled, failed: grammars that this rank compiled, and grammars that it could not compile.
        cache_hits: requests whose grammar was in the cache when they arrived.
        joined: requests whose grammar was already being compiled when they arrived.
        cancelled: compilations that ended before they began because no request waited for them any more.
        expired, refused: requests that waited too long, and requests for which the queue had no room.
        compile_s: total time of all compilations.
    """

    waiting: int = 0
    compiling: int = 0
    cached: int = 0
    compiled: int = 0
    failed: int = 0
    cache_hits: int = 0
    joined: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    compile_s: float = 0.0
