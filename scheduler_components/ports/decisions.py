"""Decisions that all ranks of a replica take alike: where components note them, and who receives a dump of them."""

from __future__ import annotations

from typing import ClassVar, Protocol

from scheduler_components.values import DecisionDump, DecisionStats

__all__ = ["DecisionSink", "DivergenceSink", "NullDecisionLog", "NullDivergenceSink"]


class DecisionSink(Protocol):
    """Where a component notes its decisions: `DecisionLog`.

    Every rank of a replica notes the same decisions in the same order, so a value never depends on the rank, its clock
    or its threads. Ids of objects and addresses are no values.

    Attributes:
        wants_decisions: False if notes are dropped, so that a caller need not compute expensive values.
    """

    @property
    def wants_decisions(self) -> bool: ...

    def note(self, kind: str, *values: int | str) -> None:
        """Append one decision. Must not fail."""
        ...


class NullDecisionLog:
    """The log of a component or a scheduler whose decisions nothing compares."""

    wants_decisions: ClassVar[bool] = False
    tip: ClassVar[int] = 0
    agreed_tip: ClassVar[int] = 0

    def note(self, kind: str, *values: int | str) -> None:
        pass

    def fill(self, proposal: object) -> None:
        pass

    def apply(self, step: int, agreed: object) -> None:
        pass

    def stats(self) -> DecisionStats:
        return DecisionStats()


class DivergenceSink(Protocol):
    """Receives the recent decisions of a rank when the ranks have diverged, for example to write them to a file."""

    def write(self, dump: DecisionDump) -> None:
        """Store the dump. An exception is counted and logged."""
        ...


class NullDivergenceSink:
    """The sink of a log that writes no dumps."""

    def write(self, dump: DecisionDump) -> None:
        pass
