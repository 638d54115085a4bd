"""Grammars of a few token ids, and backends whose compilations end when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_components.errors import GrammarError
from scheduler_components.values import GrammarKey

ANY_DIGITS = GrammarKey("regex", "[0-9]+")


def bitmask(tokens: Sequence[int], size: int = 8) -> bytes:
    """The mask that allows these tokens."""
    return bytes(sum(1 << bit for bit in range(8) if at * 8 + bit in tokens) for at in range(size))


def tokens_of(mask: bytes) -> list[int]:
    return [at for at in range(len(mask) * 8) if mask[at // 8] >> at % 8 & 1]


@dataclass
class PathMatcher:
    """The ``GrammarMatcher`` of a ``PathGrammar``."""

    choices: Sequence[Sequence[int]]
    accepted: list[int] = field(default_factory=list)

    def next_bitmask(self) -> bytes:
        if len(self.accepted) == len(self.choices):
            raise GrammarError("the path has ended")
        return bitmask(self.choices[len(self.accepted)])

    def accept_token(self, token_id: int) -> None:
        if token_id not in self.choices[len(self.accepted)]:
            raise GrammarError(f"token {token_id} is not on the path")
        self.accepted.append(token_id)


@dataclass
class PathGrammar:
    """A ``CompiledGrammar`` that allows the tokens of ``choices[n]`` at position n of the output."""

    choices: Sequence[Sequence[int]]
    num_matchers: int = 0

    def new_matcher(self) -> PathMatcher:
        self.num_matchers += 1
        return PathMatcher(self.choices)


@dataclass
class GatedBackend:
    """A ``GrammarBackend``: ``{source: error or None}``; a compilation waits for its ``gate``, if it has one."""

    outcomes: Mapping[str, BaseException | None] = field(default_factory=dict)
    gates: Mapping[str, threading.Event] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)

    def compile(self, key: GrammarKey) -> PathGrammar:
        self.begun.append(key.source)
        if (gate := self.gates.get(key.source)) is not None:
            assert gate.wait(30)
        if (error := self.outcomes.get(key.source)) is not None:
            raise error
        return PathGrammar([[len(key.source)]])
