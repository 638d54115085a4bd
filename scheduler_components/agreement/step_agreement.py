"""StepAgreement: one agreement of all ranks per step, to which several components contribute.

Each component that needs an agreement is an ``AgreementPart``. In every step all parts fill one proposal, the ranks
reduce it once, and every part applies the agreed values. One reduction therefore serves any number of components. It
takes place in every step, also when no part has anything to ask (see ``agreement``).

**The agreed clock.** The clocks of two ranks are never equal, and one rank may reach the same step later than another.
A timeout that each rank compares with its own clock therefore ends in different steps on different ranks. Here the
proposal carries the time of the leading rank only, and every part reads ``AgreedValues.now_s``, which is equal on all
ranks. Between two agreements this time does not advance. An idle replica takes no step, so its last agreed time may be
old: a wait that begins between two steps is counted from the next agreement.

**One order of parts.** The slots of a proposal are named and ordered, and the header of the proposal carries a digest
of them. Ranks with other parts, or with the same parts in another order, get a ``SyncDivergenceError``. A part that
finds a divergence raises in ``apply``, so put the part that explains divergences (``DecisionLog``) first.

A replica of one rank reduces nothing: its own values are the agreed ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal

__all__ = ["AgreementPart", "StepAgreement"]


class AgreementPart(Protocol):
    """A component whose facts travel in the step's agreement: ``AgreedQueue``, ``HiCacheStepper``."""

    def fill(self, proposal: Proposal) -> None:
        """Add this rank's facts to the proposal: the same slots on all ranks, in every step. Decide nothing."""
        ...

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Apply what all ranks agreed on. Depend on nothing that only this rank knows."""
        ...


@dataclass(slots=True, kw_only=True)
class StepAgreement:
    """Agrees once per step for all of its parts. Used on the scheduler's thread.

    Attributes:
        groups: reduces the proposals. Other components may use them on the same thread, in one order on all ranks.
        parts: the components that agree, in one order on all ranks.
        clock: monotonic seconds; read on the leading rank only.
        leads: whether this rank's clock is the agreed one; pass ``ParallelState.leads_replica``. If several ranks lead,
            the smallest of their clocks is the agreed one.
        now_s: the agreed time of the last step.
    """

    groups: ParallelGroups = field(default_factory=ParallelGroups)
    parts: Sequence[AgreementPart] = ()
    clock: Callable[[], float] = time.monotonic
    leads: bool = True
    now_s: float = field(default=0.0, init=False)

    def step(self, step: int) -> None:
        """Agree with the other ranks. Every rank calls it in every step, with the same number.

        Raises:
            SyncTimeoutError, SyncDivergenceError: a rank did not join, or joined with other parts or another step.
            ComponentError: a part found that the ranks have diverged.
        """
        self.apply(step, self.groups.reduce(self.propose(step)))

    def propose(self, step: int) -> Proposal:
        """Return this rank's proposal, for groups that are not ``ParallelGroups``."""
        proposal = Proposal("step", step=step)
        proposal.clock(self.clock() if self.leads else None)
        for part in self.parts:
            part.fill(proposal)
        return proposal

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Apply the agreed values of the proposal, for groups that are not ``ParallelGroups``."""
        self.now_s = agreed.now_s
        for part in self.parts:
            part.apply(step, agreed)
