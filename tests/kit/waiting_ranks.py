"""``AgreedQueue`` as the part that ``AGREEMENT_CHECKS`` exercise. Processes import it by name."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_components.agreed_queue import AgreedQueue
from scheduler_components.agreement import ParallelGroups
from scheduler_components.step_agreement import StepAgreement

__all__ = ["AgreedRank", "open_agreed_rank"]


class AgreedRank:
    """One rank's ``AgreedQueue`` as the only part of a ``StepAgreement``."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        self.queue = AgreedQueue[str](name="grammar")
        self.agreement = StepAgreement(groups=groups, parts=[self.queue], clock=clock, leads=leads)

    def add(self, rid: str, timeout_s: float) -> bool:
        return self.queue.add(rid, rid, timeout_s=timeout_s)

    def report(self, rid: str, is_ready: bool) -> None:
        if is_ready:
            self.queue.on_ready(rid)
        else:
            self.queue.on_failed(rid, "this rank cannot")

    def cancel(self, rid: str) -> object:
        return self.queue.cancel(rid)

    def step(self, step: int) -> list[tuple[str, str]]:
        self.agreement.step(step)
        return [(departure.rid, departure.reason) for departure in self.queue.pop_departures()]


def open_agreed_rank(groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> AgreedRank:
    """Open the queue of one rank."""
    return AgreedRank(groups, clock, leads)
