"""ComputeGate: whether a scheduler may admit and compute requests now."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ComputeGate", "NullComputeGate"]


class ComputeGate(Protocol):
    """What control requests allow the scheduler to do: `QuiesceState`. A scheduler reads it when it builds a batch."""

    @property
    def can_admit(self) -> bool:
        """Whether waiting requests may start to run."""
        ...

    @property
    def can_compute(self) -> bool:
        """Whether running requests may continue."""
        ...


class NullComputeGate:
    """The gate of a scheduler that takes no control requests: always open."""

    can_admit = True
    can_compute = True
