"""Where components note the decisions that all ranks of a replica take alike."""

from __future__ import annotations

from typing import ClassVar, Protocol

from scheduler_components.values import DecisionStats

__all__ = ["DecisionSink", "NullDecisionLog"]


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
