"""Decisions that the ranks of a replica take alike, and the report on the first one that they did not."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = [
    "Decision",
    "DecisionDump",
    "DecisionKind",
    "DecisionValue",
    "DivergencePolicy",
    "DivergenceReport",
]

DecisionValue: TypeAlias = int | str | bool | float | None
"""A value of a decision. Notes give integers and strings; the others are legal to encode, for example a flag."""

DivergencePolicy: TypeAlias = Literal["count", "log", "dump", "stop"]
"""What a rank does about a divergence: count it; also log it; also write the recent decisions; or log it and stop."""


class DecisionKind(msgspec.Struct, frozen=True):
    """What the values of one kind of decision mean, for readers of a report.

    Attributes:
        names: names of the first values.
        each: names of the values that follow and repeat, for example once per request of a batch.
    """

    names: tuple[str, ...] = ()
    each: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """One noted decision.

    Attributes:
        kind: its kind, for example ``"evict"``.
        values: the facts that it consists of.
    """

    kind: str
    values: tuple[DecisionValue, ...] = ()


class DivergenceReport(msgspec.Struct, frozen=True):
    """The first decision that differed between the ranks of a replica. The same on every rank.

    Attributes:
        step: the last agreement before the decision. The decisions of step n follow agreement n.
        found_at_step: the agreement that found the difference.
        index: position of the decision among those of ``step``, from 0; -1 if it is unknown.
        decisions: rank -> its decision at this position; None if the rank took no further decision in the step.
        culprits: the ranks that differ from more than half of all ranks; empty if no majority agrees.
        reason: why the decision is unknown; empty if it is known.
    """

    step: int
    found_at_step: int
    index: int
    decisions: dict[int, Decision | None] = {}
    culprits: tuple[int, ...] = ()
    reason: str = ""

    @property
    def is_unknown(self) -> bool:
        """True if the ranks differ and the decision cannot be named."""
        return self.index < 0


class DecisionDump(msgspec.Struct, frozen=True):
    """The recent decisions of one rank when the ranks diverged.

    Attributes:
        rank: the global rank.
        report: the divergence.
        steps: (step, decisions of the step), oldest first. The last one contains the divergence.
    """

    rank: int
    report: DivergenceReport
    steps: tuple[tuple[int, tuple[Decision, ...]], ...]
